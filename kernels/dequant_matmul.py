"""``a @ (w * scale)``: activations in bfloat16 or float16, weights in int8 or float8_e4m3fn, one scale a column.

The weights are converted in registers, so that half the bytes of a 16-bit matmul are read: with few rows, where reading
the weights is all there is, it takes half the time. A column's scale is the same for all products summed in it, so the
sum is scaled once, at the end, in float32; int8 and float8_e4m3fn are exact in bfloat16 and in float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import check_device, check_fp8, check_shape, on_device_of, readable
from ._matrices import near
from ._sums import rms, tolerance_of_sums
from .matmul_decode import launch_decode

WEIGHTS = (torch.int8, torch.float8_e4m3fn)

FEW_ROWS = 64
"""Up to so many rows of ``a`` the kernel of ``matmul_decode`` reads the weights: they are what takes the time."""

_TILES = [
    # BLOCK_M, BLOCK_N, BLOCK_K, warps, stages
    (64, 64, 64, 4, 4),  # first: fits everywhere, for shapes that were never tuned
    (64, 128, 64, 4, 4),
    (64, 128, 128, 8, 4),
    (128, 64, 64, 4, 4),
    (128, 64, 128, 4, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 4),
    (128, 128, 128, 8, 3),
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 64, 64, 4, 4),
    (256, 128, 64, 8, 3),
    (256, 128, 64, 8, 4),
    (256, 128, 128, 8, 2),
]
_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in _TILES
]


@tcache.autotune(configs=_CONFIGS, key=["M", "N", "K"], buckets={"M": [256, 1024, 4096]})
@triton.jit(do_not_specialize=["M"])
def dequant_matmul_kernel(
    a_ptr, w_ptr, scale_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_wk, stride_wn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiply a tile, transposed: ``c^T = w^T a^T``.

    Of two operands Hopper's tensor cores take the left one from registers, where the weights are converted; the right
    one from shared memory only, into which they would have to be written back.
    """
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    in_group = GROUP_M * tiles_n
    first_m = (tile // in_group) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + (tile % in_group) % group_m
    tile_n = (tile % in_group) // group_m

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # rows and columns past the edge wrap around: they load valid memory and are never stored
    a_tile = a_ptr + depth[:, None] * stride_ak + (rows % M).to(tl.int64)[None, :] * stride_am
    w_tile = w_ptr + (columns % N).to(tl.int64)[:, None] * stride_wn + depth[None, :] * stride_wk
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        left = K - k * BLOCK_K
        a = tl.load(a_tile, mask=depth[:, None] < left, other=0.0)
        w = tl.load(w_tile, mask=depth[None, :] < left, other=0.0)
        total = tl.dot(w.to(a_ptr.dtype.element_ty), a, total)
        a_tile += BLOCK_K * stride_ak
        w_tile += BLOCK_K * stride_wk

    scale = tl.load(scale_ptr + columns, mask=columns < N, other=0.0)
    c = (total * scale[:, None]).to(c_ptr.dtype.element_ty)
    c_tile = c_ptr + columns[:, None] + rows.to(tl.int64)[None, :] * stride_cm
    tl.store(c_tile, c, mask=(columns[:, None] < N) & (rows[None, :] < M))


def dequant_matmul(a: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``a @ (w * scale)``.

    Args:
        a: ``[M, K]``, any strides, bfloat16 or float16.
        w: ``[K, N]``, any strides, int8 or float8_e4m3fn. Weights stored as ``[N, K]`` (as
            :func:`kernels.quantize.quantize_int8` leaves them) are passed as ``w.t()``; that is also the faster layout.
        scale: contiguous float32 ``[N]``, one for each column of ``w``.

    Returns:
        ``[M, N]``, contiguous, of the dtype of ``a``; products are accumulated in float32.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: dtypes, devices or shapes do not fit, or the GPU has no float8_e4m3fn.
    """
    a, w = readable("a", a, (torch.bfloat16, torch.float16), 2), readable("w", w, WEIGHTS, 2)
    scale = readable("scale", scale, (torch.float32,), 1)
    if a.shape[1] != w.shape[0]:
        raise ValueError(f"expected a [M, K] and w [K, N], got {tuple(a.shape)} and {tuple(w.shape)}")
    (m, k), n = a.shape, w.shape[1]
    check_shape("scale", scale, (n,), "w", contiguous=True)
    check_device(a=a, w=w, scale=scale)
    if w.dtype == torch.float8_e4m3fn:
        check_fp8("w", w)
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    if m == 0 or n == 0:
        return c
    if k == 0:
        return c.zero_()
    with on_device_of(a):
        if m <= FEW_ROWS:
            launch_decode(a, w, c, scale)
            return c
        a, w = near(a, 1), near(w, 0)
        dequant_matmul_kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](
            a, w, scale, c, m, n, k, a.stride(0), a.stride(1), w.stride(0), w.stride(1), n
        )
    return c


def dequant_matmul_reference(a, w, scale):
    """Return what :func:`dequant_matmul` computes, in torch, rounded once from float32."""
    return (a.float() @ w.float() * scale).to(a.dtype)


def dequant_matmul_torch(a, w, scale):
    """Return what a user of torch would call: weights converted first, then multiplied."""
    return a @ (w.to(a.dtype) * scale.to(a.dtype))


def dequant_matmul_inputs(a, w, scale) -> None:
    """Fill in quantised weights; scales are positive."""
    whole = torch.randint(-127, 128, w.shape, device=w.device)
    w.copy_(whole.to(torch.int8) if w.dtype == torch.int8 else whole.float().to(w.dtype))
    scale.abs_()


def dequant_matmul_flops(a, w, scale):
    """Return 2 M N K for the products and sums, and M N for the scales."""
    return 2 * a.shape[0] * a.shape[1] * w.shape[1] + a.shape[0] * w.shape[1]


def dequant_matmul_bytes(a, w, scale):
    """Return the bytes of activations, weights, scales and result."""
    return a.numel() * a.element_size() + w.numel() + 4 * scale.numel() + a.shape[0] * w.shape[1] * a.element_size()


def dequant_matmul_tolerance(a, w, scale):
    """Return (relative, absolute) of sums of K products in float32, of the column with the largest scale: see ``_sums.py``."""
    largest = float(scale.abs().max()) if scale.numel() else 0.0
    return tolerance_of_sums(a.dtype, a.shape[1], rms(a) * rms(w) * largest)
