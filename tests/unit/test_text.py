from __future__ import annotations

import enum
import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcache.errors import UnsupportedValue
from tcache.keys._text import Word, decode_groups, encode_groups, encode_value, normalise


class Kind(enum.Enum):
    FAST = 1


names = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,8}", fullmatch=True)
words = st.sampled_from(["torch.bfloat16", "tl.fp32", "@kernels.matmul.relu", "@m.f.<locals>.g"]).map(Word)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | words
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@given(st.lists(st.lists(st.tuples(names, values), max_size=4), min_size=1, max_size=3))
def test_round_trip(groups):
    text = encode_groups(groups)
    back = decode_groups(text)
    assert [g for g in back if g] == [g for g in groups if g]
    assert encode_groups(back).split() == text.split()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (1.0, "1.0"),
        (True, "true"),
        (None, "null"),
        ("a b|c", '"a b|c"'),
        ((1, (2.5, None)), "[1,[2.5,null]]"),
        (float("inf"), "Infinity"),
        (-(2**63), "-9223372036854775808"),
    ],
)
def test_values_keep_their_type(value, text):
    assert encode_value(value) == text
    assert decode_groups(f"x={text}") == [[("x", value)]]


def test_nan_round_trips():
    [[(_, value)]] = decode_groups(encode_groups([[("x", float("nan"))]]))
    assert math.isnan(value)


def test_dtypes_and_functions_become_words():
    import torch
    import triton.language as tl

    assert normalise(torch.bfloat16) == Word("torch.bfloat16")
    assert normalise(tl.float32) == Word("tl.fp32")
    assert normalise(tl.constexpr(3)) == 3
    assert normalise(string.capwords) == Word("@string.capwords")
    assert normalise(torch.channels_last) == Word("torch.channels_last")
    assert normalise(Kind.FAST) == Word(f"@{__name__}.Kind.FAST")
    assert decode_groups(f"x={encode_value(Kind.FAST)}") == [[("x", normalise(Kind.FAST))]]


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert encode_value(numpy.bool_(1)) == "true"
    assert encode_value(numpy.int64(3)) == "3"
    assert encode_value(numpy.float32(1.5)) == "1.5"
    with pytest.raises(UnsupportedValue, match="ndarray"):
        normalise(numpy.zeros(2, dtype=int))


def test_what_has_no_text_is_refused():
    import torch

    with pytest.raises(UnsupportedValue, match=r"builtins\.object"):
        normalise(object())
    with pytest.raises(UnsupportedValue, match="Tensor"):
        normalise(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(UnsupportedValue, match="function"):
        normalise(lambda: 0)  # all lambdas of a module have one name


@pytest.mark.parametrize("text", ["x", "x=", "1=2", "x=1y=2", "x=[1", "x=[1 2]", "x=foo", "x=[" * 5000])
def test_malformed_text_is_a_value_error(text):
    with pytest.raises((ValueError, RecursionError)):
        decode_groups(text)


def test_a_class_with_an_index_is_no_integer():
    class Counted:
        def __index__(self):
            return 3

    assert encode_value(Counted()) == "3"
    assert encode_value(Counted).startswith(f"@{__name__}.")
