"""Comparing a result with a reference."""

from __future__ import annotations

import pytest
import torch

from tcache.bench.agreement import compare

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("dtype", "got", "wanted", "error", "wrong"),
    [
        (torch.float32, [1.0, NAN, INF], [1.0, NAN, INF], 0.0, 0),
        (torch.float32, [1.0, 1.0], [NAN, 1.0], 0.0, 1),
        (torch.float32, [NAN, 1.0], [1.0, 1.0], 0.0, 1),
        (torch.float32, [INF, 1.0], [1.0, 1.0], 0.0, 1),
        (torch.float32, [1.0, 1.0], [INF, -INF], 0.0, 2),
        (torch.float32, [INF], [-INF], 0.0, 1),
        (torch.float32, [1.00001], [1.0], 1e-5, 0),
        (torch.float32, [1.0001, 1.0], [1.0, 1.0], 1e-4, 1),
        (torch.bfloat16, [1.0078125], [1.0], 0.0078125, 0),
        (torch.float16, [100.0], [102.0], 2.0, 1),
        (torch.float8_e4m3fn, [1.0], [1.125], 0.125, 0),
        (torch.float8_e4m3fn, [1.0], [1.25], 0.25, 1),
        (torch.int8, [5, -128], [6, -128], 1.0, 0),
        (torch.int8, [5], [7], 2.0, 1),
        (torch.int64, [1 << 60], [(1 << 60) + 1024], 1024.0, 1),
        (torch.bool, [True], [False], 1.0, 1),
    ],
)
def test_values(dtype, got, wanted, error, wrong):
    found = compare(torch.tensor(got).to(dtype), torch.tensor(wanted).to(dtype))
    assert found.largest_error == pytest.approx(error, rel=1e-2)
    assert (found.problem is None) == (wrong == 0)
    if wrong:
        assert found.problem.startswith(f"{wrong} of {len(got)} values differ")


def test_structures():
    a, b = torch.zeros(2), torch.ones(3)
    assert compare((a, {"b": [b]}), [a, b]).problem is None
    assert compare((a, b), (a, b + 1)).problem.startswith("result 1: 3 of 3 values")
    assert compare((a, b), a).problem == "2 tensors, the reference has 1"
    assert compare(a, b).problem == "(2,) torch.float32, the reference (3,) torch.float32"
    assert compare(a, a.double()).problem.endswith("the reference (2,) torch.float64")
    assert compare(torch.zeros(0), torch.zeros(0)).problem is None
    assert compare(a + 0.5, a, (0.0, 1.0)).problem is None
    assert compare(b.int(), b.int() + 1, (0.0, 1.0)).problem is not None  # a tolerance is for floating tensors
