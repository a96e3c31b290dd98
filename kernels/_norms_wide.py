"""The forward of layernorm and rmsnorm for rows too wide for one program's tile; formulas are in ``_norms``.

A program has one row. It keeps the first ``KEEP`` chunks in registers, goes over the rest, and reads that once more,
backwards, out of the L2 cache. Of the rest each lane (a thread) has a count, a mean and the squares of deviations from
that mean, which combine without cancellation (Chan, Golub, LeVeque 1979, Stanford STAN-CS-79-773).
"""

from __future__ import annotations

import triton
import triton.language as tl

import tcache

from ._rows import ROW_BUCKETS, unpacked

# KEEP: of 16-bit elements; half as many of float32
_WIDE = [
    triton.Config({"BLOCK": block, "KEEP": keep, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, keep, warps, stages in [
        (8192, 4, 32, 1),
        (8192, 2, 32, 3),
        (8192, 3, 32, 3),
        (8192, 4, 32, 2),
        (8192, 4, 32, 3),
        (8192, 5, 32, 1),
        (8192, 5, 32, 2),
        (4096, 4, 16, 1),
        (4096, 4, 16, 3),
        (4096, 8, 16, 1),
        (4096, 8, 16, 3),
        (4096, 10, 16, 1),
        (8192, 0, 16, 3),
        (8192, 0, 32, 4),
        (4096, 0, 8, 3),
    ]
]


@triton.jit
def _normalised(x, w_ptr, b_ptr, at, N, mean, rstd):
    y = (x - mean) * rstd
    if w_ptr is not None:
        y *= tl.load(w_ptr + at, mask=at < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if b_ptr is not None:
        y += tl.load(b_ptr + at, mask=at < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return y


@tcache.autotune(configs=_WIDE, key=["M", "N", "CENTRED"], buckets={"M": ROW_BUCKETS, "N": "pow2"})
@triton.jit(do_not_specialize=["M"])
def forward_wide_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, eps, stride_xm, stride_xn, stride_ym,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    KEPT: tl.constexpr = KEEP * 16 // x_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    lanes = tl.arange(0, BLOCK // 8) * 8
    columns = lanes[:, None] + tl.arange(0, 8)[None, :]
    kept = ()
    for chunk in tl.static_range(KEPT):
        at = chunk * BLOCK + columns
        kept = kept + (tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0),)  # noqa: RUF005
    means = tl.zeros((BLOCK // 8,), tl.float32)
    squares = tl.zeros((BLOCK // 8,), tl.float32)
    seen = tl.zeros((BLOCK // 8,), tl.float32)
    for start in tl.range(KEPT * BLOCK, N, BLOCK, num_stages=STAGES):
        at = start + columns
        x = tl.load(
            x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)  # fmt: skip
        if CENTRED:
            more = tl.minimum(tl.maximum(N - start - lanes, 0), 8).to(tl.float32)
            mean_here = tl.sum(x, axis=1) / tl.maximum(more, 1.0)
            apart = tl.where(at < N, x - mean_here[:, None], 0.0)
            share = more / tl.maximum(seen + more, 1.0)
            step = mean_here - means
            squares += tl.sum(apart * apart, axis=1) + step * step * seen * share
            means += step * share
            seen += more
        else:
            squares += tl.sum(x * x, axis=1)
    mean = 0.0
    if CENTRED:
        sums = means * seen
        for chunk in tl.static_range(KEPT):
            sums += tl.sum(kept[chunk].to(tl.float32), axis=1)
        mean = tl.sum(sums, axis=0) / N
        means -= mean
        squares += means * means * seen
        tl.store(mean_ptr + row, mean)
    for chunk in tl.static_range(KEPT):
        far = unpacked(kept[chunk], N >> 31)
        if CENTRED:
            far = tl.where(chunk * BLOCK + columns < N, far - mean, 0.0)
        squares += tl.sum(far * far, axis=1)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    last = tl.cdiv(N, BLOCK) - 1
    for back in tl.range(0, last + 1 - KEPT, num_stages=STAGES):  # backwards: what was read last is still in L2
        at = (last - back) * BLOCK + columns
        x = tl.load(
            x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)  # fmt: skip
        y = _normalised(x, w_ptr, b_ptr, at, N, mean, rstd)
        tl.store(y_row + at, y.to(y_ptr.dtype.element_ty), mask=at < N, eviction_policy="evict_first")
    for chunk in tl.static_range(KEPT):
        at = chunk * BLOCK + columns
        y = _normalised(unpacked(kept[chunk], M >> 31), w_ptr, b_ptr, at, N, mean, rstd)
        tl.store(y_row + at, y.to(y_ptr.dtype.element_ty), mask=at < N, eviction_policy="evict_first")
