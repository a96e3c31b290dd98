"""Cases of the kernels over rows, on the device a fixture ``device`` names: the CPU's interpreter, or a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tcache.replay import KernelRef, load

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.float16: (1e-2, 1e-2), torch.bfloat16: (1e-2, 1e-2)}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
NAN, INF = float("nan"), float("inf")


def kernel(module, name):
    return load(KernelRef.parse(f"kernels/{module}.py:{name}"), ROOT)


def pair(module, name):
    """A wrapper and its reference."""
    return kernel(module, name), kernel(module, f"{name}_reference")


def close(got, wanted, rtol=None, atol=None):
    if isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                close(one, other, rtol, atol)
        return
    known = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(
        got, wanted, rtol=known[0] if rtol is None else rtol, atol=known[1] if atol is None else atol, equal_nan=True
    )


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, or as 85 where there is none: what a kernel does not write shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x):
        if x.dtype == torch.int8 or x.element_size() == 1:
            x.view(torch.uint8).fill_(85)
        elif x.is_floating_point():
            x.fill_(NAN)
        return x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    torch.manual_seed(0)


@pytest.fixture
def randn(device):
    def make(*shape, dtype=torch.float32, like=1.0, mean=0.0):
        return (torch.randn(*shape) * like + mean).to(dtype).to(device)

    return make


def strided(make, dtype=torch.float32):
    """Tensors of shape [5, 33] with other strides than a contiguous one's."""
    return {
        "transposed": make(33, 5, dtype=dtype).t(),
        "every other column": make(5, 66, dtype=dtype)[:, ::2],
        "rows apart, unaligned": make(5, 40, dtype=dtype)[:, 3:36],
        "one row expanded": make(1, 33, dtype=dtype).expand(5, 33),
        "one number expanded": make(1, 1, dtype=dtype).expand(5, 33),
    }


KINDS = pytest.mark.parametrize("kind", strided(torch.randn), ids=str)
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (5, 33), (2, 1, 64), (9, 1000), (3, 2049)], ids=str)
NOTHING = pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)


# softmax


@DTYPES
@SHAPES
def test_softmax(shape, dtype, randn):
    softmax, reference = pair("softmax", "softmax")
    x = randn(*shape, dtype=dtype, like=4.0)
    close(softmax(x), reference(x))


@KINDS
def test_softmax_of_any_strides(kind, randn):
    softmax, reference = pair("softmax", "softmax")
    x = strided(randn)[kind]
    close(softmax(x), reference(x))


@DTYPES
def test_softmax_of_rows_too_wide_for_one_pass(dtype, randn):
    softmax, reference = pair("softmax", "softmax")
    for columns in (32769, 50257):
        x = randn(2, columns, dtype=dtype, like=4.0)
        close(softmax(x), reference(x))
    x = randn(70000, 2, dtype=dtype).t()
    close(softmax(x), reference(x))


@pytest.mark.parametrize("columns", [9, 40000])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy under the interpreter
def test_softmax_of_special_values(columns, randn):
    softmax, reference = pair("softmax", "softmax")
    x = randn(6, columns)
    x[0] = -INF
    x[1, : columns - 1] = -INF
    x[2, 1:] = -INF
    x[3, 2] = INF
    x[4, 3] = NAN
    x[5] = 1e30
    got = softmax(x)
    close(got, reference(x))
    assert got[[0, 3, 4]].isnan().all()
    assert not got[[1, 2, 5]].isnan().any()


# norms


@DTYPES
@SHAPES
@pytest.mark.parametrize("vectors", ["none", "weight", "weight and bias"])
def test_layernorm(shape, dtype, vectors, randn):
    layernorm, reference = pair("layernorm", "layernorm")
    x = randn(*shape, dtype=dtype, mean=3.0)
    weight = randn(shape[-1], dtype=dtype) if vectors != "none" else None
    bias = randn(shape[-1], dtype=dtype) if "bias" in vectors else None
    close(layernorm(x, weight, bias), reference(x, weight, bias), *loose(dtype))


def loose(dtype):
    """A deviation from a mean of 3 has lost 2 bits to it, and the sums of a row have another order."""
    return (1e-5, 1e-5) if dtype == torch.float32 else (None, None)


