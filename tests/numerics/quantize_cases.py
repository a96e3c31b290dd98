"""Cases of the quantising kernels and of the dequantising matmul, on the device a fixture ``device`` names."""

from __future__ import annotations

import pytest
import torch
from rowwise_cases import DTYPES, KINDS, close, kernel, only, pair, strided


def same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.cpu().float(), other.cpu().float())


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 33), (70, 1000), (2, 2049)], ids=str)
def test_quantize_int8(shape, dtype, randn):
    quantize, reference = pair("quantize", "quantize_int8")
    x = randn(*shape, dtype=dtype)
    same(quantize(x), reference(x))
    scale = x.float().abs().amax(-1) / 100
    same(quantize(x, scale), reference(x, scale))
    assert quantize(x)[0].abs().amax() == 127


@pytest.mark.parametrize("block", [None, 16, 128])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 128), (7, 1000)], ids=str)
def test_quantize_fp8(shape, block, randn, fp8):
    quantize, reference = pair("quantize", "quantize_fp8")
    x = randn(*shape, dtype=torch.bfloat16)
    same(quantize(x, block), reference(x, block))
    scale = reference(x, block)[1] * 1.25
    same(quantize(x, block, scale), reference(x, block, scale))


def test_quantize_streams_through_rows(monkeypatch, randn, fp8):
    x = randn(135, 8200, dtype=torch.float16)
    for name in ("quantize_int8", "quantize_fp8"):
        quantize, reference = pair("quantize", name)
        same(quantize(x[:3]), reference(x[:3]))
        same(quantize(x[:3].t().contiguous().t()), reference(x[:3]))
    only(monkeypatch, "quantize", "quantize_stream_kernel", PROGRAMS=132)
    quantize, reference = pair("quantize", "quantize_int8")
    same(quantize(x), reference(x))


@pytest.mark.parametrize("columns", [8193, 14336, 40000])
def test_quantize_wide_rows(columns, randn):
    quantize, reference = pair("quantize", "quantize_int8")
    x = randn(2, columns)
    same(quantize(x), reference(x))
    same(quantize(x, torch.full((2,), 0.01, device=x.device)), reference(x, torch.full((2,), 0.01, device=x.device)))


@KINDS
def test_quantize_of_any_strides(kind, randn):
    quantize, reference = pair("quantize", "quantize_int8")
    x = strided(randn)[kind]
    same(quantize(x), reference(x))
    dequantize, reference = pair("quantize", "dequantize")
    q = (x * 20).to(torch.int8)
    scale = randn(5).abs()
    close(dequantize(q, scale), reference(q, scale))


def test_rounding_is_to_the_nearest_even(device):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.0]], device=device)
    assert kernel("quantize", "quantize_int8")(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, 126, 0]]


def test_rows_of_zeros_and_static_scales_too_small(device):
    quantize = kernel("quantize", "quantize_int8")
    q, scale = quantize(torch.zeros(2, 20, device=device))
    assert not q.any()
    assert (scale > 0).all()
    q, scale = quantize(torch.zeros(2, 8193, device=device))
    assert not q.any()
    assert (scale > 0).all()
    x = torch.tensor([[1e9, -1e9, 0.0]], device=device)
    assert quantize(x, torch.ones(1, device=device))[0].tolist() == [[127, -127, 0]]


@DTYPES
@pytest.mark.parametrize("block", [None, 16, 128])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 128), (7, 1500)], ids=str)
def test_dequantize(shape, block, dtype, randn, device):
    dequantize, reference = pair("quantize", "dequantize")
    q = torch.randint(-127, 128, shape, dtype=torch.int8).to(device)
    scale = randn(shape[0]) if block is None else randn(shape[0], -(-shape[1] // block))
    close(dequantize(q, scale, block, dtype), reference(q, scale, block, dtype))


@pytest.mark.parametrize("block", [None, 128])
def test_fp8_there_and_back(block, randn, fp8):
    x = randn(9, 300)
    q, scale = kernel("quantize", "quantize_fp8")(x, block)
    back = kernel("quantize", "dequantize")(q, scale, block, torch.float32)
    close(back, kernel("quantize", "dequantize_reference")(q, scale, block, torch.float32))
    torch.testing.assert_close(back, x, rtol=2**-4, atol=float(scale.max()) * 2**-9)


# dequantising matmul

MATMULS = pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 33, 130), (17, 31, 129), (70, 100, 300), (64, 16, 64)]
)


@MATMULS
def test_dequant_matmul(m, n, k, half, randn, device):
    matmul, reference = pair("dequant_matmul", "dequant_matmul")
    a, scale = randn(m, k, dtype=half), randn(n).abs() * 0.01
    w = torch.randint(-127, 128, (n, k), dtype=torch.int8).to(device)
    close(matmul(a, w.t(), scale), reference(a, w.t(), scale))
    close(matmul(a, w.t().contiguous(), scale), reference(a, w.t(), scale))
    left = randn(k, m, dtype=half).t()
    close(matmul(left, w.t(), scale), reference(left, w.t(), scale))


@MATMULS
def test_dequant_matmul_of_fp8(m, n, k, half, randn, fp8):
    matmul, reference = pair("dequant_matmul", "dequant_matmul")
    a = randn(m, k, dtype=half)
    w, scale = kernel("quantize", "quantize_fp8_reference")(randn(n, k))
    close(matmul(a, w.t(), scale), reference(a, w.t(), scale))


def test_dequant_matmul_of_nothing(device):
    matmul = kernel("dequant_matmul", "dequant_matmul")

    def shape(m, k, n):
        a, w = (torch.zeros(*size, dtype=kind, device=device) for size, kind in
                (((m, k), torch.float16), ((k, n), torch.int8)))  # fmt: skip
        return matmul(a, w, torch.ones(n, device=device))

    assert shape(0, 4, 3).shape == (0, 3)
    assert shape(2, 4, 0).shape == (2, 0)
    assert torch.equal(shape(2, 0, 3).cpu(), torch.zeros(2, 3, dtype=torch.float16))
