"""Operands whose elements are too far apart for kernels that count in 32 bits are copied first."""

from __future__ import annotations

from pathlib import Path

import torch

from tcache.replay import KernelRef, load

ROOT = Path(__file__).parents[2]
near = load(KernelRef.parse("kernels/_matrices.py:near"), ROOT)
near_rows = load(KernelRef.parse("kernels/_rows.py:near_rows"), ROOT)


def spread(rows, columns, strides):
    """Return a tensor of such strides whose far elements are never touched: memory is promised, not taken."""
    return torch.empty_strided((rows, columns), strides, device="meta")


def test_rows_that_reach_far_are_copied():
    far = spread(2, 16384, (1, 140_000))
    assert near_rows(far).stride() == (16384, 1)
    close = spread(2, 16384, (1, 131_000))
    assert near_rows(close) is close


def test_steps_that_reach_far_are_copied():
    far = spread(2, 130, (1, 17_000_000))
    assert near(far, 1).stride() == (130, 1)
    assert near(far.t(), 0).stride() == (1, 130)
    one = spread(2, 1, (1, 2**33))
    assert near(one, 1) is one
    x = torch.empty(4, 8)
    assert near(x, 1) is x