@DTYPES
@SHAPES
@pytest.mark.parametrize("weighted", [True, False])
def test_rmsnorm(shape, dtype, weighted, randn):
    rmsnorm, reference = pair("rmsnorm", "rmsnorm")
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=torch.float32) if weighted else None
    close(rmsnorm(x, weight, 1e-5), reference(x, weight, 1e-5))


@KINDS
def test_norms_of_any_strides(kind, randn):
    x, weight = strided(randn)[kind], randn(33)
    for name in ("layernorm", "rmsnorm"):
        norm, reference = pair(name, name)
        # a deviation of 0 is divided by sqrt(eps): the mean's rounding, times 316
        close(norm(x, weight), reference(x, weight), 1e-5, 1e-4 if kind == "one number expanded" else 1e-5)


@DTYPES
def test_norms_of_rows_too_wide_for_one_pass(dtype, randn):
    for columns in (32770, 50257):
        x, weight = randn(2, columns, dtype=dtype, mean=1.0), randn(columns, dtype=dtype)
        layernorm, reference = pair("layernorm", "layernorm")
        close(layernorm(x, weight, weight), reference(x, weight, weight), *loose(dtype))
        rmsnorm, reference = pair("rmsnorm", "rmsnorm")
        close(rmsnorm(x, weight), reference(x, weight))


@pytest.mark.parametrize("columns", [1000, 40000])
def test_layernorm_far_from_zero(columns, randn):
    """A variance computed as a difference of means of squares would be lost here."""
    layernorm, reference = pair("layernorm", "layernorm")
    x = randn(2, columns, mean=1000.0)
    close(layernorm(x), reference(x), 1e-3, 1e-3)  # x itself has lost 10 bits to the mean


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_norms_of_special_values(randn):
    x = randn(4, 50)
    x[0, 3], x[1, 4], x[2] = NAN, INF, 0.0
    for name in ("layernorm", "rmsnorm"):
        norm, reference = pair(name, name)
        close(norm(x), reference(x), 1e-5, 1e-5)


def backward_arguments(name, randn, shape, dtype, biased):
    x, dy, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    forward = kernel(name, f"{name}_forward")
    statistics = forward(x, weight)[1:]
    return (dy, x, weight, *statistics, biased) if name == "layernorm" else (dy, x, weight, *statistics)


NORMS = pytest.mark.parametrize(("name", "biased"), [("layernorm", True), ("layernorm", False), ("rmsnorm", False)])
ORDERS = pytest.mark.parametrize("deterministic", [True, False], ids=["two stages", "atomic"])


def sums(dtype, rows):
    """Sums over rows cancel: what is left of ``rows`` terms of size 1 has their rounding."""
    return (1e-4, 1e-5 * rows) if dtype == torch.float32 else (1e-2, 1e-2 * max(1.0, rows**0.5))


