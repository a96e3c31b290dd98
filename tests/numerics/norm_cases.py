"""Cases of the norms, on the device a fixture ``device`` names: the CPU's interpreter, or a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from rowwise_cases import DTYPES, INF, KINDS, NAN, SHAPES, close, kernel, only, pair, strided


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


@pytest.mark.parametrize(
    ("keep", "rows", "dtype"),
    [(0, 1, torch.float32), (4, 1, torch.float32), (2, 1, torch.float16), (4, 1, torch.bfloat16),
     (1, 2, torch.float32), (4, 2, torch.bfloat16), (1, 4, torch.float16)], ids=str
)  # fmt: skip
def test_norms_of_rows_too_wide_for_one_pass(keep, rows, dtype, monkeypatch, randn):
    only(monkeypatch, "_norms_wide", "forward_wide_kernel", KEEP=keep, ROWS=rows)
    for columns in (16386, 50257):
        x, weight = randn(3, columns, dtype=dtype, mean=1.0), randn(columns, dtype=dtype)
        layernorm, reference = pair("layernorm", "layernorm")
        close(layernorm(x, weight, weight), reference(x, weight, weight), *loose(dtype))
        rmsnorm, reference = pair("rmsnorm", "rmsnorm")
        close(rmsnorm(x, weight), reference(x, weight))


def test_norms_of_wide_rows_of_any_strides(randn):
    x, weight = randn(40000, 2).t(), randn(40000)
    for name in ("layernorm", "rmsnorm"):
        norm, reference = pair(name, name)
        close(norm(x, weight), reference(x, weight), 1e-5, 1e-5)


def test_layernorm_of_a_wide_row_that_changes(randn):
    """What a program keeps and what it goes over have other means; the last lanes have none of it."""
    layernorm, reference = pair("layernorm", "layernorm")
    x = randn(2, 50003)
    x[:, 30000:] += 1000.0
    x[1, 49152:] -= 3000.0
    close(layernorm(x), reference(x), 1e-5, 1e-5)


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
        got, wanted = norm(x), reference(x)
        # a row with an infinity: torch's CUDA kernels and its CPU ones do not agree
        assert got[1, 4].isnan()
        if name == "rmsnorm":
            assert (got[1, :4] == 0).all()
        got[1] = wanted[1]
        close(got, wanted, 1e-5, 1e-5)


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


@pytest.mark.parametrize("shape", [(70, 8200), (3, 16384), (40, 16400), (600, 10)], ids=str)
@pytest.mark.parametrize(("name", "biased"), [("layernorm", True), ("rmsnorm", False)])
def test_norm_backward_of_wide_rows_and_of_more_rows_than_programs(name, biased, shape, randn):
    backward, reference = pair(name, f"{name}_backward")
    arguments = backward_arguments(name, randn, shape, torch.float32, biased)
    got, wanted = backward(*arguments), reference(*arguments)
    close(got[0], wanted[0], 1e-4, 1e-5)
    close(tuple(got[1:]), tuple(wanted[1:]), *sums(torch.float32, shape[0]))


@NORMS
@pytest.mark.parametrize(
    ("shares", "dtype"), [(1, torch.bfloat16), (2, torch.float32), (2, torch.float16), (4, torch.bfloat16)], ids=str
)
def test_norm_backward_of_shared_rows(shares, name, biased, dtype, monkeypatch, randn):
    if biased and shares == 1:
        return
    # float32 rows in advance do not fit shared memory; alone, a config is launched unpruned
    stages = {"STAGES": 1} if dtype == torch.float32 else {}
    only(monkeypatch, "_norms_wide", "backward_wide_kernel", SHARES=shares, **stages)
    backward, reference = pair(name, f"{name}_backward")
    arguments = backward_arguments(name, randn, (3, 12345), dtype, biased)
    got, wanted = backward(*arguments), reference(*arguments)
    close(got[0], wanted[0], *((1e-4, 1e-5) if dtype == torch.float32 else (None, None)))
    close(tuple(got[1:]), tuple(wanted[1:]), *sums(dtype, 3))


def test_norm_backward_of_wide_rows_of_any_strides_and_without_a_weight(randn):
    x, dy = randn(9000, 2).t(), randn(1, 9000).expand(2, 9000)
    for weight in (randn(9000), None):
        for name in ("layernorm", "rmsnorm"):
            backward, reference = pair(name, f"{name}_backward")
            more = [weight is not None] if name == "layernorm" else []
            arguments = (dy, x, weight, *kernel(name, f"{name}_forward")(x, weight)[1:], *more)
            close(backward(*arguments), reference(*arguments), 1e-4, 1e-5)


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


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_second_gradients_of_norms_are_refused(randn, name):
    """The backward kernels have no backward of their own: autograd must say so, not give zeros."""
    x = randn(3, 16).requires_grad_()
    for factor in (kernel(name, name)(x), 1.0):  # with a number the gradient that comes in depends on nothing
        (gradient,) = torch.autograd.grad((kernel(name, name)(x) * factor).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (x.sum() + gradient.square().sum()).backward()


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_statistics_of_rows_without_columns(randn, monkeypatch, name):
    """They are written, too: the mean of nothing is not a number."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    y, *statistics = kernel(name, f"{name}_forward")(randn(3, 0))
    assert y.shape == (3, 0)
    for each in statistics:
        assert each.shape == (3,)
        assert each.isnan().all()


@pytest.fixture
def deterministic_torch():
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
@pytest.mark.usefixtures("deterministic_torch")
def test_nothing_is_added_up_in_any_order_where_torch_must_not(randn, monkeypatch, name):
    launches = sys.modules[kernel("_norm_launches", "backward").__module__]
    monkeypatch.setattr(launches, "backward_atomic_kernel", None)
    x = randn(3, 16).requires_grad_()
    kernel(name, name)(x, randn(16).requires_grad_(), deterministic=False).sum().backward()
    assert x.grad.isfinite().all()
