"""Cases of the kernels over rows, on the device a fixture ``device`` names: the CPU's interpreter, or a GPU."""

from __future__ import annotations

import importlib
import inspect
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
    if wanted.element_size() == 1:
        got, wanted = got.float(), wanted.float()
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
@pytest.mark.parametrize(("rows", "columns"), [(2, 9000), (2, 16385), (1, 32769), (2, 50257), (65, 41001), (1, 530000)])
def test_softmax_of_wide_rows(rows, columns, dtype, randn):
    softmax, reference = pair("softmax", "softmax")
    x = randn(rows, columns, dtype=dtype, like=4.0)
    close(softmax(x), reference(x))


@pytest.mark.parametrize(("rows", "columns"), [(2, 10000), (2, 70000), (65, 33000)])
def test_softmax_of_wide_rows_of_any_strides(rows, columns, randn):
    softmax, reference = pair("softmax", "softmax")
    for x in (randn(columns, rows).t(), randn(1, columns).expand(rows, columns)):
        close(softmax(x), reference(x))


def only(monkeypatch, module, name, **wanted):
    """Leave a kernel the first of its configs that has these values."""
    tuner = kernel(module, name)
    kept = [config for config in tuner.configs if wanted.items() <= config.kwargs.items()][:1]
    assert kept
    monkeypatch.setattr(tuner, "configs", kept)


@pytest.mark.parametrize(
    ("keep", "dtype"), [(0, torch.float32), (4, torch.float32), (2, torch.float16), (6, torch.bfloat16)]
)
def test_softmax_of_rows_partly_kept(keep, dtype, monkeypatch, randn):
    only(monkeypatch, "softmax", "softmax_wide_kernel", KEEP=keep)
    softmax, reference = pair("softmax", "softmax")
    x = randn(65, 53000, dtype=dtype, like=4.0)
    close(softmax(x), reference(x))


def test_softmax_streams_through_rows(monkeypatch, randn):
    only(monkeypatch, "softmax", "softmax_stream_kernel", PROGRAMS=132)
    softmax, reference = pair("softmax", "softmax")
    x = randn(140, 8193, like=4.0)
    close(softmax(x), reference(x))


