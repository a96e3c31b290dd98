"""The kernels under layernorm and rmsnorm: ``CENTRED`` says whether a row's mean is subtracted.

With ``xhat = (x - mean) * rstd`` and ``g = dy * weight``, and without the means of ``x`` and ``g`` for rmsnorm::

    y  = xhat * weight + bias
    dx = (g - mean(g) - xhat * mean(g * xhat)) * rstd
    dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

(Ba, Kiros, Hinton 2016, arXiv:1607.06450; Zhang, Sennrich 2019, arXiv:1910.07467.) Weight gradients are sums over all
rows. Each program adds up the rows it has in registers; ``backward_kernel`` then writes its sums and
``column_sum_kernel`` adds those up, always in one order; ``backward_atomic_kernel`` adds them into one row, in the order
in which programs end.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tcache

from ._rows import PRUNE, ROW_BUCKETS, prune_tiles, tiles

WIDEST_FORWARD = 16384
"""Columns up to which a row stays in registers and leaves room for a second one on its SM: while one waits, one loads."""
WIDEST_BACKWARD = 8192
"""Columns up to which x, dy, weight and two sums stay in registers: 8 of each for each of 1024 threads."""

_BUCKETS = {"M": ROW_BUCKETS, "N": "pow2"}
_LOOPED = [
    triton.Config({"BLOCK": block, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, warps, stages in [
        (8192, 16, 1),
        (4096, 8, 1),
        (4096, 8, 2),
        (4096, 8, 3),
        (8192, 8, 1),
        (8192, 16, 2),
        (8192, 16, 3),
        (16384, 16, 1),
        (16384, 32, 1),
        (16384, 32, 2),
    ]
]
_BACKWARD = [
    triton.Config({"ROWS": rows, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for rows in (1, 4, 16)
    for warps in (1, 4, 8, 16, 32)
    for stages in (1, 2, 3)
    if rows == 1 or warps in (4, 8)
]
_COLUMNS = [
    triton.Config({"BLOCK": block, "ROWS": rows, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, rows, warps, stages in [
        (128, 16, 4, 2),
        (64, 16, 4, 1),
        (64, 16, 4, 3),
        (128, 16, 4, 1),
        (128, 16, 8, 2),
        (128, 32, 8, 1),
        (256, 16, 8, 1),
        (256, 8, 4, 2),
    ]
]
_SUMS = [
    triton.Config({"BLOCK": block, "ROWS": rows}, num_warps=4, num_stages=1)
    for block, rows in [(32, 64), (32, 32), (32, 128), (64, 32), (64, 64), (128, 16), (128, 64)]
]


def _prune_backward(configs, named, **given):
    """As for tiles of one value; here five are in registers, so a thread holds at most 16 elements of each."""
    width = int(given["BLOCK_N"])
    kept = [
        config
        for config in prune_tiles(configs, {**named, "M": 1 << 30}, **given)
        if config.kwargs["ROWS"] * width <= 16 * 32 * config.num_warps
    ]
    return kept or prune_tiles(configs, named, **given)[:1]


@tcache.autotune(configs=tiles(), key=["M", "N", "CENTRED"], buckets=_BUCKETS, prune_configs_by=PRUNE)
@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, eps, stride_xm, stride_xn, stride_ym,
    CENTRED: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    wide = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + wide * stride_xm + columns[None, :] * stride_xn, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / N
        tl.store(mean_ptr + rows, mean, mask=rows < M)
        x = tl.where(columns[None, :] < N, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = x * rstd[:, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + wide * stride_ym + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_rows(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, M, N,
    stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx of every ``num_programs``-th tile of rows; return the tile's sums for the weight and the bias."""
    columns = tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = tl.load(w_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        wide = rows.to(tl.int64)[:, None]
        x = tl.load(x_ptr + wide * stride_xm + columns[None, :] * stride_xn, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + wide * stride_dym + columns[None, :] * stride_dyn, mask=inside, other=0.0)
        dy = dy.to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        if CENTRED:
            x = x - tl.load(mean_ptr + rows, mask=rows < M, other=0.0)[:, None]
        xhat = x * rstd  # past the edge of no effect: dy is 0 there
        dw += dy * xhat
        if HAS_BIAS:
            db += dy
        g = dy
        if w_ptr is not None:
            g = dy * w
        dx = g - xhat * (tl.sum(g * xhat, axis=1) / N)[:, None]
        if CENTRED:
            dx -= (tl.sum(g, axis=1) / N)[:, None]
        dx *= rstd
        tl.store(dx_ptr + wide * stride_dxm + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    return tl.sum(dw, axis=0), tl.sum(db, axis=0)


@tcache.autotune(
    configs=_BACKWARD, key=["M", "N", "CENTRED"], buckets=_BUCKETS,
    prune_configs_by={"early_config_prune": _prune_backward},
)  # fmt: skip
@triton.jit(do_not_specialize=["M"])
def backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr, M, N,
    stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm, stride_kind, stride_part,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dw, db = _backward_rows(
        dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, M, N,
        stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm, CENTRED, HAS_BIAS, BLOCK_N, ROWS, STAGES,
    )  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    if sums_ptr is not None:
        at = sums_ptr + tl.program_id(0).to(tl.int64) * stride_part + columns
        tl.store(at, dw, mask=columns < N)
        if HAS_BIAS:
            tl.store(at + stride_kind, db, mask=columns < N)


# accumulates: every benchmarked launch must start from zeros
@tcache.autotune(
    configs=_BACKWARD, key=["M", "N", "CENTRED"], buckets=_BUCKETS,
    prune_configs_by={"early_config_prune": _prune_backward}, reset_to_zero=["sums_ptr"],
)  # fmt: skip
@triton.jit(do_not_specialize=["M"])
def backward_atomic_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr, M, N,
    stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm, stride_kind,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dw, db = _backward_rows(
        dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, M, N,
        stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm, CENTRED, HAS_BIAS, BLOCK_N, ROWS, STAGES,
    )  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    tl.atomic_add(sums_ptr + columns, dw, mask=columns < N, sem="relaxed")
    if HAS_BIAS:
        tl.atomic_add(sums_ptr + stride_kind + columns, db, mask=columns < N, sem="relaxed")


@tcache.autotune(configs=_LOOPED, key=["M", "N", "CENTRED"], buckets=_BUCKETS)
@triton.jit(do_not_specialize=["M"])
def backward_looped_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, M, N,
    stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, dy_row, dx_row = x_ptr + row * stride_xm, dy_ptr + row * stride_dym, dx_ptr + row * stride_dxm
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTRED:
        mean = tl.load(mean_ptr + row)
    columns = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=STAGES):
        at = start + columns
        x = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0).to(tl.float32)
        g = tl.load(dy_row + at.to(tl.int64) * stride_dyn, mask=at < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            g *= tl.load(w_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        products += g * ((x - mean) * rstd)
        plain += g
    along = tl.sum(products, axis=0) / N
    level = 0.0
    if CENTRED:
        level = tl.sum(plain, axis=0) / N
    last = tl.cdiv(N, BLOCK) - 1
    for back in tl.range(0, last + 1, num_stages=STAGES):
        at = (last - back) * BLOCK + columns
        x = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0).to(tl.float32)
        g = tl.load(dy_row + at.to(tl.int64) * stride_dyn, mask=at < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            g *= tl.load(w_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        dx = (g - level - (x - mean) * rstd * along) * rstd
        tl.store(dx_row + at, dx.to(dx_ptr.dtype.element_ty), mask=at < N)


@tcache.autotune(configs=_COLUMNS, key=["M", "N", "CENTRED"], buckets=_BUCKETS)
@triton.jit(do_not_specialize=["M"])
def column_gradients_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr, M, N,
    stride_dym, stride_dyn, stride_xm, stride_xn, stride_kind, stride_part,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = columns.to(tl.int64)[None, :]
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        at = rows.to(tl.int64)[:, None]
        x = tl.load(x_ptr + at * stride_xm + wide * stride_xn, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at * stride_dym + wide * stride_dyn, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        if CENTRED:
            x = x - tl.load(mean_ptr + rows, mask=rows < M, other=0.0)[:, None]
        dw += dy * (x * rstd)
        if HAS_BIAS:
            db += dy
    to = sums_ptr + tl.program_id(0).to(tl.int64) * stride_part + columns
    tl.store(to, tl.sum(dw, axis=0), mask=columns < N)
    if HAS_BIAS:
        tl.store(to + stride_kind, tl.sum(db, axis=0), mask=columns < N)


@tcache.autotune(configs=_SUMS, key=["M", "N"], buckets={"M": "pow2", "N": "pow2"})
@triton.jit(do_not_specialize=["M"])
def column_sum_kernel(
    x_ptr, y_ptr, M, N, stride_kind, stride_part, stride_yk, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += tl.program_id(1).to(tl.int64) * stride_kind
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, M, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        total += tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride_part + columns[None, :], mask=inside, other=0.0)
    y = tl.sum(total, axis=0)
    tl.store(
        y_ptr + tl.program_id(1).to(tl.int64) * stride_yk + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N
    )
