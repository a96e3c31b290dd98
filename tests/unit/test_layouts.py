"""Which attention kernel torch takes, by GPU, release and call; and that ghosts are laid out by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tcache.keys import find_gpu
from tcache.replay import machine
from tcache.replay.layouts import Attention, Machine

PLAIN = Attention("bfloat16", dims=4, plain=True, grouped=False, mask=False, learnt=False, width=64, value_width=64)
HOPPER = Machine(hip=False, capability=(9, 0), release=(2, 11))
AMPERE = replace(HOPPER, capability=(8, 0))
TURING = replace(HOPPER, capability=(7, 5))
AMD = replace(HOPPER, hip=True, capability=(9, 4))
OLDER = replace(HOPPER, release=(2, 9))
MASKED, SINGLE = replace(PLAIN, mask=True), replace(PLAIN, dtype="float32")
CHOICES = [
    (HOPPER, PLAIN, "cudnn"),
    (OLDER, PLAIN, "flash"),
    (AMPERE, PLAIN, "flash"),
    (AMD, PLAIN, "flash"),
    (replace(HOPPER, capability=(12, 0)), PLAIN, "flash"),
    (replace(HOPPER, capability=(10, 0)), PLAIN, "cudnn"),
    (TURING, PLAIN, "math"),
    (TURING, replace(PLAIN, dtype="float16"), "efficient"),
    (HOPPER, MASKED, "cudnn"),
    (AMPERE, MASKED, "efficient"),
    (AMD, MASKED, "efficient"),
    (HOPPER, replace(MASKED, learnt=True), "efficient"),
    (HOPPER, replace(MASKED, grouped=True), "cudnn"),
    (AMPERE, replace(MASKED, grouped=True), "math"),
    (replace(AMPERE, release=(2, 14)), replace(MASKED, grouped=True), "efficient"),
    (HOPPER, SINGLE, "efficient"),
    (HOPPER, replace(SINGLE, grouped=True), "math"),
    (HOPPER, replace(SINGLE, width=6, value_width=6), "math"),
    (HOPPER, replace(PLAIN, dtype="float64"), "math"),
    (HOPPER, replace(PLAIN, width=20, value_width=20), "flash"),
    (HOPPER, replace(PLAIN, width=512, value_width=512), "efficient"),
    (HOPPER, replace(PLAIN, value_width=32), "efficient"),
    (HOPPER, replace(PLAIN, dims=3), "math"),
    (HOPPER, replace(PLAIN, plain=False), "math"),
    (replace(HOPPER, enabled=frozenset({"math"})), PLAIN, "math"),
    (replace(HOPPER, enabled=frozenset({"efficient"})), PLAIN, "efficient"),
    (replace(HOPPER, enabled=frozenset({"flash", "math"})), MASKED, "math"),
]


@pytest.mark.parametrize(("here", "call", "wanted"), CHOICES)
def test_the_kernel_is_the_first_that_can(here, call, wanted):
    assert call.kernel(here) == wanted


SIDE_BY_SIDE, ONE_BY_ONE = (16384, 64, 256, 1), (16384, 4096, 64, 1)


@pytest.mark.parametrize(
    ("gpu", "wanted"), [("NVIDIA H200", ONE_BY_ONE), ("NVIDIA A100-SXM4-80GB", SIDE_BY_SIDE)], ids=["H200", "A100"]
)
def test_a_mask_on_queries_head_by_head(gpu, wanted):
    """cuDNN keeps the queries' layout, the kernel that takes its place writes heads side by side."""
    with machine(find_gpu(gpu)):
        q = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
        mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
        assert F.scaled_dot_product_attention(q, q, q, mask).stride() == wanted


def test_a_user_may_choose_the_kernel():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with machine(find_gpu("NVIDIA H200")):
        q = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        assert F.scaled_dot_product_attention(q, q, q).stride() == SIDE_BY_SIDE
        with sdpa_kernel([SDPBackend.MATH]):
            assert F.scaled_dot_product_attention(q, q, q).stride() == ONE_BY_ONE
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            r = q.contiguous()
            assert F.scaled_dot_product_attention(r, r, r).stride() == SIDE_BY_SIDE


def test_what_cannot_be_attended_to_is_refused_as_torch_refuses_it():
    with machine(find_gpu("NVIDIA H200")):
        q = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, torch.empty(2, 3, 64, 64, dtype=torch.bfloat16, device="cuda"), q)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, q.half(), q)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, q[..., :32], q)
        with pytest.raises(RuntimeError, match="is_causal"):
            F.scaled_dot_product_attention(q, q, q, torch.ones(64, 64, dtype=torch.bool, device="cuda"), is_causal=True)
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(q, q)


def test_tensors_of_the_cpu_are_left_alone():
    x, w = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last), torch.randn(4, 8, 3, 3)
    q = torch.randn(2, 64, 4, 64).transpose(1, 2)
    wanted = F.conv2d(x, w), F.scaled_dot_product_attention(q, q, q), F.pixel_unshuffle(x[:, :, :8, :8], 2)
    with machine(find_gpu("NVIDIA H200")):
        found = F.conv2d(x, w), F.scaled_dot_product_attention(q, q, q), F.pixel_unshuffle(x[:, :, :8, :8], 2)
    for one, other in zip(found, wanted, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
