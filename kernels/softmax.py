"""Row softmax of any width: one pass where a row fits a program's registers, online (two reads) where it does not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._rows import PRUNE, ROW_BUCKETS, as_rows, check_floats, on_device_of, tiles

WIDEST = 16384
"""Columns up to which a row stays in registers and leaves room for a second one on its SM: while one waits, one loads."""

_LOOPED = [
    triton.Config({"BLOCK": block, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, warps, stages in [
        (8192, 16, 1),
        (4096, 8, 1),
        (4096, 8, 2),
        (4096, 8, 3),
        (8192, 8, 1),
        (8192, 8, 2),
        (8192, 16, 2),
        (8192, 16, 3),
        (16384, 16, 1),
        (16384, 16, 2),
        (16384, 32, 1),
        (16384, 32, 2),
        (32768, 32, 1),
    ]
]


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
    y = e / tl.sum(e, axis=1)[:, None]
    tl.store(y_ptr + rows * stride_ym + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@tcache.autotune(configs=_LOOPED, key=["M", "N"], buckets={"M": ROW_BUCKETS, "N": "pow2"})
@triton.jit(do_not_specialize=["M"])
def softmax_looped_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_xn, stride_ym, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    columns = tl.arange(0, BLOCK)
    peak = -float("inf")
    total = 0.0
    for start in tl.range(0, N, BLOCK, num_stages=STAGES):
        at = start + columns
        x = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=-float("inf")).to(tl.float32)
        new = tl.maximum(peak, tl.max(x, axis=0))
        shift = tl.where(new == -float("inf"), 0.0, new)  # nothing but -inf so far adds nothing
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift), axis=0)
        peak = new
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    last = tl.cdiv(N, BLOCK) - 1
    for back in tl.range(0, last + 1, num_stages=STAGES):  # backwards: what was read last is still in L2
        at = (last - back) * BLOCK + columns
        x = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=-float("inf")).to(tl.float32)
        tl.store(y_row + at, (tl.exp(x - shift) / total).to(y_ptr.dtype.element_ty), mask=at < N)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension.

    Args:
        x: ``[…, N]``, float32, float16 or bfloat16. Two-dimensional inputs may have any strides; others are copied
            where their leading dimensions do not merge.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``; the arithmetic is in float32. Rows with NaN, with +inf, or
        of -inf alone are NaN, as in torch.

    Raises:
        ValueError: the dtype is another one, or ``x`` has no dimension.
    """
    check_floats(x=x)
    rows = as_rows(x)
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    m, n = rows.shape
    if x.numel() == 0:
        return y
    with on_device_of(x):
        if n <= WIDEST:
            block = triton.next_power_of_2(n)
            softmax_kernel[lambda meta: (triton.cdiv(m, meta["ROWS"]),)](
                rows, y, m, n, rows.stride(0), rows.stride(1), n, BLOCK_N=block
            )
        else:
            softmax_looped_kernel[(m,)](rows, y, m, n, rows.stride(0), rows.stride(1), n)
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
