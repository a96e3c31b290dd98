"""tcache's own specialization against Triton's binder, on every kind of argument it claims to know."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from tcache._triton.driver import stub
from tcache._triton.mock import MockTensor
from tcache._triton.probe import compilation_of
from tcache._triton.specialize import specialize
from tcache.explain import facts_of


def body(a, b, c, d: tl.int64, e: tl.float16, f: tl.constexpr, g: tl.constexpr = 5, h=16):
    pass


STORAGE = torch.zeros(64)
tensors = st.sampled_from(
    [STORAGE, STORAGE[1:], STORAGE[4:]]
    + [
        MockTensor(name, (4,), (1,), address)
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint64", "bool", "float64")
        for address in (0, 8)
    ]
)
integers = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, -1, 16, 17, -16, 2**31, 2**31 - 1, -(2**31), -(2**31) - 1, 2**63, 2**63 - 1, 2**64 - 16]),
)
values = st.one_of(tensors, integers, st.booleans(), st.none(), st.floats(allow_nan=False), st.just(1.0))
TEXTS = st.sampled_from(["D", "S", "DS", "aDb", "d", "tt.divisibility=16"])  # letters that name properties upstream
constants = st.one_of(
    st.integers(-5, 5), st.booleans(), st.none(), st.text(max_size=3) | TEXTS, st.floats(allow_nan=False)
)
options = st.fixed_dictionaries(
    {}, optional={"num_warps": st.sampled_from([1, 8]), "num_stages": st.just(2), "maxnreg": st.just(128)}
)
names = st.lists(st.sampled_from("abcdeh"), max_size=3)


@pytest.fixture(scope="module")
def target():
    with stub("cuda", 90, 32):
        yield


@given(
    st.tuples(values, values, values), integers | st.booleans(), st.floats(allow_nan=False) | integers,
    st.tuples(constants, constants), values, options, names, names, st.integers(0, 5),
)  # fmt: skip
@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_triton_s_binder(target, first, d, e, constant, h, given_options, unspecialized, unaligned, split):
    function = JITFunction(body, do_not_specialize=unspecialized, do_not_specialize_on_alignment=unaligned)
    named = {**dict(zip("abc", first, strict=True)), "d": d, "e": e, "f": constant[0], "g": constant[1], "h": h}
    args = tuple(named[name] for name in list(named)[:split])
    kwargs = {**dict(list(named.items())[split:]), **given_options}
    made = specialize(function, args, kwargs)
    try:
        theirs = facts_of(compilation_of(function, args, kwargs))
    except Exception:
        return  # upstream refuses it: whatever is said of it is never used
    assert made is not None
    assert made.facts() == {name: theirs[name] for name in made.facts()}


@pytest.mark.parametrize("text", ["D", "S", "BLOCKED", "blocked", ""])
def test_a_text_is_what_the_release_takes_it_for(target, text):
    """3.6 takes a constexpr string for a list of properties, later ones do not."""
    function = JITFunction(body)
    named = dict.fromkeys("abcde", 3) | {"f": text, "g": text}
    made = specialize(function, (), named)
    assert made is not None
    theirs = facts_of(compilation_of(function, (), named))
    assert made.facts() == {name: theirs[name] for name in made.facts()}
    assert ("f" in made.facts()["attributes"]) == ("D" in text and triton.__version__.startswith("3.6."))


def of_options(x, num_warps, num_stages: tl.constexpr, maxnreg: tl.constexpr = None):
    pass


@given(
    st.sampled_from([1, 2, 8, 16]), st.sampled_from([1, 3, 4]), st.none() | st.sampled_from([64, 128]),
    st.integers(0, 4), options,
)  # fmt: skip
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_argument_given_by_name_is_also_the_option_of_that_name(target, warps, stages, registers, split, more):
    function = JITFunction(of_options)
    named = {"x": STORAGE, "num_warps": warps, "num_stages": stages, "maxnreg": registers}
    args = tuple(named.values())[:split]
    kwargs = {**dict(list(named.items())[split:]), **{k: v for k, v in more.items() if k not in named}}
    made = specialize(function, args, kwargs)
    theirs = facts_of(compilation_of(function, args, kwargs))
    assert made is not None
    assert made.facts() == {name: theirs[name] for name in made.facts()}


def test_by_position_and_by_name_are_two_launches(target):
    function = JITFunction(of_options)
    by_name = specialize(function, (STORAGE,), {"num_warps": 8, "num_stages": 2})
    by_position = specialize(function, (STORAGE, 8, 2), {})
    assert (by_name.options["num_warps"], by_name.options["num_stages"]) == (8, 2)
    assert by_position.options["num_warps"] == 4
    assert by_name.constants == by_position.constants


def only_named(x, *, n):
    pass


def any_number(x, *rest):
    pass


def debugged(x, debug: tl.constexpr = False):
    pass


@pytest.mark.parametrize("body", [only_named, any_number, debugged], ids=lambda body: body.__name__)
def test_parameters_that_releases_bind_otherwise_are_left_to_triton(target, body):
    """3.9 wants a keyword where 3.8 takes a position, 3.8 binds ``*rest``, and each sets ``debug`` itself."""
    if body is any_number and triton.__version__ < "3.8":
        pytest.skip("refused at the launch")
    function = JITFunction(body)
    assert specialize(function, (STORAGE, 3), {}) is None
    assert specialize(function, (STORAGE,), {"n": 3}) is None


def test_what_is_not_known_is_left_to_triton(target):
    function = JITFunction(body)
    good = dict.fromkeys("abcde", 1) | {"f": 2}
    assert specialize(function, (), good) is not None
    for change in (
        {"a": (1, 2)}, {"a": "text"}, {"a": tl.float32}, {"a": 2**64}, {"a": tl.constexpr(3)}, {"f": tl.float32},
        {"f": (1, 2)}, {"unknown": 1}, {"a": object()},
    ):  # fmt: skip
        assert specialize(function, (), {**good, **change}) is None
    assert specialize(function, (1, 2), good) is None
    assert specialize(function, (), {"a": 1}) is None
    with stub("hip", "gfx942", 64):
        assert specialize(function, (), good) is None


def test_the_release_is_one_that_was_looked_at():
    assert triton.__version__[:3] in ("3.6", "3.7", "3.8", "3.9")
