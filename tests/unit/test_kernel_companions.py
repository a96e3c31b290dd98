"""What comes with a kernel's wrapper takes the wrapper's arguments: reference, torch, flops, bytes, inputs."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from tcache.bench.agreement import TOLERANCES, compare
from tcache.replay import KernelRef, load

ROOT = Path(__file__).parents[2]
SUFFIXES = ("reference", "torch", "flops", "bytes", "inputs", "tolerance")


def function(module, name):
    return load(KernelRef.parse(f"kernels/{module}.py:{name}"), ROOT)


def companions():
    for path in sorted((ROOT / "kernels").glob("[!_]*.py")):
        names = [line[4:].partition("(")[0] for line in path.read_text().splitlines() if line.startswith("def ")]
        for name in names:
            wrapper, _, suffix = name.rpartition("_")
            if suffix in SUFFIXES and wrapper in names:
                yield pytest.param(path.stem, wrapper, name, id=f"{path.stem}.{name}")


@pytest.mark.parametrize(("module", "wrapper", "companion"), list(companions()))
def test_arguments_are_the_wrappers(module, wrapper, companion):
    wanted = inspect.signature(function(module, wrapper)).parameters
    found = inspect.signature(function(module, companion)).parameters
    assert [(each.name, each.default) for each in found.values()] == [
        (each.name, each.default) for each in wanted.values()
    ]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


I32 = torch.int32


@pytest.mark.parametrize(
    ("module", "name", "arguments", "flops", "moved"),
    [
        ("matmul", "matmul", (meta(2, 3), meta(3, 5)), 60, 2 * (6 + 15 + 10)),
        ("matmul_persistent", "matmul_persistent", (meta(2, 3), meta(3, 5)), 60, 2 * (6 + 15 + 10)),
        ("matmul_decode", "matmul_decode", (meta(2, 3), meta(3, 5)), 60, 2 * (6 + 15 + 10)),
        ("linear", "linear", (meta(7, 2, 3), meta(5, 3), meta(5)), 14 * 30 + 70, 2 * (42 + 15 + 70 + 5)),
        # 4 tokens need 4 of 9 experts at most
        (
            "grouped_gemm",
            "grouped_gemm",
            (meta(4, 3), meta(9, 3, 5), meta(10, dtype=I32)),
            120,
            2 * (12 + 60 + 20) + 40,
        ),
        ("moe", "route", (meta(6, 8), 2), 48 * 5, 96 + 6 * 2 * 8),
        ("moe", "align", (meta(6, 2, dtype=I32), 8), 0, 12 * 12 + 36),
        ("moe_rows", "gather", (meta(6, 8), meta(12, dtype=I32), 2), 0, 18 * 16 + 48),
        ("moe_rows", "silu_gate", (meta(6, 8),), 120, 6 * 12 * 2),
        (
            *("moe_rows", "combine", (meta(12, 8), meta(6, 2, dtype=I32), meta(6, 2, dtype=torch.float32))),
            *(12 * 8 * 2, 18 * 16 + 12 * 8),
        ),
        (
            "moe_mlp",
            "moe_mlp",
            (meta(4, 8), meta(4, 3), meta(3, 12, 8), meta(3, 8, 6), 2),
            6 * 8 * 48,
            2 * (64 + 432) + 24,
        ),
    ],
)
def test_formulas_read_no_values(module, name, arguments, flops, moved):
    assert function(module, f"{name}_flops")(*arguments) == flops
    assert function(module, f"{name}_bytes")(*arguments) == moved


X, DY, VECTOR, ROWS = meta(6, 8), meta(6, 8), meta(8), meta(6, dtype=torch.float32)
N = 48  # elements of X: 96 bytes


@pytest.mark.parametrize(
    ("module", "name", "arguments", "flops", "moved"),
    [
        ("vector_add", "axpy", (2.0, VECTOR, VECTOR), 16, 3 * 16),  # a * x, + y
        ("elementwise", "affine_relu", (X, 2.0, VECTOR), 3 * N, 2 * 96 + 16),  # x * a, + b, < 0
        ("elementwise", "affine_relu_", (X, VECTOR, VECTOR), 3 * N, 2 * 96 + 32),
        ("softmax", "softmax", (X,), 5 * N, 2 * 96),  # maximum, x - maximum, exp, sum, * share
        # sum for the mean, x - mean, square, sum, * rstd; * weight; + bias
        ("layernorm", "layernorm", (X,), 5 * N, 2 * 96),
        ("layernorm", "layernorm", (X, VECTOR), 6 * N, 2 * 96 + 16),
        ("layernorm", "layernorm", (X, VECTOR, VECTOR), 7 * N, 2 * 96 + 32),
        ("rmsnorm", "rmsnorm", (X,), 3 * N, 2 * 96),  # square, sum, * rstd; * weight
        ("rmsnorm", "rmsnorm", (X, VECTOR), 4 * N, 2 * 96 + 16),
        # xhat: x - mean, * rstd; means: sum of g, g * xhat, its sum; dx: g - mean, xhat * mean, minus, * rstd;
        # g = dy * weight; the weight's gradient: dy * xhat, sum; the bias': sum
        ("layernorm", "layernorm_backward", (DY, X, None, ROWS, ROWS, False), 9 * N, 3 * 96 + 2 * 24),
        ("layernorm", "layernorm_backward", (DY, X, VECTOR, ROWS, ROWS, False), 12 * N, 3 * 96 + 2 * 24 + 2 * 16),
        ("layernorm", "layernorm_backward", (DY, X, VECTOR, ROWS, ROWS), 13 * N, 3 * 96 + 2 * 24 + 3 * 16),
        # xhat: x * rstd; mean: g * xhat, sum; dx: xhat * mean, g - that, * rstd; weight as above
        ("rmsnorm", "rmsnorm_backward", (DY, X, None, ROWS), 6 * N, 3 * 96 + 24),
        ("rmsnorm", "rmsnorm_backward", (DY, X, VECTOR, ROWS), 9 * N, 3 * 96 + 24 + 2 * 16),
        # |x|, maximum, * inverse, two bounds, and for int8 rounding; the first two only where scales are dynamic
        ("quantize", "quantize_int8", (X,), 6 * N, 96 + N + 24),
        ("quantize", "quantize_int8", (X, ROWS), 4 * N, 96 + N + 24),
        ("quantize", "quantize_fp8", (meta(6, 40),), 5 * 240, 3 * 240 + 24),
        ("quantize", "quantize_fp8", (meta(6, 40), 16), 5 * 240, 3 * 240 + 24 * 3),
        ("quantize", "quantize_fp8", (meta(6, 40), 16, meta(6, 3)), 3 * 240, 3 * 240 + 24 * 3),
        ("quantize", "dequantize", (meta(6, 8, dtype=torch.int8), ROWS), N, N + 24 + 96),
        (
            *("dequant_matmul", "dequant_matmul"),
            (meta(2, 3), meta(3, 5, dtype=torch.int8), meta(5, dtype=torch.float32)),
            *(60 + 10, 2 * 6 + 15 + 20 + 2 * 10),
        ),
    ],
)
def test_formulas_by_hand(module, name, arguments, flops, moved):
    assert function(module, f"{name}_flops")(*arguments) == flops
    assert function(module, f"{name}_bytes")(*arguments) == moved


def test_every_formula_has_a_count_by_hand():
    counted = {
        mark.args[1][at].values[1] if hasattr(mark.args[1][at], "values") else mark.args[1][at][1]
        for test in (test_formulas_by_hand, test_formulas_read_no_values)
        for mark in test.pytestmark
        for at in range(len(mark.args[1]))
    }
    # in tests/numerics/test_attention.py, and below
    elsewhere = {"attention", "attention_forward", "attention_backward", "decode_attention", "sparse_conv"}
    elsewhere |= {"sparse_conv_features_gradient", "sparse_conv_weight_gradient"}
    names = {each.values[2] for each in companions()}
    assert {name.removesuffix("_flops") for name in names if name.endswith("_flops")} <= counted | elsewhere


def test_what_is_read_by_several_counts_once():
    """A page that several sequences name, a row that several choices take."""
    q, lengths = meta(2, 4, 16), meta(2, dtype=I32)
    decode = function("decode_attention", "decode_attention_bytes")
    page, rest = 2 * 16 * 1 * 16 * 2, 2 * 2 * 4 * 16 * 2 + 2 * 4
    for pages, named, wanted in [(8, 3, 6), (8, 4, 8), (5, 4, 5), (1, 4, 1)]:
        cache, table = meta(pages, 16, 1, 16), meta(2, named, dtype=I32)
        assert decode(q, cache, cache, table, lengths) == wanted * page + table.numel() * 4 + rest
    combine = function("moe_rows", "combine_bytes")
    assert combine(meta(3, 8), meta(6, 2, dtype=I32), meta(6, 2)) == (3 + 6) * 16 + 12 * 6


def test_a_sparse_convolution_counts_the_neighbours_that_are_there():
    neighbours = torch.tensor([[-1, 0, 1], [0, 1, -1]], dtype=I32)
    features, weight = torch.zeros(2, 4), torch.zeros(3, 4, 5)
    assert function("sparse_conv", "sparse_conv_flops")(features, weight, neighbours) == 2 * 4 * 20
    assert function("sparse_conv", "sparse_conv_bytes")(features, weight, neighbours) == 4 * (8 + 60 + 10) + 24 + 24
    gradient, module = torch.zeros(2, 5), "sparse_conv_backward"
    to_features, to_weight = "sparse_conv_features_gradient", "sparse_conv_weight_gradient"
    assert function(module, f"{to_features}_flops")(gradient, weight, neighbours) == 2 * 4 * 20
    assert function(module, f"{to_features}_bytes")(gradient, weight, neighbours) == 4 * (10 + 60 + 8) + 24 + 24
    assert function(module, f"{to_weight}_flops")(features, gradient, neighbours) == 2 * 4 * 20
    assert function(module, f"{to_weight}_bytes")(features, gradient, neighbours) == 4 * (8 + 10 + 60) + 24


def ones(*shape, dtype=torch.bfloat16):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize("name", ["matmul", "matmul_persistent", "matmul_decode"])
def test_a_products_tolerance_grows_with_the_depth_and_the_inputs(name):
    tolerance = function(name, f"{name}_tolerance")
    assert tolerance(ones(4, 64), ones(64, 4)) == (1e-2, 1e-2)
    relative, absolute = tolerance(3 * ones(4, 28672), ones(28672, 4))
    assert (relative, round(absolute, 4)) == (1e-2, round(3 * 28672**1.5 / 2**26, 4))
    wide = [ones(4, 64, dtype=torch.float32), ones(64, 4, dtype=torch.float32)]
    assert tolerance(*wide) == (1e-2, 8 / 2**8)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_products_of_float8_may_be_neighbours(dtype):
    """Sums in another order round to another number here and there: one step away, which is no wrong result."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in [(64, 512), (512, 64)])
    exact = (a.double() @ b.double()).float()
    found, wanted = (exact * (1 + 2**-12)).to(dtype), exact.to(dtype)
    assert not torch.equal(found.float(), wanted.float())
    for name in ("matmul", "matmul_persistent", "matmul_decode"):
        tolerance = function(name, f"{name}_tolerance")(a, b)
        assert compare(found, wanted, tolerance).problem is None
        assert compare((exact * 1.5).to(dtype), wanted, tolerance).problem is not None
        assert tolerance[0] == TOLERANCES[str(dtype).removeprefix("torch.")][0]
        nothing = function(name, f"{name}_tolerance")(torch.zeros(64, 1).to(dtype), b[:1])
        assert nothing == TOLERANCES[str(dtype).removeprefix("torch.")]
    # 14 bits of 4096 / 32 partial sums, of up to 2 sqrt(4096) each
    one = torch.ones(2, 4096).to(dtype)
    assert function("matmul", "matmul_tolerance")(one, one.t())[1] == pytest.approx(4096 / 32 * 2**-13 * 2 * 64)


