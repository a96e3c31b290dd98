"""Layernorm and rmsnorm for rows too wide for one program's tile, forward and backward; formulas are in ``_norms``.

Forward: a program has one row, or a few, which then share what is loaded of the weight and the bias. It keeps the first ``KEEP`` chunks in registers, goes over the rest, and reads that once more,
backwards, out of the L2 cache. Of the rest each lane (a thread) has a count, a mean and the squares of deviations from
that mean, which combine without cancellation (Chan, Golub, LeVeque 1979, Stanford STAN-CS-79-773).

Backward: of every row ``SHARES`` programs take all the sums over its columns, and each keeps and writes its own share,
for which alone it has the weights' gradients in registers. A row comes from memory once and from the L2 cache for the
other programs, which run at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tcache

from ._rows import ROW_BUCKETS, unpacked

WIDEST_SHARED = 16384
"""Columns up to which the backward has a row's share, weight and gradients in registers; beyond, it reads rows twice."""

# KEEP: of 16-bit elements; half as many of float32
_WIDE = [
    triton.Config({"BLOCK": block, "KEEP": keep, "ROWS": rows, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, keep, rows, warps, stages in [
        (8192, 4, 1, 32, 1),
        (8192, 2, 1, 32, 3),
        (8192, 3, 1, 32, 3),
        (8192, 4, 1, 32, 2),
        (8192, 4, 1, 32, 3),
        (8192, 5, 1, 32, 1),
        (8192, 5, 1, 32, 2),
        (4096, 4, 1, 16, 1),
        (4096, 4, 1, 16, 3),
        (4096, 8, 1, 16, 1),
        (4096, 8, 1, 16, 3),
        (8192, 0, 1, 16, 3),
        (8192, 0, 1, 32, 4),
        (4096, 0, 1, 8, 3),
        (8192, 1, 2, 32, 2),
        (4096, 4, 2, 32, 1),
        (4096, 4, 2, 32, 2),
        (4096, 3, 2, 32, 3),
        (4096, 4, 2, 16, 2),
        (4096, 1, 4, 32, 2),
    ]
]


def _prune_forward(configs, named, **given):
    """Keep the configs with several rows a program where every one of an H200's 132 SMs has some."""
    kept = [config for config in configs if named["M"] >= 132 * config.kwargs["ROWS"] or config.kwargs["ROWS"] == 1]
    return kept or configs[:1]


_BACKWARD = [
    triton.Config({"SHARES": shares, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for shares, warps, stages in [
        (4, 16, 1),
        (4, 16, 2),
        (4, 16, 3),
        (2, 32, 3),
        (2, 32, 1),
        (2, 32, 2),
        (1, 32, 1),
        (1, 32, 2),
        (1, 32, 3),
    ]
]
_BIASED = _BACKWARD[:4]
"""Those whose registers hold two gradients; with SHARES=1 some 25 of a thread's 64 would spill."""


def _prune_backward(configs, named, **given):
    """Keep the configs whose rows in advance fit an SM's shared memory; with a bias, those that do not spill."""
    row = 2 * int(given["BLOCK_N"]) * named["x_ptr"].element_size()

    def fits(config):
        return (config.num_stages - 1) * row <= 200 << 10 and (config in _BIASED or not given["HAS_BIAS"])

    return [config for config in configs if fits(config)] or configs[:1]


@triton.jit
def _normalised(x, w_ptr, b_ptr, at, N, mean, rstd):
    y = (x - mean[:, None, None]) * rstd[:, None, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + at, mask=at < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if b_ptr is not None:
        y += tl.load(b_ptr + at, mask=at < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return y


@tcache.autotune(
    configs=_WIDE, key=["M", "N", "CENTRED"], buckets={"M": ROW_BUCKETS, "N": "pow2"},
    prune_configs_by={"early_config_prune": _prune_forward},
)  # fmt: skip
@triton.jit(do_not_specialize=["M"])
def forward_wide_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, eps, stride_xm, stride_xn, stride_ym,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    KEPT: tl.constexpr = KEEP * 16 // x_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = BLOCK // 8
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide = rows.to(tl.int64)[:, None, None]
    x_rows, y_rows, there = x_ptr + wide * stride_xm, y_ptr + wide * stride_ym, (rows < M)[:, None, None]
    lanes = tl.arange(0, LANES)[None, :] * 8
    columns = lanes[:, :, None] + tl.arange(0, 8)[None, None, :]
    kept = ()
    for chunk in tl.static_range(KEPT):
        at = chunk * BLOCK + columns
        first = x_rows + at.to(tl.int64) * stride_xn
        kept = kept + (tl.load(first, mask=there & (at < N), other=0.0, eviction_policy="evict_first"),)  # noqa: RUF005
    means = tl.zeros((ROWS, LANES), tl.float32)
    squares = tl.zeros((ROWS, LANES), tl.float32)
    seen = tl.zeros((1, LANES), tl.float32)
    for start in tl.range(KEPT * BLOCK, N, BLOCK, num_stages=STAGES):
        at = start + columns
        x = tl.load(
            x_rows + at.to(tl.int64) * stride_xn, mask=there & (at < N), other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)  # fmt: skip
        if CENTRED:
            more = tl.minimum(tl.maximum(N - start - lanes, 0), 8).to(tl.float32)
            mean_here = tl.sum(x, axis=2) / tl.maximum(more, 1.0)
            apart = tl.where(at < N, x - mean_here[:, :, None], 0.0)
            share = more / tl.maximum(seen + more, 1.0)
            step = mean_here - means
            squares += tl.sum(apart * apart, axis=2) + step * step * (seen * share)
            means += step * share
            seen += more
        else:
            squares += tl.sum(x * x, axis=2)
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        sums = means * seen
        for chunk in tl.static_range(KEPT):
            sums += tl.sum(kept[chunk].to(tl.float32), axis=2)
        mean = tl.sum(sums, axis=1) / N
        means -= mean[:, None]
        squares += means * means * seen
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    for chunk in tl.static_range(KEPT):
        far = unpacked(kept[chunk], N >> 31)
        if CENTRED:
            far = tl.where(chunk * BLOCK + columns < N, far - mean[:, None, None], 0.0)
        squares += tl.sum(far * far, axis=2)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    last = tl.cdiv(N, BLOCK) - 1
    for back in tl.range(0, last + 1 - KEPT, num_stages=STAGES):  # backwards: what was read last is still in L2
        at = (last - back) * BLOCK + columns
        x = tl.load(
            x_rows + at.to(tl.int64) * stride_xn, mask=there & (at < N), other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)  # fmt: skip
        y = _normalised(x, w_ptr, b_ptr, at, N, mean, rstd).to(y_ptr.dtype.element_ty)
        tl.store(y_rows + at, y, mask=there & (at < N), eviction_policy="evict_first")
    for chunk in tl.static_range(KEPT):
        at = chunk * BLOCK + columns
        y = _normalised(unpacked(kept[chunk], M >> 31), w_ptr, b_ptr, at, N, mean, rstd).to(y_ptr.dtype.element_ty)
        tl.store(y_rows + at, y, mask=there & (at < N), eviction_policy="evict_first")


@triton.jit
def _store_sums(sums_ptr, stride_kind, at, inside, dw, db, HAS_BIAS: tl.constexpr):
    if sums_ptr is not None:
        tl.store(sums_ptr + at, dw, mask=inside)
        if HAS_BIAS:
            tl.store(sums_ptr + stride_kind + at, db, mask=inside)


@tcache.autotune(
    configs=_BACKWARD, key=["M", "N", "CENTRED", "HAS_BIAS"], buckets={"M": ROW_BUCKETS, "N": "pow2"},
    prune_configs_by={"early_config_prune": _prune_backward},
)  # fmt: skip
@triton.jit(do_not_specialize=["M", "parts"])
def backward_wide_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr, M, N, parts,
    stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm, stride_kind, stride_part,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = BLOCK_N // SHARES
    share, part = tl.program_id(0) % SHARES, tl.program_id(0) // SHARES
    across = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    columns = share * BLOCK + across
    inside = columns < N
    weights = ()
    if w_ptr is not None:
        for other in tl.static_range(SHARES):
            at = (share + other) % SHARES * BLOCK + across
            weights = weights + (tl.load(w_ptr + at, mask=at < N, other=0.0),)  # noqa: RUF005
    dw = tl.zeros((BLOCK // 8, 8), tl.float32)
    db = tl.zeros((BLOCK // 8, 8), tl.float32)
    for row in tl.range(part, M, parts, num_stages=STAGES):
        wide = tl.cast(row, tl.int64)
        zero = tl.cast(row, tl.int32) >> 31
        x_row, dy_row = x_ptr + wide * stride_xm, dy_ptr + wide * stride_dym
        x = tl.load(x_row + columns.to(tl.int64) * stride_xn, mask=inside, other=0.0)
        dy = tl.load(dy_row + columns.to(tl.int64) * stride_dyn, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTRED:
            mean = tl.load(mean_ptr + row)
        xhat = (x.to(tl.float32) - mean) * rstd
        g = dy.to(tl.float32)
        dw += g * xhat
        if HAS_BIAS:
            db += g
        if w_ptr is not None:
            g *= unpacked(weights[0], zero)
        products, plain = tl.sum(g * xhat, axis=1), tl.sum(g, axis=1)
        for other in tl.static_range(1, SHARES):
            at = (share + other) % SHARES * BLOCK + across
            g = tl.load(dy_row + at.to(tl.int64) * stride_dyn, mask=at < N, other=0.0).to(tl.float32)
            theirs = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0).to(tl.float32)
            if w_ptr is not None:
                g *= unpacked(weights[other], zero)
            products += tl.sum(g * ((theirs - mean) * rstd), axis=1)
            plain += tl.sum(g, axis=1)
        along = tl.sum(products, axis=0) / N
        level = 0.0
        if CENTRED:
            level = tl.sum(plain, axis=0) / N
        g = unpacked(dy, zero)
        if w_ptr is not None:
            g *= unpacked(weights[0], zero + (M >> 31))
        dx = (g - level - (unpacked(x, zero) - mean) * rstd * along) * rstd
        tl.store(dx_ptr + wide * stride_dxm + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    _store_sums(sums_ptr, stride_kind, part.to(tl.int64) * stride_part + columns, inside, dw, db, HAS_BIAS)
