"""Every wrapper refuses what it does not take, by the argument's name and before a launch.

Run with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

import torch
from argument_cases import FLOATS, MODULE_OF, ROOT, Tensor, bad, calls, of_dtype, values, wrapper
from poisoning import device, poisoned, untuned  # noqa: F401

from tcache.autotuner import Autotuner
from tcache.replay import KernelRef, load

CALLS = calls("cpu")
NAMES = sorted(CALLS)
pytestmark = pytest.mark.usefixtures("untuned")
checks = {
    name: load(KernelRef.parse(f"kernels/_check.py:{name}"), ROOT)
    for name in ("readable", "writable", "flag", "number", "integer", "positive")
}


def clones(arguments):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def tensors(result, arguments):
    if result is None:  # fill_map: what it wrote
        return list(arguments.values())
    return [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]


def outcome(function, arguments):
    """Return what a call raised, or "taken"."""
    try:
        function(**arguments)
    except Exception as error:  # also what is no clear message
        return error
    return "taken"


def test_every_wrapper_is_here_with_all_its_arguments():
    assert set(CALLS) == set(MODULE_OF)
    for name, arguments in CALLS.items():
        assert list(arguments) == list(inspect.signature(wrapper(name)).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_takes_is_taken(name):
    arguments = clones(values(CALLS[name]))
    for each in tensors(wrapper(name)(**arguments), arguments):
        assert each.numel()
        assert not each.is_floating_point() or not each.float().isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong_is_refused_by_name_before_a_launch(name, monkeypatch):
    def launched(*_args, **_kwargs):
        raise AssertionError("a launch")

    monkeypatch.setattr(Autotuner, "run", launched)
    monkeypatch.setattr(Autotuner, "__getitem__", launched)
    function, alone = wrapper(name), sum(isinstance(each, Tensor) for each in CALLS[name].values()) == 1
    tried = 0
    for argument, each in CALLS[name].items():
        for what, value in bad(argument, each):
            if what == "without memory" and name in MEMORYLESS:
                continue
            wanted = "memory" if what == "without memory" and alone else rf"\b{argument}\b"
            error = outcome(function, {**clones(values(CALLS[name])), argument: value})
            said = f"{argument} {what}: {type(error).__name__}: {error}"
            assert isinstance(error, (TypeError, ValueError)), said
            assert re.search(wanted, str(error)), said
            assert "expected" in str(error), said
            if (value is None or isinstance(value, list)) and argument not in ("scoring", "order", "masks"):
                assert isinstance(error, TypeError), said
            tried += 1
    assert tried > 5


MEMORYLESS = ("fill_map", "neighbour_map", "sort_rows")
"""They launch nothing: torch's own operations work on the meta device."""


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_that_is_documented_is_taken(name, monkeypatch):
    """Nothing is launched: the interpreter multiplies neither bfloat16 nor float8."""
    monkeypatch.setattr(Autotuner, "__getitem__", lambda *_: lambda *_args, **_kwargs: None)
    arguments = CALLS[name]
    groups = [[argument] for argument, each in arguments.items() if isinstance(each, Tensor) and not each.like]
    groups.append([argument for argument, each in arguments.items() if isinstance(each, Tensor) and each.like])
    for group in filter(None, groups):
        for dtype in arguments[group[0]].dtypes:
            given = clones(values(arguments))
            given |= {argument: of_dtype(arguments[argument].good, dtype).zero_() for argument in group}
            wrapper(name)(**given)


def test_float8_is_multiplied_without_a_bias(monkeypatch):
    monkeypatch.setattr(Autotuner, "__getitem__", lambda *_: lambda *_args, **_kwargs: None)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        found = wrapper("linear")(torch.zeros(4, 16).to(dtype), torch.zeros(8, 16).to(dtype))
        assert (found.shape, found.dtype) == ((4, 8), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_lazily_negated_tensors_are_read_as_what_they_are(name):
    arguments = values(CALLS[name])
    function = wrapper(name)
    plain = clones(arguments)
    wanted = tensors(function(**plain), plain)
    for argument, each in CALLS[name].items():
        if not isinstance(each, Tensor):
            continue
        given = clones(arguments)
        given[argument] = torch.neg(each.good)._neg_view()
        assert given[argument].is_neg()
        if each.written:
            with pytest.raises(ValueError, match=rf"{argument}: .*in place"):
                function(**given)
            continue
        for got, right in zip(tensors(function(**given), given), wanted, strict=True):
            if got.dtype == torch.float8_e4m3fn:
                got, right = got.float(), right.float()  # noqa: PLW2901 - torch compares none
            torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6, msg=lambda text, a=argument: f"{a}: {text}")