def test_a_linear_layers_reference_is_rounded_once():
    """256 + 1 is no bfloat16, 256 + 1 + 1 is one; the wrapper, which rounds in between, is inside of the tolerance."""
    x, weight, bias = ones(1, 2), ones(1, 2) * torch.tensor([256, 1]), ones(1)
    wanted = function("linear", "linear_reference")(x, weight, bias)
    assert wanted.item() == 258
    tolerance = function("linear", "linear_tolerance")(x, weight, bias)
    assert compare((x @ weight.t()) + bias, wanted, tolerance).problem is None


def test_tolerances_of_what_multiplies_in_other_ways():
    x, weight = ones(2, 4, 16), ones(8, 16)
    assert function("linear", "linear_tolerance")(x, weight) == (1e-2, 1e-2)
    assert function("linear", "linear_tolerance")(x, weight, -4 * ones(8)) == (1e-2, 1e-2 + 4 / 2**7)
    offsets = torch.tensor([0, 4], dtype=I32)
    assert function("grouped_gemm", "grouped_gemm_tolerance")(ones(4, 16), ones(1, 16, 8), offsets) == (1e-2, 1e-2)
    scale = torch.tensor([1.0, 2.0])
    int8 = torch.full((2, 4096), 100, dtype=torch.int8).t()
    assert function("dequant_matmul", "dequant_matmul_tolerance")(ones(4, 4096), int8, scale) == pytest.approx(
        (1e-2, 200 / 2**8)
    )
    # a result of sqrt(8 / 2) * (sqrt(16) * 1)**2: four steps of 2**-7 of that
    arguments = ones(3, 16), ones(3, 2), ones(2, 16, 16), ones(2, 16, 8), 2
    assert function("moe_mlp", "moe_mlp_tolerance")(*arguments) == pytest.approx((1e-2, 4 / 2**7 * 2 * 16))
    half = [ones(2**20, 2, dtype=torch.float16), ones(2**20, 4, dtype=torch.float16), torch.zeros(2**20, 1, dtype=I32)]
    name = "sparse_conv_weight_gradient_tolerance"
    assert function("sparse_conv_backward", name)(*half) == pytest.approx((1e-5, 1 + 2**-12))
    q, k = ones(1, 8, 2, 16), ones(1, 2, 2, 16)
    found = function("attention_backward", "attention_backward_tolerance")(5 * q, q, k, k, q, None)
    assert found == pytest.approx((2e-2, 2e-2 * 2 * 5))
