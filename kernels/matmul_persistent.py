"""``c = a @ b`` by as many programs as the GPU has multiprocessors, each walking over tiles; tiles come through TMA.

Where the GPU is older than Hopper, or a tensor is laid out in a way that the tensor memory accelerator cannot read,
the same loop runs over pointers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tcache

from ._check import flag, on_device_of
from ._matrices import near, operands
from ._sums import rms, tolerance_of_sums

_TMA_TILES = [
    # BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STORES, FLATTEN, warps, stages;
    # shared memory = stages * (M + N) * K * 2 + M * N * 2 / STORES
    (128, 256, 64, 8, 1, True, 8, 3),
    (128, 256, 64, 8, 2, True, 8, 3),
    (128, 256, 64, 8, 2, True, 8, 4),
    (128, 256, 64, 16, 2, True, 8, 4),
    (128, 256, 64, 4, 2, True, 8, 4),
    (128, 256, 64, 8, 1, False, 8, 3),
    (128, 256, 64, 8, 2, False, 8, 4),
    (256, 128, 64, 8, 1, True, 8, 3),
    (256, 128, 64, 8, 2, True, 8, 4),
    (256, 128, 64, 8, 2, False, 8, 4),
    (128, 256, 128, 8, 2, True, 8, 2),
    (128, 128, 64, 8, 1, True, 8, 4),
    (128, 128, 64, 8, 1, True, 4, 4),
    (128, 128, 128, 8, 1, True, 8, 3),
    (64, 256, 64, 8, 1, True, 4, 4),
    (64, 128, 128, 8, 1, True, 4, 4),
    (64, 128, 64, 8, 1, True, 4, 6),
    (64, 64, 128, 8, 1, True, 4, 5),
    (64, 128, 64, 8, 1, True, 4, 3),  # for GPUs with 99 KiB
]


def _set_blocks(arguments: dict) -> None:
    """Give the descriptors the tile that a config reads and writes at a time."""
    m, n, k = arguments["BLOCK_M"], arguments["BLOCK_N"], arguments["BLOCK_K"]
    arguments["a_desc"].block_shape = [m, k] if arguments["A_ROWS"] else [k, m]
    arguments["b_desc"].block_shape = [k, n] if arguments["B_ROWS"] else [n, k]
    arguments["c_desc"].block_shape = [m, n // arguments["STORES"]]


_TMA_CONFIGS = [
    triton.Config(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "STORES": stores, "FLATTEN": flatten},
        num_warps=warps, num_stages=stages, pre_hook=_set_blocks,
    )
    for m, n, k, group, stores, flatten, warps, stages in _TMA_TILES
]  # fmt: skip
_POINTER_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in [
        (128, 128, 32, 4, 4),  # first: fits nearly everywhere, for shapes that were never tuned
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 3),
        (64, 256, 32, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 4, 4),
        (32, 64, 64, 4, 4),
    ]
]


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and column of a tile when GROUP_M rows of tiles are gone through column by column."""
    in_group = GROUP_M * tiles_n
    first_m = (tile // in_group) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return first_m + (tile % in_group) % group_m, (tile % in_group) // group_m


@tcache.autotune(configs=_TMA_CONFIGS, key=["M", "N", "K", "A_ROWS", "B_ROWS", "ELEMENT"], buckets={"M": "pow2"})
@triton.jit
def matmul_tma_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ELEMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STORES: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # flattened with the loop over K, the next tile's first loads are under way while this one is stored
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):  # what lies outside is read as zero
            a = a_desc.load([row, k * BLOCK_K]) if A_ROWS else a_desc.load([k * BLOCK_K, row]).T
            b = b_desc.load([k * BLOCK_K, column]) if B_ROWS else b_desc.load([column, k * BLOCK_K]).T
            accumulator = tl.dot(a, b, accumulator)
        # and what would be written outside is not
        if STORES == 1:
            c_desc.store([row, column], accumulator.to(c_desc.dtype))
        else:
            halves = tl.permute(tl.reshape(accumulator, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            c_desc.store([row, column], left.to(c_desc.dtype))
            c_desc.store([row, column + BLOCK_N // 2], right.to(c_desc.dtype))


@tcache.autotune(configs=_POINTER_CONFIGS, key=["M", "N", "K", "stride_ak", "stride_bk"],
                 buckets={"M": "pow2", "stride_ak": [1], "stride_bk": [1]})  # fmt: skip
@triton.heuristics({"EVEN_K": lambda arguments: arguments["K"] % arguments["BLOCK_K"] == 0})
@triton.jit
def matmul_persistent_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows and columns past the edge wrap around: they load valid memory and are never stored. Not tl.where: after
        # it the compiler knows of no two neighbours, and copies elements one by one, without a pipeline
        a_rows = (rows % M).to(tl.int64)
        b_columns = (columns % N).to(tl.int64)
        a_tile = a_ptr + a_rows[:, None] * stride_am + depth[None, :].to(tl.int64) * stride_ak
        b_tile = b_ptr + depth[:, None].to(tl.int64) * stride_bk + b_columns[None, :] * stride_bn
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            if EVEN_K:
                a = tl.load(a_tile)
                b = tl.load(b_tile)
            else:
                a = tl.load(a_tile, mask=depth[None, :] < K - k * BLOCK_K, other=0.0)
                b = tl.load(b_tile, mask=depth[:, None] < K - k * BLOCK_K, other=0.0)
            accumulator = tl.dot(a, b, accumulator)
            a_tile += BLOCK_K * stride_ak
            b_tile += BLOCK_K * stride_bk
        c_tile = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(c_tile, accumulator.to(c_ptr.dtype.element_ty), mask=inside)


def _why_not(tensor: torch.Tensor) -> str | None:
    """Return why TMA cannot read a matrix, None where it can.

    Host-side descriptors want 16-byte aligned addresses and strides, and one dimension whose stride is 1
    (CUDA driver API, ``cuTensorMapEncodeTiled``).
    """
    if tensor.element_size() != 2:
        return f"its elements have {tensor.element_size()} bytes, expected 2"
    if tensor.data_ptr() % 16:
        return "it does not start at a multiple of 16 bytes"
    strides = tuple(tensor.stride())
    if 1 not in strides:
        return f"no dimension has stride 1, the strides are {strides}"
    outer, extent = (strides[0], tensor.shape[1]) if strides[1] == 1 else (strides[1], tensor.shape[0])
    if outer < extent or outer % 8:
        return f"its rows overlap or do not start at multiples of 16 bytes, the strides are {strides}"
    return None


def _obstacle(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Return why the product cannot go through TMA, None where it can."""
    if a.is_cuda and torch.version.hip is not None:
        return "AMD GPUs have none"
    if a.is_cuda and torch.cuda.get_device_capability(a.device) < (9, 0):
        return f"{torch.cuda.get_device_name(a.device)} is older than compute capability 9.0"
    for name, tensor in (("a", a), ("b", b)):
        why = _why_not(tensor)
        if why is not None:
            return f"{name}: {why}"
    return f"N={b.shape[1]} is no multiple of 8: the rows of the result are not aligned" if b.shape[1] % 8 else None


def _descriptor(tensor: torch.Tensor) -> tuple[TensorDescriptor, bool]:
    """Return a descriptor whose block is still to be set, and whether it is the tensor's own orientation."""
    by_rows = tensor.stride(1) == 1
    view = tensor if by_rows else tensor.t()
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 8]), by_rows


def matmul_persistent(a: torch.Tensor, b: torch.Tensor, tma: bool | None = None) -> torch.Tensor:
    """Return ``a @ b``.

    Args:
        a: ``[M, K]``, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, any strides.
        b: ``[K, N]``, any strides, of the dtype of ``a``; the transpose of a stored ``[N, K]`` weight is as good.
        tma: whether tiles are read through the tensor memory accelerator; None where it can be: from compute
            capability 9.0 on, two-byte elements, one dimension contiguous, addresses and rows aligned to 16 bytes.

    Returns:
        ``[M, N]``, contiguous, of the dtype of ``a``; products are accumulated in float32 (float32 inputs are
        multiplied in TF32; of float8 Hopper keeps about 14 bits of a sum, see ``_sums.py``).

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes do not match, dtypes or devices differ, the dtype is none of these or none that the GPU has,
            or ``tma`` is true and cannot be.
    """
    a, b = operands(a, b)
    tma = None if tma is None else flag("tma", tma)
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    if m == 0 or n == 0:
        return c
    if k == 0:
        return c.zero_()
    why = "tma=False" if tma is False else _obstacle(a, b)
    if tma and why is not None:
        raise ValueError(f"tma: expected matrices that TMA can read: {why}")
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (min(programs, triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"])),)

    with on_device_of(a):
        if why is None:
            (a_desc, a_rows), (b_desc, b_rows), (c_desc, _) = _descriptor(a), _descriptor(b), _descriptor(c)
            matmul_tma_kernel[grid](a_desc, b_desc, c_desc, m, n, k, a_rows, b_rows, str(a.dtype))
        else:
            a, b = near(a, 1), near(b, 0)
            matmul_persistent_kernel[grid](
                a, b, c, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1)
            )
    return c


def matmul_persistent_reference(a: torch.Tensor, b: torch.Tensor, tma: bool | None = None) -> torch.Tensor:
    """Return what :func:`matmul_persistent` computes, in torch, rounded once from float32."""
    return (a.float() @ b.float()).to(a.dtype)


def matmul_persistent_torch(a: torch.Tensor, b: torch.Tensor, tma: bool | None = None) -> torch.Tensor:
    """Return ``a @ b`` as torch computes it: through cuBLAS on an NVIDIA GPU."""
    return a @ b


def matmul_persistent_flops(a: torch.Tensor, b: torch.Tensor, tma: bool | None = None) -> int:
    """Return the floating point operations of a product: a multiplication and an addition, ``2 M N K``."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def matmul_persistent_bytes(a: torch.Tensor, b: torch.Tensor, tma: bool | None = None) -> int:
    """Return the least bytes to move: both matrices read once, the result written once."""
    (m, k), n = a.shape, b.shape[1]
    return (m * k + k * n + m * n) * a.element_size()


def matmul_persistent_tolerance(a: torch.Tensor, b: torch.Tensor, tma: bool | None = None) -> tuple[float, float]:
    """Return (relative, absolute) of sums of K products in float32, by the inputs' values: see ``_sums.py``."""
    return tolerance_of_sums(a.dtype, a.shape[1], rms(a) * rms(b))
