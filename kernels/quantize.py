"""Quantise to int8 or float8_e4m3fn, by rows or by blocks of columns, and back.

For each row (a token's activations, an output channel's weights) or each block of 128 columns of a row::

    scale = max(|x|) / largest      largest: 127 for int8, 448 for float8_e4m3fn
    q     = round(x / scale)        to nearest, ties to even
    x     ~ q * scale

Quotients are computed as products with ``largest / max(|x|)``, correctly rounded, so that the result is the same to the
bit as that of the torch reference. Rows must be finite: what NaN or infinity become is not defined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import FLOATS, MOST, check_device, check_fp8, check_shape, integer, named, on_device_of, readable
from ._rows import (
    PRUNE,
    PRUNE_STREAMED,
    ROW_BUCKETS,
    STREAMED,
    near_rows,
    tiles,
)

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 1e-30
"""What stands for the maximum of a row of zeros: no quotient overflows."""
WIDEST_TILE = 8192
"""Columns up to which programs have a tile of rows each; beyond, they stream through rows."""
WIDEST = 32768
"""Columns up to which a row stays in the registers of 1024 threads, in float32."""

_BUCKETS = {"M": ROW_BUCKETS, "N": "pow2"}
_LOOPED = [
    triton.Config({"BLOCK": block, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, warps, stages in [
        (8192, 16, 1),
        (4096, 8, 1),
        (4096, 8, 2),
        (8192, 8, 1),
        (8192, 16, 2),
        (16384, 16, 1),
        (16384, 32, 1),
        (16384, 32, 2),
        (32768, 32, 1),
    ]
]


@triton.jit
def _rounded(x, inverse, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    q = tl.minimum(tl.maximum(x * inverse, -LARGEST), LARGEST)
    if INTEGER:
        # 1.5 * 2**23: a float32 of this size has no fraction, so adding it rounds to nearest, ties to even
        q = (q + 12582912.0) - 12582912.0
    return q


@tcache.autotune(configs=tiles(), key=["M", "N", "BLOCK_N", "STATIC"], buckets=_BUCKETS, prune_configs_by=PRUNE)
@triton.jit(do_not_specialize=["M"])
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, M, N, groups, stride_xm, stride_xn, stride_qm, stride_sm, stride_sn,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, INTEGER: tl.constexpr, STATIC: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (group // groups).to(tl.int64)
    part = group % groups
    columns = part[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (group[:, None] < M) & (columns < N)
    x = tl.load(x_ptr + row[:, None] * stride_xm + columns.to(tl.int64) * stride_xn, mask=inside, other=0.0)
    x = x.to(tl.float32)
    at = scale_ptr + row * stride_sm + part * stride_sn
    if STATIC:
        inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.load(at, mask=group < M, other=1.0))
    else:
        peak = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST)
        largest = tl.full((ROWS,), LARGEST, tl.float32)
        tl.store(at, tl.div_rn(peak, largest), mask=group < M)
        inverse = tl.div_rn(largest, peak)
    q = _rounded(x, inverse[:, None], LARGEST, INTEGER)
    tl.store(q_ptr + row[:, None] * stride_qm + columns, q.to(q_ptr.dtype.element_ty), mask=inside)


@tcache.autotune(configs=STREAMED, key=["M", "N"], buckets=_BUCKETS, prune_configs_by=PRUNE_STREAMED)
@triton.jit(do_not_specialize=["M"])
def quantize_stream_kernel(
    x_ptr, q_ptr, scale_ptr, M, N, stride_xm, stride_xn, stride_qm,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, INTEGER: tl.constexpr,
    BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    inside = columns < N
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        wide = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + wide * stride_xm + columns.to(tl.int64) * stride_xn, mask=inside, other=0.0)
        x = x.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(x), axis=0), SMALLEST)
        largest = peak * 0.0 + LARGEST
        tl.store(scale_ptr + row, tl.div_rn(peak, largest))
        q = _rounded(x, tl.div_rn(largest, peak), LARGEST, INTEGER)
        tl.store(q_ptr + wide * stride_qm + columns, q.to(q_ptr.dtype.element_ty), mask=inside)


@tcache.autotune(configs=_LOOPED, key=["M", "N"], buckets=_BUCKETS)
@triton.jit(do_not_specialize=["M"])
def quantize_looped_kernel(
    x_ptr, q_ptr, scale_ptr, M, N, stride_xm, stride_xn, stride_qm,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, INTEGER: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * stride_qm
    columns = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), SMALLEST, tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=STAGES):
        at = start + columns
        x = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(x))
    peak = tl.max(peaks, axis=0)
    largest = peak * 0.0 + LARGEST
    tl.store(scale_ptr + row, tl.div_rn(peak, largest))
    inverse = tl.div_rn(largest, peak)
    last = tl.cdiv(N, BLOCK) - 1
    for back in tl.range(0, last + 1, num_stages=STAGES):  # backwards: what was read last is still in L2
        at = (last - back) * BLOCK + columns
        x = tl.load(x_row + at.to(tl.int64) * stride_xn, mask=at < N, other=0.0).to(tl.float32)
        q = _rounded(x, inverse, LARGEST, INTEGER)
        tl.store(q_row + at, q.to(q_ptr.dtype.element_ty), mask=at < N)


@tcache.autotune(configs=tiles(), key=["M", "N", "BLOCK_N"], buckets=_BUCKETS, prune_configs_by=PRUNE)
@triton.jit(do_not_specialize=["M"])
def dequantize_kernel(
    q_ptr, scale_ptr, y_ptr, M, N, groups, stride_qm, stride_qn, stride_sm, stride_sn, stride_ym,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (group // groups).to(tl.int64)
    part = group % groups
    columns = part[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (group[:, None] < M) & (columns < N)
    # 8 elements a thread, not 16: those are 16 bytes of the output, and nothing changes threads in between
    across = tl.max_contiguous(columns, (1, 8)).to(tl.int64)
    q = tl.load(q_ptr + row[:, None] * stride_qm + across * stride_qn, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + row * stride_sm + part * stride_sn, mask=group < M, other=0.0)
    y = q.to(tl.float32) * scale[:, None]
    tl.store(y_ptr + row[:, None] * stride_ym + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def quantize_int8(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` in int8, and the scale of each row.

    Args:
        x: ``[M, N]``, any strides, float32, float16 or bfloat16, finite.
        scale: contiguous float32 ``[M]``, positive: static scales; larger values saturate. None: each row's own.

    Returns:
        ``q`` int8 ``[M, N]``, contiguous, in -127 … 127; and ``scale`` float32 ``[M]``, with ``x ~ q * scale[:, None]``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: dtypes, devices or shapes do not fit.
    """
    return _quantize(x, scale, None, torch.int8)


