"""Attention's numbers on a GPU: the interpreter's cases, bfloat16, every config, and sizes of real models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

import attention_cases as cases
from attention_cases import attention, attention_forward, decode_attention

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LARGE = [
    (1, 32, 8, 4096, 4096, 128, True),  # llama-8B
    (1, 64, 8, 2048, 2048, 128, True),  # llama-70B
    (8, 16, 16, 577, 577, 64, False),  # ViT-L
    (1, 8, 2, 1000, 7001, 128, True),  # a chunk of a prompt
    (2, 8, 8, 1537, 700, 64, True),
    (1, 4, 4, 1100, 1100, 256, True),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, and nothing is tuned: untuned shapes take the first config that fits."""
    monkeypatch.setenv("TCACHE_MODE", "lookup")
    empty, empty_like = torch.empty, torch.empty_like

    def poison(made):
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_forward(shape, dtype):
    cases.check_forward(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_backward(shape, dtype):
    cases.check_backward(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(shape, dtype):
    cases.check_forward(shape, dtype, "cuda")
    cases.check_backward(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_and_special_values(dtype):
    cases.check_layouts(dtype, "cuda")
    cases.check_special_values(dtype, "cuda")


@pytest.mark.parametrize(("name", "number"), cases.CONFIGS)
@pytest.mark.parametrize("dim", [64, 128])
def test_every_config(name, number, dim):
    from triton.runtime.errors import OutOfResources

    try:
        causal = (number % 2 == 0) == (dim == 128)
        cases.check_config(name, number, torch.bfloat16, "cuda", dim, (700, 1300), (causal,))
    except OutOfResources as error:
        if torch.cuda.get_device_capability() == (9, 0):
            raise
        pytest.skip(str(error))  # tuning passes it over


def test_more_than_32_bits_of_offsets():
    """The last rows lie 2**31 elements and more from the first."""
    stride = (1 << 31) // 200 + 128
    storage = torch.empty_strided((1, 1, 260, 64), (1, 1, stride, 1), device="cuda", dtype=torch.float16)
    storage.copy_(torch.randn(1, 1, 260, 64))
    got = attention_forward(storage, storage, storage)[0]
    cases.close(got, cases.attention_forward_reference(storage, storage, storage)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.PAGED, ids=str)
def test_decode(case, dtype):
    cases.check_decode(case, dtype, "cuda")
    cases.check_decode_of_strided_caches(dtype, "cuda")


def test_decode_of_wrong_indices():
    cases.check_decode_of_wrong_indices("cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [32, 64, 8])
def test_decode_large(heads, dtype):
    lengths = [8192, 1, 0, 4097, 777, 8191, 16, 5000]
    cases.check_decode((heads, 8, 128, 16, 512, lengths), dtype, "cuda")
    cases.check_decode((heads, 8, 128, 64, 128, lengths), dtype, "cuda")


def test_nothing_waits_for_the_gpu():
    """Forward, backward and decode are captured in a CUDA graph: anything that reads from the GPU would fail."""
    q, k, v = (x.requires_grad_() for x in cases.inputs((1, 4, 2, 200, 200, 64, True), torch.bfloat16, "cuda"))
    do = torch.randn_like(q)
    arguments = cases.paged((4, 2, 64, 16, 40, [600, 40]), torch.bfloat16, "cuda")

    def everything():
        return [*torch.autograd.grad(attention(q, k, v), (q, k, v), do), decode_attention(*arguments)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = everything()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = everything()
    graph.replay()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [s for s in LARGE if s[3] <= s[4]], ids=str)
def test_torchs_gradient_kernel_is_called_rightly(shape):
    """What the benchmark compares with computes the same."""
    q, k, v = cases.inputs(shape, torch.bfloat16, "cuda")
    do = torch.randn_like(q)
    o, lse = attention_forward(q, k, v, shape[-1])
    got = cases.kernel("attention_backward", "attention_backward_torch")(do, q, k, v, o, lse, shape[-1])
    wanted = cases.attention_backward_reference(do, q, k, v, o, lse, shape[-1])
    for mine, theirs in zip(got, wanted, strict=True):
        cases.close(mine, theirs, cases.GRADIENT_TOLERANCE)
    cases.close(cases.attention_torch(q, k, v, shape[-1]), o)