@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (6, 10000), (6, 40000), (65, 41000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")  # NumPy, interpreting
def test_softmax_of_special_values(rows, columns, dtype, randn):
    softmax, reference = pair("softmax", "softmax")
    x = randn(rows, columns, dtype=dtype)
    x[0] = -INF
    x[1, : columns - 1] = -INF
    x[2, 1:] = -INF
    x[3, 2] = INF
    x[4, 3] = NAN
    x[5] = 1e30 if dtype == torch.float32 else 6e4
    got = softmax(x)
    close(got, reference(x))
    assert got[[0, 3, 4]].isnan().all()
    assert not got[[1, 2, 5]].isnan().any()


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


def test_affine_relu_in_place_is_seen_by_autograd(randn):
    x = randn(3, 4).requires_grad_()
    y = x.exp()
    with torch.no_grad():
        kernel("elementwise", "affine_relu_")(y, 2.0, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        assert kernel("elementwise", "affine_relu_")(torch.ones_like(x), 2.0, 0.5).eq(2.5).all()


def test_affine_relu_in_place_with_vectors_from_beside_it(randn):
    buffer = randn(5, 8)
    x, a = buffer[:3], buffer[3]
    wanted = kernel("elementwise", "affine_relu_reference")(x, a, 0.5)
    close(kernel("elementwise", "affine_relu_")(x, a, 0.5), wanted)


def test_affine_relu_of_special_values(randn):
    affine_relu, reference = pair("elementwise", "affine_relu")
    x = randn(100)
    x[:3] = torch.tensor([NAN, INF, -INF])
    close(affine_relu(x, 2.0, 1.0), reference(x, 2.0, 1.0))
    assert affine_relu(x, 2.0, 1.0)[0].isnan()


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
PART = Z(4, 3)
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
    ("elementwise", "affine_relu_", (Z(9).as_strided((3, 3), (1, 1)), 1.0, 1.0)),
    ("elementwise", "affine_relu_", (Z(9).as_strided((3, 4), (2, 1)), 1.0, 1.0)),
    ("elementwise", "affine_relu_", (PART, PART[1], 1.0)),
    ("elementwise", "affine_relu_", (PART[1:], 1.0, PART[2])),
    ("elementwise", "affine_relu_", (Z(2, 3).requires_grad_(), 1.0, 1.0)),
    *((name, name, arguments) for name in ("layernorm", "rmsnorm") for arguments in (
        (Z(2, 3), Z(2)), (Z(2, 3), Z(3, 1)), (Z(2, 3), META), (Z(2, 3), Z(3, dtype=torch.int8)), (Z(2, 3), Z(6)[::2]))),
    ("layernorm", "layernorm", (Z(2, 3), None, Z(3))),
    ("layernorm", "layernorm", (Z(2, 3), Z(3), Z(2))),
    *(("layernorm", "layernorm_backward", arguments) for arguments in (
        (Z(2, 4), Z(2, 3), Z(3), Z(2), Z(2)), (Z(2, 3), Z(2, 3), Z(3), Z(3), Z(2)),
        (Z(2, 3), Z(2, 3), Z(3), Z(2), Z(3)),
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
    with pytest.raises(ValueError, match=r"expected|no dimension|do not merge|goes with|share memory"):
        kernel(module, name)(*arguments)


# what else a module says about its wrappers


def examples(device):
    """Wrapper -> arguments."""
    x, y, vector, ones = torch.randn(6, 40), torch.randn(6, 40), torch.randn(40), torch.ones(6)
    x, y, vector, ones = (tensor.to(device) for tensor in (x, y, vector, ones))
    q = (x * 40).clamp(-127, 127).to(torch.int8)
    return {
        ("vector_add", "axpy"): (2.0, x[0], y[0].contiguous()),
        ("softmax", "softmax"): (x,),
        ("layernorm", "layernorm"): (x, vector, vector),
        ("layernorm", "layernorm_backward"): (y, x, vector, ones * 0, ones),
        ("rmsnorm", "rmsnorm"): (x, vector),
        ("rmsnorm", "rmsnorm_backward"): (y, x, vector, ones),
        ("elementwise", "affine_relu"): (x, vector, 2.0),
        ("elementwise", "affine_relu_"): (x.clone(), vector, 2.0),
        ("quantize", "quantize_int8"): (x,),
        ("quantize", "quantize_fp8"): (x,),
        ("quantize", "dequantize"): (q, ones, None, torch.float32),
        ("dequant_matmul", "dequant_matmul"): (x.half(), q.t()[:, :6].contiguous(), ones),
    }


@pytest.mark.parametrize(("module", "name"), examples("cpu"))
def test_what_a_module_says_about_its_wrapper(module, name, device, fp8):
    wrapper, arguments = kernel(module, name), examples(device)[module, name]
    wanted = {key: value.default for key, value in inspect.signature(wrapper).parameters.items()}
    folder = importlib.import_module(wrapper.__module__)
    said = [f"{name}_{kind}" for kind in ("reference", "torch", "flops", "bytes", "inputs")]
    for other in said:
        assert hasattr(folder, other) or other.endswith(("_inputs", "_torch")), other
        if hasattr(folder, other):
            found = inspect.signature(getattr(folder, other)).parameters.items()
            assert {key: value.default for key, value in found} == wanted, other
    if hasattr(folder, f"{name}_inputs"):
        getattr(folder, f"{name}_inputs")(*arguments)
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    read = sum(value.numel() * value.element_size() for value in tensors)
    assert getattr(folder, f"{name}_bytes")(*arguments) > read
    assert getattr(folder, f"{name}_flops")(*arguments) > 0
    reference = getattr(folder, f"{name}_reference")(*arguments)
    close(wrapper(*(v.clone() if isinstance(v, torch.Tensor) else v for v in arguments)), reference, 1e-2, 1e-2)
    if hasattr(folder, f"{name}_torch"):
        close(getattr(folder, f"{name}_torch")(*arguments), reference, 1e-2, 1e-2)