def quantize_fp8(
    x: torch.Tensor, block: int | None = None, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` in float8_e4m3fn, and the scale of each row or of each block of a row.

    Args:
        x: ``[M, N]``, any strides, float32, float16 or bfloat16, finite.
        block: how many columns share a scale, a power of two from 16 to 1024 (128 is usual); None: the row.
        scale: static scales of the shape that is returned, contiguous float32, positive. None: computed.

    Returns:
        ``q`` float8_e4m3fn ``[M, N]``, contiguous; and ``scale`` float32 ``[M]``, or ``[M, cdiv(N, block)]``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: dtypes, devices or shapes do not fit, or the GPU has no float8_e4m3fn.
    """
    return _quantize(x, scale, block, torch.float8_e4m3fn)


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, block: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return ``q * scale``.

    Args:
        q: ``[M, N]``, any strides, int8 or float8_e4m3fn.
        scale: contiguous float32, ``[M]``, or with a block ``[M, cdiv(N, block)]``.
        block: how many columns share a scale; None: the row.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        ``[M, N]``, contiguous; the product is in float32.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: dtypes, devices or shapes do not fit, or the GPU has no float8_e4m3fn.
    """
    q = readable("q", q, tuple(LARGEST), 2)
    if q.dtype == torch.float8_e4m3fn:
        check_fp8("q", q)
    if dtype not in FLOATS:
        raise (ValueError if isinstance(dtype, torch.dtype) else TypeError)(
            f"dtype: expected {named(FLOATS)}, got {dtype}"
        )
    m, n = q.shape
    block, shape = _scales(m, n, block)
    scale = _readable_scale(scale, shape, "q and block")
    check_device(q=q, scale=scale)
    y = torch.empty((m, n), device=q.device, dtype=dtype)
    if q.numel() == 0:
        return y
    width, parts = _groups("q", m, n, block, 1024)
    with on_device_of(q):
        dequantize_kernel[lambda meta: (triton.cdiv(m * parts, meta["ROWS"]),)](
            q, scale, y, m * parts, n, parts, q.stride(0), q.stride(1),
            scale.stride(0), 0 if block is None else 1, n, BLOCK_N=width,
        )  # fmt: skip
    return y


def _quantize(
    x: torch.Tensor, scale: torch.Tensor | None, block: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    x = readable("x", x, FLOATS, 2)
    if dtype == torch.float8_e4m3fn:
        check_fp8("x", x)
    m, n = x.shape
    block, shape = _scales(m, n, block)
    static = scale is not None
    if static:
        scale = _readable_scale(scale, shape, "x and block")
        check_device(x=x, scale=scale)
    else:
        scale = torch.empty(shape, device=x.device, dtype=torch.float32)
    q = torch.empty((m, n), device=x.device, dtype=dtype)
    if x.numel() == 0:
        return q, scale if static else scale.fill_(SMALLEST / LARGEST[dtype])  # of rows of nothing as of rows of zeros
    rows = near_rows(x)
    numbers = {"LARGEST": LARGEST[dtype], "SMALLEST": SMALLEST, "INTEGER": dtype == torch.int8}
    streamed = n > WIDEST_TILE and block is None and not static
    width, parts = (n, 1) if streamed else _groups("x", m, n, block, 1024 if static else WIDEST_TILE)
    with on_device_of(x):
        if streamed:
            tensors = (rows, q, scale, m, n, rows.stride(0), rows.stride(1), n)
            if n > WIDEST:
                quantize_looped_kernel[(m,)](*tensors, **numbers)
            else:
                grid = lambda meta: (min(m, meta["PROGRAMS"]),)  # noqa: E731
                quantize_stream_kernel[grid](*tensors, BLOCK_N=triton.next_power_of_2(n), **numbers)
            return q, scale
        quantize_kernel[lambda meta: (triton.cdiv(m * parts, meta["ROWS"]),)](
            rows, q, scale, m * parts, n, parts, rows.stride(0), rows.stride(1), n,
            scale.stride(0), 0 if block is None else 1, STATIC=static, BLOCK_N=width, **numbers,
        )  # fmt: skip
    return q, scale


def _groups(name: str, m: int, n: int, block: int | None, widest: int) -> tuple[int, int]:
    """Return how many columns a program's row has, and how many of these make a row of the matrix.

    Raises:
        ValueError: they are more than the kernels count.
    """
    width = min(triton.next_power_of_2(n), widest) if block is None else block
    parts = triton.cdiv(n, width)
    if m * parts > MOST:
        raise ValueError(f"{name}: expected at most {MOST} blocks of {width} columns, got {m} rows of {parts}")
    return width, parts


def _scales(m: int, n: int, block: int | None) -> tuple[int | None, tuple[int, ...]]:
    """Return the block, and the shape of the scales.

    Raises:
        TypeError: ``block`` is no integer.
        ValueError: it is none of those there are.
    """
    if block is None:
        return None, (m,)
    block = integer("block", block, 16, 1024)
    if block.bit_count() != 1:
        raise ValueError(f"block: expected a power of two from 16 to 1024, got {block}")
    return block, (m, triton.cdiv(n, block))


def _readable_scale(scale: torch.Tensor, shape: tuple[int, ...], beside: str) -> torch.Tensor:
    scale = readable("scale", scale, (torch.float32,), len(shape))
    check_shape("scale", scale, shape, beside, contiguous=True)
    return scale


def _reference(
    x: torch.Tensor, scale: torch.Tensor | None, block: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = x.shape
    width = max(n, 1) if block is None else block
    parts = 1 if block is None else triton.cdiv(n, width)
    groups = torch.nn.functional.pad(x.float(), (0, parts * width - n)).view(m, parts, width)
    largest = LARGEST[dtype]
    if scale is None:
        peak = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
        whole = torch.full_like(peak, largest)  # torch divides by a number, and a number, through reciprocals
        scale, inverse = peak / whole, whole / peak
    else:
        inverse = 1.0 / scale.view(m, parts, 1)
    q = (groups * inverse).clamp(-largest, largest)
    q = (q.round() if dtype == torch.int8 else q).to(dtype)
    shape = (m,) if block is None else (m, parts)
    return q.view(m, parts * width)[:, :n].contiguous(), scale.reshape(shape)


def quantize_int8_reference(x, scale=None):
    """Return what :func:`quantize_int8` computes, in torch, in float32."""
    return _reference(x, scale, None, torch.int8)


def quantize_fp8_reference(x, block=None, scale=None):
    """Return what :func:`quantize_fp8` computes, in torch, in float32."""
    return _reference(x, scale, block, torch.float8_e4m3fn)


def dequantize_reference(q, scale, block=None, dtype=torch.bfloat16):
    """Return what :func:`dequantize` computes, in torch, in float32, rounded once."""
    spread = scale[:, None] if block is None else scale.repeat_interleave(block, 1)[:, : q.shape[1]]
    return (q.float() * spread).to(dtype)


def quantize_int8_inputs(x, scale=None) -> None:
    """Fill in static scales."""
    if scale is not None:
        scale.copy_(_reference(x, None, None, torch.int8)[1])


def quantize_fp8_inputs(x, block=None, scale=None) -> None:
    """Fill in static scales."""
    if scale is not None:
        scale.copy_(_reference(x, None, block, torch.float8_e4m3fn)[1])


def dequantize_inputs(q, scale, block=None, dtype=torch.bfloat16) -> None:
    """Fill in quantised values; scales are positive."""
    whole = torch.randint(-127, 128, q.shape, device=q.device)
    q.copy_(whole.to(torch.int8) if q.dtype == torch.int8 else whole.float().to(q.dtype))
    scale.abs_()


def quantize_int8_flops(x, scale=None):
    """Return for each element: product, two comparisons, rounding; and magnitude and maximum where it is dynamic."""
    return (4 if scale is not None else 6) * x.numel()


def quantize_fp8_flops(x, block=None, scale=None):
    """Return for each element: product, two comparisons; and magnitude and maximum where it is dynamic."""
    return (3 if scale is not None else 5) * x.numel()


def dequantize_flops(q, scale, block=None, dtype=torch.bfloat16):
    """Return one product for each element."""
    return q.numel()


def quantize_int8_bytes(x, scale=None):
    """Return the bytes of the input, of the output and of the scales."""
    return x.numel() * (x.element_size() + 1) + 4 * x.shape[0]


def quantize_fp8_bytes(x, block=None, scale=None):
    """Return the bytes of the input, of the output and of the scales."""
    return x.numel() * (x.element_size() + 1) + 4 * x.shape[0] * (
        1 if block is None else triton.cdiv(x.shape[1], block)
    )


def dequantize_bytes(q, scale, block=None, dtype=torch.bfloat16):
    """Return the bytes of the input, of the scales and of the output."""
    return q.numel() * (1 + dtype.itemsize) + scale.numel() * 4
