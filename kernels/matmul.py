"""``c = a @ b``: tiles in grouped order for L2 reuse, float32 accumulator, any strides, ragged edges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import on_device_of
from ._matrices import near, operands
from ._sums import rms, tolerance_of_sums

_TILES = [
    # BLOCK_M, BLOCK_N, BLOCK_K, warps, stages
    (16, 32, 128, 4, 5),
    (16, 32, 256, 4, 4),
    (16, 64, 64, 4, 6),
    (16, 64, 128, 4, 5),
    (16, 64, 256, 4, 4),
    (16, 128, 64, 4, 5),
    (16, 128, 128, 4, 4),
    (16, 128, 128, 8, 4),
    (32, 64, 128, 4, 4),
    (32, 128, 64, 4, 4),
    (32, 128, 128, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 4, 3),
    (64, 256, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 128, 8, 3),
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3),
    (256, 128, 64, 8, 4),
]
_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in _TILES
]


@tcache.autotune(configs=_CONFIGS, key=["M", "N", "K"])
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
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
    a_tile = a_ptr + (rows % M).to(tl.int64)[:, None] * stride_am + depth[None, :] * stride_ak
    b_tile = b_ptr + depth[:, None] * stride_bk + (columns % N).to(tl.int64)[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        left = K - k * BLOCK_K
        a = tl.load(a_tile, mask=depth[None, :] < left, other=0.0)
        b = tl.load(b_tile, mask=depth[:, None] < left, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk

    c_tile = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_tile, accumulator.to(c_ptr.dtype.element_ty), mask=inside)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b``.

    Args:
        a: ``[M, K]``, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, any strides (copied where its columns are more than 2 million elements apart).
        b: ``[K, N]``, any strides (the same for its rows), of the dtype of ``a``.

    Returns:
        ``[M, N]``, contiguous, of the dtype of ``a``; products are accumulated in float32 (float32 inputs are
        multiplied in TF32; of float8 Hopper keeps about 14 bits of a sum, see ``_sums.py``).

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes do not match, dtypes or devices differ, or the dtype is none of these, or none that the GPU has.
    """
    a, b = operands(a, b)
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    if m == 0 or n == 0:
        return c
    if k == 0:
        return c.zero_()

    a, b = near(a, 1), near(b, 0)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    strides = (a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1))
    with on_device_of(a):
        matmul_kernel[grid](a, b, c, m, n, k, *strides)
    return c


def matmul_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what :func:`matmul` computes, in torch, rounded once from float32."""
    return (a.float() @ b.float()).to(a.dtype)


def matmul_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what a user of torch writes: cuBLAS."""
    return a @ b


def matmul_flops(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return 2 M N K: a multiplication and an addition for each product."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def matmul_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the bytes of both operands, read once, and of the product, written once."""
    return (a.numel() + b.numel() + a.shape[0] * b.shape[1]) * a.element_size()


def matmul_tolerance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return (relative, absolute) of sums of K products in float32, by the inputs' values: see ``_sums.py``."""
    return tolerance_of_sums(a.dtype, a.shape[1], rms(a) * rms(b))
