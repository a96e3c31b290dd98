"""``torch.autocast("cuda")`` on ghosts gives the types that torch documents for CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tcache.keys import find_gpu
from tcache.replay import machine
from tcache.replay.autocast import POLICIES, autocast_for_ghosts

H200 = find_gpu("NVIDIA H200")
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def half():
    with machine(H200), torch.autocast("cuda", dtype=HALF):
        yield lambda *shape, dtype=SINGLE: torch.empty(shape or (4, 4), device="cuda", dtype=dtype)


def test_the_lists_are_those_of_the_installed_torch():
    """Upstream registers a kernel for every operator that CUDA autocasts: none is missing here, none is invented."""
    ours = {f"aten::{name}" for text in POLICIES.values() for name in text.split()}
    theirs = {
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        if "imname" not in name and "names" not in name  # named tensors, gone since torch 2.12
    }
    assert theirs - {"aten::_cudnn_rnn"} <= ours  # of builds with cuDNN; meta tensors take the RNN of ATen
    assert ours - theirs <= {"aten::rms_norm", "aten::linalg_matrix_norm.str_ord"}  # newer than some supported torch


# https://pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
TO_HALF = {
    "matmul": lambda t: t() @ t(),
    "mm": lambda t: torch.mm(t(), t()),
    "bmm": lambda t: torch.bmm(t(2, 3, 4), t(2, 4, 5)),
    "addmm": lambda t: torch.addmm(t(), t(), t()),
    "addbmm": lambda t: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "mv": lambda t: torch.mv(t(), t(4)),
    "linear": lambda t: F.linear(t(), t()),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(), t()),
    "conv1d": lambda t: F.conv1d(t(1, 2, 8), t(3, 2, 3)),
    "conv2d": lambda t: F.conv2d(t(1, 2, 8, 8), t(3, 2, 3, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 2, 8, 8), t(2, 3, 3, 3)),
    "prelu": lambda t: F.prelu(t(), t(1)),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(), t(), t()]),
    "attention": lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "module": lambda t: nn.Linear(4, 3, device="cuda")(t()),
    "half and single": lambda t: t(dtype=torch.float16) @ t(),
}
TO_SINGLE = {
    "exp": lambda t: t().exp(),
    "log": lambda t: t().log(),
    "pow": lambda t: t() ** 2,
    "rsqrt": lambda t: t().rsqrt(),
    "reciprocal": lambda t: t().reciprocal(),
    "softmax": lambda t: t().softmax(-1),
    "log_softmax": lambda t: F.log_softmax(t(), -1),
    "layer_norm": lambda t: F.layer_norm(t(), (4,)),
    "group_norm": lambda t: F.group_norm(t(2, 4, 3), 2),
    "sum": lambda t: t().sum(),
    "sum dim": lambda t: t().sum(-1),
    "cumsum": lambda t: t().cumsum(0),
    "prod": lambda t: t().prod(),
    "norm": lambda t: t().norm(),
    "norm dim": lambda t: torch.norm(t(), 2, 1),
    "cross_entropy": lambda t: F.cross_entropy(t(), torch.zeros(4, dtype=torch.int64, device="cuda")),
    "mse_loss": lambda t: F.mse_loss(t(), t()),
    "l1_loss": lambda t: F.l1_loss(t(), t()),
    "kl_div": lambda t: F.kl_div(t(), t(), reduction="sum"),
    "softplus": lambda t: F.softplus(t()),
    "cosine_similarity": lambda t: F.cosine_similarity(t(), t()),
    "bce_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(), t()),
    "logsumexp": lambda t: t().logsumexp(0),
    "dist": lambda t: torch.dist(t(), t()),
}


@pytest.mark.parametrize("name", TO_HALF)
def test_to_the_lower_type(half, name):
    assert TO_HALF[name](half).dtype == HALF


@pytest.mark.parametrize("name", TO_SINGLE)
def test_to_float32(half, name):
    assert TO_SINGLE[name](lambda *shape: half(*shape, dtype=HALF)).dtype == SINGLE


def test_the_widest_type(half):
    low, high = half(dtype=HALF), half()
    assert torch.addcmul(low, low, low).dtype == HALF
    assert torch.addcmul(low, high, low).dtype == SINGLE
    assert torch.atan2(low, high).dtype == SINGLE
    assert torch.dot(half(4, dtype=HALF), half(4)).dtype == SINGLE
    assert torch.tensordot(low, high).dtype == SINGLE


def test_what_autocast_leaves_alone(half):
    low = half(dtype=HALF)
    assert (low + half()).dtype == SINGLE
    assert F.relu(low).dtype == HALF
    assert F.silu(low).dtype == HALF
    assert torch.cat([low, low]).dtype == HALF
    assert (half(dtype=DOUBLE) @ half(dtype=DOUBLE)).dtype == DOUBLE
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == SINGLE  # on the CPU
    assert low.softmax(-1, dtype=DOUBLE).dtype == DOUBLE
    assert low.sum(dtype=DOUBLE).dtype == DOUBLE
    with torch.autocast("cuda", enabled=False):
        assert (half() @ half()).dtype == SINGLE
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(half().sigmoid(), half())


def test_gradients_have_the_types_of_their_tensors(half):
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()
    data = half()
    data.requires_grad_()
    module(data).float().pow(2).mean().backward()
    assert data.grad.dtype == SINGLE
    assert {parameter.grad.dtype for parameter in module.parameters()} == {SINGLE}


def test_custom_functions_ask_for_their_types(half):
    class Asked(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx, value):
            ctx.dtype = value.dtype
            assert not torch.is_autocast_enabled("cuda")
            return value @ value

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return gradient.to(ctx.dtype)

    value = half().requires_grad_()
    assert Asked.apply(value).dtype == torch.float16
    Asked.apply(value).sum().backward()
    assert value.grad.dtype == SINGLE


def test_float16_and_state():
    with machine(H200):
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.get_autocast_dtype("cuda") == torch.float16
            assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype == torch.float16
        assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype == SINGLE


def test_nothing_is_left_behind():
    for _ in range(3):
        with autocast_for_ghosts():
            pass
    torch.set_autocast_enabled("cuda", True)  # noqa: FBT003
    try:
        value = torch.empty(2, 2, device="meta")
        assert (value @ value).dtype == SINGLE
    finally:
        torch.set_autocast_enabled("cuda", False)  # noqa: FBT003
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "AutocastPrivateUse1")
