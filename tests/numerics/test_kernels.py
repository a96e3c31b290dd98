"""The kernels' numbers under Triton's interpreter, against torch. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

from pathlib import Path

import torch

from tcache.replay import KernelRef, load

ROOT = Path(__file__).parents[2]
matmul, matmul_reference = (
    load(KernelRef.parse(f"kernels/matmul.py:{n}"), ROOT) for n in ("matmul", "matmul_reference")
)
axpy, axpy_reference = (load(KernelRef.parse(f"kernels/vector_add.py:{n}"), ROOT) for n in ("axpy", "axpy_reference"))
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.float16: (1e-2, 1e-2), torch.bfloat16: (1e-2, 1e-2)}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN: what a kernel does not write shows."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    torch.manual_seed(0)


def close(got, wanted):
    rtol, atol = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 127, 128, 129, 1000, 4097])
def test_axpy(n, dtype):
    x, y = torch.randn(2, n).to(dtype)
    close(axpy(2.5, x, y), axpy_reference(2.5, x, y))


def test_axpy_of_an_unaligned_view_and_of_special_values():
    x, y = torch.randn(2, 513)
    close(axpy(-1.0, x[1:], y[1:]), axpy_reference(-1.0, x[1:], y[1:]))
    x[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    close(axpy(0.5, x, y), axpy_reference(0.5, x, y))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3, 3), torch.zeros(3, 3)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float16)),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(6)[::2], torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, device="meta")),
    ],
)
def test_axpy_refuses(x, y):
    with pytest.raises(ValueError, match="expected"):
        axpy(1.0, x, y)


# The interpreter multiplies bfloat16 as the integers it stores them in; tests/gpu has bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 33, 130), (17, 31, 129), (16, 64, 128), (40, 100, 300)])
def test_matmul(m, n, k, dtype):
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    got, wanted = matmul(a, b), matmul_reference(a, b)
    if dtype == torch.float32:  # sums of up to 300 products in another order
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    else:
        close(got, wanted)


def test_matmul_of_any_strides():
    a, b = torch.randn(130, 19), torch.randn(2 * 35, 3 * 130)
    left, right = a.t(), b[::2, 1::3].t()
    assert not left.is_contiguous()
    assert not right.is_contiguous()
    torch.testing.assert_close(matmul(left, right), matmul_reference(left, right), rtol=1e-4, atol=1e-4)
    row = torch.randn(1, 130).expand(19, 130)  # stride 0
    torch.testing.assert_close(matmul(row, right), matmul_reference(row, right), rtol=1e-4, atol=1e-4)


def test_matmul_of_columns_far_apart():
    """Elements of a tile 2**31 apart and more; of 4.5 GB of addresses a megabyte is touched."""
    far, k = 17_000_000, 132
    storage = torch.UntypedStorage((far * (k - 1) + 2) * 2)
    a = torch.tensor([], dtype=torch.float16).set_(storage, 0, (2, k), (1, far))
    a.copy_(torch.randn(2, k))
    b = torch.randn(k, 8).half()
    close(matmul(a, b), matmul_reference(a, b))
    close(matmul(b.t(), a.t()), matmul_reference(b.t(), a.t()))


def test_matmul_of_nothing():
    assert matmul(torch.randn(0, 4), torch.randn(4, 3)).shape == (0, 3)
    assert matmul(torch.randn(2, 4), torch.randn(4, 0)).shape == (2, 0)
    assert torch.equal(matmul(torch.randn(2, 0), torch.randn(0, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 2)),
        (torch.zeros(2), torch.zeros(2, 2)),
        (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)),
        (torch.zeros(2, 3, dtype=torch.int8), torch.zeros(3, 2, dtype=torch.int8)),
        (torch.zeros(2, 3), torch.zeros(3, 2, device="meta")),
    ],
)
def test_matmul_refuses(a, b):
    with pytest.raises(ValueError, match="expected"):
        matmul(a, b)