def test_the_gradient_through_a_conjugate_is_negated():
    """What autograd hands to a backward may be negated lazily, too: here the imaginary part of a conjugate."""
    factors = torch.randn(3, 16, dtype=torch.complex64)
    negated = []
    for name in ("layernorm", "rmsnorm"):
        x = torch.randn(3, 16)
        gradients = []
        for function in (wrapper(name), load(KernelRef.parse(f"kernels/{name}.py:{name}_torch"), ROOT)):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            y.register_hook(lambda gradient: negated.append(gradient.is_neg()))
            (torch.complex(torch.zeros_like(y), y).conj() * factors).real.sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert negated == [True] * 4


def test_float8_that_is_negated_lazily_is_refused():
    a = torch.zeros(4, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"q: .*negates"):
        wrapper("dequantize")(a._neg_view(), torch.ones(4))


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_lost_is_told(name):
    """Once, whatever a wrapper is made of; without a graph nothing is lost."""
    for argument, each in CALLS[name].items():
        if not isinstance(each, Tensor) or not each.good.is_floating_point() or each.written:
            continue
        given = {**clones(values(CALLS[name])), argument: each.good.clone().requires_grad_()}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = tensors(wrapper(name)(**given), given)
            with torch.no_grad():
                wrapper(name)(**given)
        told = [warning for warning in told if warning.category is UserWarning]
        if name in ("attention", "layernorm", "rmsnorm"):
            assert (told, results[0].requires_grad) == ([], True)
            continue
        assert not any(result.requires_grad for result in results if result is not given[argument])
        assert [re.match(r"\w+", str(warning.message)).group() for warning in told] == [argument]
        assert told[0].filename == __file__, "the line that called the wrapper"


def test_a_bias_of_float8_is_refused():
    x, w = torch.zeros(4, 16).to(torch.float8_e4m3fn), torch.zeros(8, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="bias: expected float32, float16 or bfloat16"):
        wrapper("linear")(x, w, torch.zeros(8).to(torch.float8_e4m3fn))


def test_gradients_asked_of_what_is_no_tensor():
    q = torch.zeros(1, 1, 2, 16, requires_grad=True)
    with pytest.raises(TypeError, match="k: expected a tensor, got None"):
        wrapper("attention")(q, None, q)
    with pytest.raises(TypeError, match=r"weight: expected a tensor, got 1\.0"):
        wrapper("rmsnorm")(q, 1.0)


@pytest.mark.parametrize("name", ["layernorm", "layernorm_forward"])
def test_a_bias_without_a_weight_is_refused(name):
    with pytest.raises(ValueError, match="bias: expected a weight"):
        wrapper(name)(torch.zeros(2, 4), None, torch.zeros(4))


def test_messages_say_what_was_expected_and_what_was_given():
    for value, said in [(None, "None"), (128.0, "128.0"), ([1], "a list"), (True, "True"), ("no", "'no'")]:
        with pytest.raises(TypeError, match=rf"^x: expected a tensor, got {re.escape(said)}$"):
            checks["readable"]("x", value, FLOATS)
    with pytest.raises(ValueError, match=r"^x: expected float32, float16 or bfloat16, got torch.float8_e8m0fnu$"):
        checks["readable"]("x", torch.empty(2, dtype=torch.float8_e8m0fnu), FLOATS)
    with pytest.raises(ValueError, match=r"^x: expected 1 dimension, got shape \(2, 3\)$"):
        checks["readable"]("x", torch.zeros(2, 3), FLOATS, 1)
    with pytest.raises(TypeError, match=r"^a: expected a number, got a tensor of shape \(\)$"):
        checks["number"]("a", torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^k: expected 1\.\.3, got 4$"):
        checks["integer"]("k", 4, 1, 3)
    assert checks["flag"]("causal", 1) is True
    assert checks["positive"]("scale", None, 0.25) == 0.25
    numpy = pytest.importorskip("numpy")
    assert checks["number"]("a", numpy.float32(2)) == 2.0
    assert type(checks["integer"]("k", numpy.int64(2), 1, 3)) is int
