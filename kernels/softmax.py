"""Row softmax of any width.

Rows of up to 32768 columns are read once. Of wider ones a program keeps what its registers hold, goes over the rest
online (Milakov, Gimelshein 2018, arXiv:1805.02867) and reads that again; where rows are few, each is split over
programs: one launch for maxima and sums of the parts, one that joins them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import FLOATS, on_device_of, readable
from ._rows import (
    PRUNE,
    PRUNE_STREAMED,
    ROW_BUCKETS,
    STREAMED,
    as_rows,
    near_rows,
    tiles,
    unpacked,
)

WIDEST_TILE = 8192
"""Columns up to which programs have a tile of rows each; beyond, they stream through rows."""
WIDEST = 32768
"""Columns up to which a row stays in the registers of 1024 threads, in float32."""
FEW = 64
"""Rows up to which those wider than ``WIDEST`` are split over programs: half of an H200's 132 SMs would be idle."""
PART, PARTS = 2048, 256
"""Columns that a program of a split row takes at once, and the most programs that a row is split over."""

# KEEP: of 16-bit elements; half as many of float32
_WIDE = [
    triton.Config({"BLOCK": block, "KEEP": keep, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, keep, warps, stages in [
        (8192, 4, 32, 1),
        (8192, 5, 32, 1),
        (8192, 4, 32, 2),
        (8192, 4, 32, 3),
        (8192, 5, 32, 3),
        (8192, 6, 32, 2),
        (8192, 2, 32, 3),
        (4096, 4, 16, 1),
        (4096, 4, 16, 3),
        (4096, 8, 16, 1),
        (4096, 8, 16, 3),
        (4096, 12, 16, 1),
        (4096, 12, 16, 3),
        (8192, 0, 16, 3),
        (8192, 0, 32, 4),
        (4096, 0, 8, 3),
    ]
]
_PARTS = [triton.Config({}, num_warps=warps, num_stages=1) for warps in (8, 4, 2)]


@tcache.autotune(
    configs=tiles(), key=["M", "N"], buckets={"M": ROW_BUCKETS, "N": "pow2"}, prune_configs_by=PRUNE
)  # fmt: skip
@triton.jit(do_not_specialize=["M"])
def softmax_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_xn, stride_ym, BLOCK_N: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    rows = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + rows * stride_xm + columns[None, :] * stride_xn, mask=inside, other=0.0)
    x = tl.where(columns[None, :] < N, x.to(tl.float32), -float("inf"))
    # a row of -inf gives -inf - -inf: NaN, as in torch
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = e * (1.0 / tl.sum(e, axis=1))[:, None]  # a quotient each would take the unit that exponentials take
    tl.store(y_ptr + rows * stride_ym + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@tcache.autotune(
    configs=STREAMED, key=["M", "N"], buckets={"M": ROW_BUCKETS, "N": "pow2"}, prune_configs_by=PRUNE_STREAMED
)  # fmt: skip
@triton.jit(do_not_specialize=["M"])
def softmax_stream_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_xn, stride_ym,
    BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    inside = columns < N
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        wide = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + wide * stride_xm + columns.to(tl.int64) * stride_xn, mask=inside, other=0.0)
        x = tl.where(inside, x.to(tl.float32), -float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        y = e * (1.0 / tl.sum(e, axis=0))
        tl.store(y_ptr + wide * stride_ym + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _online(peak, total, x):
    """Add a chunk ``[LANES, 8]`` to maxima and sums of each lane's; a lane is a thread, so nothing is exchanged."""
    new = tl.maximum(peak, tl.max(x, axis=1))
    shift = tl.where(new == -float("inf"), 0.0, new)  # nothing but -inf so far adds nothing
    return new, total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)


@tcache.autotune(configs=_WIDE, key=["M", "N"], buckets={"M": ROW_BUCKETS, "N": "pow2"})
@triton.jit(do_not_specialize=["M"])
def softmax_wide_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_xn, stride_ym,
    BLOCK: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    KEPT: tl.constexpr = KEEP * 16 // x_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    columns = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    kept = ()
    for chunk in tl.static_range(KEPT):
        at = chunk * BLOCK + columns
        first = x_row + at.to(tl.int64) * stride_xn
        kept = kept + (tl.load(first, mask=at < N, other=-float("inf"), eviction_policy="evict_first"),)  # noqa: RUF005
    peaks = tl.full((BLOCK // 8,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for start in tl.range(KEPT * BLOCK, N, BLOCK, num_stages=STAGES):
        at = start + columns
        x = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=-float("inf"), eviction_policy="evict_last")
        peaks, total = _online(peaks, total, x.to(tl.float32))
    highest = peaks
    for chunk in tl.static_range(KEPT):
        highest = tl.maximum(highest, tl.max(kept[chunk].to(tl.float32), axis=1))
    peak = tl.max(highest, axis=0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    total *= tl.exp(peaks - shift)
    for chunk in tl.static_range(KEPT):
        total += tl.sum(tl.exp(unpacked(kept[chunk], N >> 31) - shift), axis=1)
    share = 1.0 / tl.sum(total, axis=0)
    last = tl.cdiv(N, BLOCK) - 1
    for back in tl.range(0, last + 1 - KEPT, num_stages=STAGES):  # backwards: what was read last is still in L2
        at = (last - back) * BLOCK + columns
        x = tl.load(
            x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=-float("inf"), eviction_policy="evict_first"
        ).to(tl.float32)
        y = (tl.exp(x - shift) * share).to(y_ptr.dtype.element_ty)
        tl.store(y_row + at, y, mask=at < N, eviction_policy="evict_first")
    for chunk in tl.static_range(KEPT):
        at = chunk * BLOCK + columns
        y = (tl.exp(unpacked(kept[chunk], M >> 31) - shift) * share).to(y_ptr.dtype.element_ty)
        tl.store(y_row + at, y, mask=at < N, eviction_policy="evict_first")


@tcache.autotune(configs=_PARTS, key=["M", "N"], buckets={"M": ROW_BUCKETS, "N": "pow2"})
@triton.jit(do_not_specialize=["M"])
def softmax_parts_kernel(
    x_ptr, peaks_ptr, totals_ptr, M, N, span, stride_xm, stride_xn, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    columns = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    peaks = tl.full((BLOCK // 8,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, N), BLOCK):
        at = start + columns
        x = tl.load(x_ptr + row * stride_xm + at.to(tl.int64) * stride_xn, mask=at < N, other=-float("inf"))
        peaks, total = _online(peaks, total, x.to(tl.float32))
    peak = tl.max(peaks, axis=0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(peaks_ptr + row * PARTS + part, peak)
    tl.store(totals_ptr + row * PARTS + part, tl.sum(total * tl.exp(peaks - shift), axis=0))


@tcache.autotune(configs=_PARTS, key=["M", "N"], buckets={"M": ROW_BUCKETS, "N": "pow2"})
@triton.jit(do_not_specialize=["M"])
def softmax_join_kernel(
    x_ptr, peaks_ptr, totals_ptr, y_ptr, M, N, span, stride_xm, stride_xn, stride_ym,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    parts = tl.arange(0, PARTS)
    peaks = tl.load(peaks_ptr + row * PARTS + parts, mask=parts < tl.num_programs(0), other=-float("inf"))
    totals = tl.load(totals_ptr + row * PARTS + parts, mask=parts < tl.num_programs(0), other=0.0)
    peak = tl.max(peaks, axis=0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    share = 1.0 / tl.sum(totals * tl.exp(peaks - shift), axis=0)
    for start in range(part * span, tl.minimum((part + 1) * span, N), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_xm + at.to(tl.int64) * stride_xn, mask=at < N, other=-float("inf"))
        y = (tl.exp(x.to(tl.float32) - shift) * share).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * stride_ym + at, y, mask=at < N)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension.

    Args:
        x: ``[…, N]``, float32, float16 or bfloat16. Two-dimensional inputs may have any strides; others are copied
            where their leading dimensions do not merge.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``; the arithmetic is in float32. Rows with NaN, with +inf, or
        of -inf alone are NaN, as in torch.

    Raises:
        TypeError: ``x`` is no tensor.
        ValueError: the dtype is another one, or ``x`` has no dimension.
    """
    x = readable("x", x, FLOATS)
    rows = near_rows(as_rows(x))
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    m, n = rows.shape
    if x.numel() == 0:
        return y
    strides = (rows.stride(0), rows.stride(1))
    with on_device_of(x):
        if n <= WIDEST_TILE:
            tile = lambda meta: (triton.cdiv(m, meta["ROWS"]),)  # noqa: E731
            softmax_kernel[tile](rows, y, m, n, *strides, n, BLOCK_N=triton.next_power_of_2(n))
        elif n <= WIDEST:
            grid = lambda meta: (min(m, meta["PROGRAMS"]),)  # noqa: E731
            softmax_stream_kernel[grid](rows, y, m, n, *strides, n, BLOCK_N=triton.next_power_of_2(n))
        elif m > FEW:
            softmax_wide_kernel[(m,)](rows, y, m, n, *strides, n)
        else:
            span = PART * triton.cdiv(n, PART * PARTS)
            grid = (triton.cdiv(n, span), m)
            partial = torch.empty((2, m, PARTS), device=x.device, dtype=torch.float32)
            sizes = {"BLOCK": PART, "PARTS": PARTS}
            softmax_parts_kernel[grid](rows, partial[0], partial[1], m, n, span, *strides, **sizes)
            softmax_join_kernel[grid](rows, partial[0], partial[1], y, m, n, span, *strides, n, **sizes)
    return y


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """Return what :func:`softmax` computes, in torch, in float64, rounded once."""
    return torch.softmax(x.double(), -1).to(x.dtype)


def softmax_torch(x: torch.Tensor) -> torch.Tensor:
    """Return what a user of torch would call."""
    return torch.softmax(x, -1)


def softmax_flops(x: torch.Tensor) -> int:
    """Return 5 for each element: maximum, difference, exponential, sum, quotient."""
    return 5 * x.numel()


def softmax_bytes(x: torch.Tensor) -> int:
    """Return the bytes of the input and of the output."""
    return 2 * x.numel() * x.element_size()