@DTYPES
@NORMS
@ORDERS
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (2, 3, 64), (5, 5000)], ids=str)
def test_norm_backward(name, biased, shape, dtype, deterministic, randn):
    backward, reference = pair(name, f"{name}_backward")
    arguments = backward_arguments(name, randn, shape, dtype, biased)
    got, wanted = backward(*arguments, deterministic=deterministic), reference(*arguments)
    close(got[0], wanted[0], *((1e-4, 1e-5) if dtype == torch.float32 else (None, None)))
    close(tuple(got[1:]), tuple(wanted[1:]), *sums(dtype, arguments[1].numel() // shape[-1]))


@pytest.mark.parametrize("shape", [(40, 8200), (600, 10)], ids=str)
@pytest.mark.parametrize(("name", "biased"), [("layernorm", True), ("rmsnorm", False)])
def test_norm_backward_of_wide_rows_and_of_more_rows_than_programs(name, biased, shape, randn):
    backward, reference = pair(name, f"{name}_backward")
    arguments = backward_arguments(name, randn, shape, torch.float32, biased)
    got, wanted = backward(*arguments), reference(*arguments)
    close(got[0], wanted[0], 1e-4, 1e-5)
    close(tuple(got[1:]), tuple(wanted[1:]), *sums(torch.float32, shape[0]))


@NORMS
@KINDS
def test_norm_backward_of_any_strides(name, biased, kind, randn):
    backward, reference = pair(name, f"{name}_backward")
    x, weight = strided(randn)[kind], randn(33)
    statistics = kernel(name, f"{name}_forward")(x, weight)[1:]
    arguments = (strided(randn)[kind], x, weight, *statistics, *([biased] if name == "layernorm" else []))
    if "one number" in kind:  # a deviation of 0: divided by sqrt(eps), rounding is all there is
        return
    close(backward(*arguments), reference(*arguments), 1e-4, 1e-4)


def test_norm_backward_without_a_weight(randn):
    dy, x = randn(2, 7, 33)
    for name in ("layernorm", "rmsnorm"):
        backward, reference = pair(name, f"{name}_backward")
        statistics = kernel(name, f"{name}_forward")(x)[1:]
        more = [False] if name == "layernorm" else []
        got = backward(dy, x, None, *statistics, *more)
        assert got[1] is None
        close(got, reference(dy, x, None, *statistics, *more), 1e-4, 1e-5)


def test_norms_are_differentiable(randn):
    weights = {"layernorm": 2, "rmsnorm": 1}
    for name, count in weights.items():
        norm, torchs = kernel(name, name), kernel(name, f"{name}_torch")
        found = []
        leaves = [randn(3, 5, 40), *(randn(40) for _ in range(count))]
        dy = randn(3, 5, 40)
        for function in (norm, torchs):
            ours = [leaf.clone().requires_grad_() for leaf in leaves]
            function(*ours).backward(dy)
            found.append(tuple(leaf.grad for leaf in ours))
        close(found[0], found[1], 1e-4, 1e-4)
        x = leaves[0].clone().requires_grad_()
        norm(x, leaves[1]).sum().backward()  # dy with strides of 0
        assert x.grad.isfinite().all()


# elementwise


@DTYPES
@pytest.mark.parametrize("vectors", ["", "a", "b", "ab"])
@SHAPES
def test_affine_relu(shape, dtype, vectors, randn):
    x = randn(*shape, dtype=dtype)
    a = randn(shape[-1], dtype=dtype) if "a" in vectors else 1.5
    b = randn(shape[-1], dtype=torch.float32) if "b" in vectors else -0.25
    affine_relu, reference = pair("elementwise", "affine_relu")
    wanted = reference(x, a, b)
    close(affine_relu(x, a, b), wanted)
    place = x.clone()
    assert kernel("elementwise", "affine_relu_")(place, a, b) is place
    close(place, wanted)


@KINDS
def test_affine_relu_of_any_strides(kind, randn):
    affine_relu, reference = pair("elementwise", "affine_relu")
    for a in (2.0, randn(33)):
        x = strided(randn)[kind]
        wanted = reference(x, a, 0.5)
        close(affine_relu(x, a, 0.5), wanted)
        if "expanded" not in kind:
            kernel("elementwise", "affine_relu_")(x, a, 0.5)
            close(x, wanted)


def test_affine_relu_of_special_values(randn):
    affine_relu, reference = pair("elementwise", "affine_relu")
    x = randn(100)
    x[:3] = torch.tensor([NAN, INF, -INF])
    close(affine_relu(x, 2.0, 1.0), reference(x, 2.0, 1.0))
    assert affine_relu(x, 2.0, 1.0)[0].isnan()


# quantise


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


def test_quantize_rows_too_wide_for_one_pass(randn):
    quantize, reference = pair("quantize", "quantize_int8")
    x = randn(2, 40000)
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

MATMULS = pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 33, 130), (17, 31, 129), (70, 100, 300)])


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


# nothing at all, and what is refused


@NOTHING
def test_nothing(shape, device):
    x = torch.zeros(shape, device=device)
    weight = torch.zeros(shape[-1], device=device)
    for module, name, more in [
        ("softmax", "softmax", ()), ("layernorm", "layernorm", (weight, weight)), ("rmsnorm", "rmsnorm", (weight,)),
        ("elementwise", "affine_relu", (1.0, weight)), ("elementwise", "affine_relu_", (1.0, 2.0)),
    ]:  # fmt: skip
        assert kernel(module, name)(x, *more).shape == x.shape
    if len(shape) == 2:
        q, scale = kernel("quantize", "quantize_int8")(x)
        assert (q.shape, scale.shape) == (shape, shape[:1])
        assert kernel("quantize", "dequantize")(q, scale).shape == shape
    rows = x.numel() // shape[-1] if shape[-1] else 2 if len(shape) < 3 else 0
    if len(shape) == 2 and shape[0] == 0:
        empty = torch.zeros(rows, device=device)
        dx, dw, db = kernel("layernorm", "layernorm_backward")(x, x, weight, empty, empty)
        assert dx.shape == x.shape
        assert not dw.any()
        assert not db.any()


