"""Manifest lines written for a launch are YAML that reads back as the launch."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tcache._triton.mock import MockTensor
from tcache.snippet import manifest_lines

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False, allow_infinity=False)
)


def read(lines):
    [item] = yaml.safe_load("kernels:\n" + lines)["kernels"]
    return item


@given(SCALARS)
def test_any_scalar(value):
    found = read(manifest_lines("k.py:f", {"a": value}))["args"]["a"]
    found = found["value"] if isinstance(found, dict) else found
    assert (found, type(found)) == (value, type(value))


def test_tensors_grids_and_what_is_filled_in():
    tensors = {"x": MockTensor("bfloat16", (4, 8), (8, 1), 16), "y": MockTensor("float32", (), (), 4)}
    lines = manifest_lines("k.py:f", {**tensors, "BLOCK": 64}, filled=frozenset({"BLOCK"}), grid=(3, 0))
    assert read(lines) == {
        "kernel": "k.py:f",
        "args": {"x": {"shape": [4, 8], "dtype": "bfloat16"}, "y": {"shape": [], "dtype": "float32", "offset": 1}},
        "grid": [3, 1],
        "cases": [{}],
    }


@pytest.mark.parametrize("value", [(1, 2), math.inf, math.nan, object(), print])
def test_what_cannot_be_spelled_out(value):
    assert manifest_lines("k.py:f", {"a": value}) == ""