Z = torch.zeros
WHOLE = Z(2, 3, dtype=torch.int32)
DOUBLE = Z(2, 3, dtype=torch.float64)
META = Z(3, device="meta")
I8, F8 = Z(2, 3, dtype=torch.int8), Z(2, 3, dtype=torch.float8_e4m3fn)
HALF = Z(4, 2, dtype=torch.float16)

REFUSED = [
    *((module, name, (bad,)) for module, name in
      (("softmax", "softmax"), ("layernorm", "layernorm"), ("rmsnorm", "rmsnorm"))
      for bad in (WHOLE, DOUBLE, Z(()))),
    *(("elementwise", name, arguments) for name in ("affine_relu", "affine_relu_") for arguments in (
        (WHOLE, 1.0, 1.0), (Z(()), 1.0, 1.0), (Z(2, 3), Z(2), 1.0), (Z(2, 3), 1.0, Z(3, 1)), (Z(2, 3), META, 1.0),
        (Z(2, 3), Z(6)[::2], 1.0), (Z(2, 3), Z(3, dtype=torch.int32), 1.0))),
    ("elementwise", "affine_relu_", (Z(1, 3).expand(2, 3), 1.0, 1.0)),
    ("elementwise", "affine_relu_", (Z(2, 3, 4).transpose(0, 1), 1.0, Z(4))),
    *((name, name, arguments) for name in ("layernorm", "rmsnorm") for arguments in (
        (Z(2, 3), Z(2)), (Z(2, 3), Z(3, 1)), (Z(2, 3), META), (Z(2, 3), Z(3, dtype=torch.int8)), (Z(2, 3), Z(6)[::2]))),
    ("layernorm", "layernorm", (Z(2, 3), None, Z(3))),
    ("layernorm", "layernorm", (Z(2, 3), Z(3), Z(2))),
    *(("layernorm", "layernorm_backward", arguments) for arguments in (
        (Z(2, 4), Z(2, 3), Z(3), Z(2), Z(2)), (Z(2, 3), Z(2, 3), Z(3), Z(3), Z(2)), (Z(2, 3), Z(2, 3), Z(3), Z(2), Z(3)),
        (Z(2, 3).half(), Z(2, 3), Z(3), Z(2), Z(2)), (Z(2, 3), Z(2, 3), Z(3), Z(2).half(), Z(2)),
        (Z(2, 3), Z(2, 3), None, Z(2), Z(2)))),
    ("rmsnorm", "rmsnorm_backward", (Z(2, 3), Z(2, 3), Z(3), Z(4)[::2])),
    *(("quantize", name, (bad,)) for name in ("quantize_int8", "quantize_fp8") for bad in (WHOLE, DOUBLE, Z(3))),
    ("quantize", "quantize_int8", (Z(2, 3), Z(3))),
    ("quantize", "quantize_int8", (Z(2, 3), Z(2).half())),
    ("quantize", "quantize_fp8", (Z(2, 3), 100)),
    ("quantize", "quantize_fp8", (Z(2, 3), 16, Z(2))),
    *(("quantize", "dequantize", arguments) for arguments in (
        (Z(2, 3), Z(2)), (I8, Z(3)), (I8, Z(2).half()), (I8, META[:2]), (I8, Z(2), 16), (I8[0], Z(2)),
        (I8, Z(2), None, torch.float64))),
    *(("dequant_matmul", "dequant_matmul", arguments) for arguments in (
        (HALF, I8[:1], Z(3)), (HALF.float(), I8, Z(3)), (HALF, HALF.t(), Z(4)), (HALF, I8, Z(2)), (HALF, I8, META),
        (HALF, I8, Z(6)[::2]), (HALF, I8, Z(3).half()), (HALF[0], I8, Z(3)))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name", "arguments"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refused(module, name, arguments):
    with pytest.raises(ValueError, match="expected|no dimension|do not merge|goes with|share memory"):
        kernel(module, name)(*arguments)
