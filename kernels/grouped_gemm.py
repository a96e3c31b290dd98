"""``y[rows of e] = x[rows of e] @ w[e]``: one launch for the matmuls of all experts of a mixture of experts.

Where the rows of an expert lie is known on the GPU only. Programs are as many as the GPU runs at once; each reads
the offsets, counts the tiles of every expert, and takes every so-manieth of them: nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tcache

from ._check import FLOATS, check_device, check_dtype, check_shape, flag, on_device_of, readable
from ._matrices import near
from ._sums import rms, tolerance_of_sums

_POINTER_CONFIGS = [
    triton.Config(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "PER_SM": programs}, num_warps=warps, num_stages=stages
    )
    for m, n, k, group, programs, warps, stages in [
        (16, 64, 64, 1, 3, 4, 5),
        (16, 64, 128, 1, 2, 4, 4),
        (16, 128, 64, 1, 3, 4, 4),
        (16, 128, 128, 1, 2, 4, 3),
        (16, 256, 64, 1, 1, 8, 4),
        (32, 64, 128, 1, 2, 4, 4),
        (32, 128, 64, 4, 2, 4, 4),
        (64, 64, 64, 4, 3, 4, 4),
        (64, 128, 64, 4, 2, 4, 4),
        (64, 256, 64, 8, 1, 4, 4),
        (128, 128, 64, 8, 2, 4, 3),
        (128, 128, 64, 8, 2, 8, 3),
        (128, 256, 64, 8, 1, 8, 3),
        (128, 256, 64, 8, 1, 8, 4),
        (256, 128, 64, 8, 1, 8, 3),
    ]
]  # fmt: skip


def _set_blocks(arguments: dict) -> None:
    """Give the descriptors the tile that a config reads at a time."""
    m, n, k = arguments["BLOCK_M"], arguments["BLOCK_N"], arguments["BLOCK_K"]
    arguments["x_desc"].block_shape = [m, k]
    arguments["w_desc"].block_shape = [1, k, n] if arguments["W_ROWS"] else [1, n, k]


_TMA_CONFIGS = [
    triton.Config(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group, "PER_SM": programs, "FLATTEN": flatten},
        num_warps=warps, num_stages=stages, pre_hook=_set_blocks,
    )
    for m, n, k, group, programs, flatten, warps, stages in [
        (64, 64, 128, 1, 2, True, 4, 3),
        (64, 128, 64, 1, 2, True, 4, 4),
        (64, 128, 128, 1, 1, True, 4, 4),
        (64, 256, 64, 8, 1, True, 4, 4),
        (128, 128, 64, 8, 2, True, 4, 3),
        (128, 128, 64, 8, 2, False, 4, 3),
        (128, 128, 64, 8, 1, True, 8, 5),
        (128, 128, 128, 8, 1, True, 8, 3),
        (128, 256, 64, 4, 1, True, 8, 3),
        (128, 256, 64, 8, 1, True, 8, 3),
        (128, 256, 64, 8, 1, True, 8, 4),
        (128, 256, 64, 8, 1, False, 8, 4),
        (128, 256, 64, 16, 1, True, 8, 4),
        (256, 128, 64, 4, 1, True, 8, 4),
        (256, 128, 64, 4, 1, False, 8, 4),
    ]
]  # fmt: skip


@triton.jit
def _bounds(offsets_ptr, experts, E, T):
    """Return the first row and the row after the last of experts, inside of 0..T whatever the offsets are."""
    first = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    last = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    first = tl.minimum(tl.maximum(first, 0), T).to(tl.int32)
    return first, tl.minimum(tl.maximum(last.to(tl.int64), first.to(tl.int64)), T).to(tl.int32)


@triton.jit
def _tiles(offsets_ptr, E, T, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return how many tiles of rows there are up to the end of every expert."""
    first, last = _bounds(offsets_ptr, tl.arange(0, EXPERTS), E, T)
    return tl.cumsum((last - first + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _place(tile, until, offsets_ptr, E, T, tiles_m, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr,
           EXPERTS: tl.constexpr):  # fmt: skip
    """Return a tile's expert, first row, the row after the expert's last, and the number of its tile of columns."""
    in_group = GROUP_M * tiles_n
    first_m = (tile // in_group) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    tile_m, tile_n = first_m + (tile % in_group) % group_m, (tile % in_group) // group_m
    passed = until <= tile_m
    expert = tl.sum(passed.to(tl.int32), 0)
    before = tl.max(tl.where(passed, until, 0), 0)
    first, last = _bounds(offsets_ptr, expert, E, T)
    return expert, first + (tile_m - before) * BLOCK_M, last, tile_n


@tcache.autotune(configs=_POINTER_CONFIGS, key=["T", "N", "K", "E", "stride_wk"],
                 buckets={"T": "pow2", "stride_wk": [1]})  # fmt: skip
@triton.heuristics({"EVEN_K": lambda arguments: arguments["K"] % arguments["BLOCK_K"] == 0})
@triton.jit
def grouped_gemm_kernel(
    x_ptr, w_ptr, y_ptr, offsets_ptr, T, N, K, E,
    stride_xt, stride_xk, stride_we, stride_wk, stride_wn, stride_yt, stride_yn,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PER_SM: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    until = _tiles(offsets_ptr, E, T, BLOCK_M, EXPERTS)
    tiles_m = tl.max(until, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        expert, first, last, tile_n = _place(
            tile, until, offsets_ptr, E, T, tiles_m, tiles_n, BLOCK_M, GROUP_M, EXPERTS
        )
        rows = first + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # what lies past the edge loads valid memory and is never stored: rows the first one, columns wrap around, of
        # which the compiler knows that they are neighbours
        x_rows = tl.where(rows < last, rows, first).to(tl.int64)
        w_columns = (columns % N).to(tl.int64)
        x_tile = x_ptr + x_rows[:, None] * stride_xt + depth[None, :].to(tl.int64) * stride_xk
        w_tile = w_ptr + expert.to(tl.int64) * stride_we
        w_tile += depth[:, None].to(tl.int64) * stride_wk + w_columns[None, :] * stride_wn
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            if EVEN_K:
                x = tl.load(x_tile)
                w = tl.load(w_tile)
            else:
                x = tl.load(x_tile, mask=depth[None, :] < K - k * BLOCK_K, other=0.0)
                w = tl.load(w_tile, mask=depth[:, None] < K - k * BLOCK_K, other=0.0)
            accumulator = tl.dot(x, w, accumulator)
            x_tile += BLOCK_K * stride_xk
            w_tile += BLOCK_K * stride_wk
        y_tile = y_ptr + rows.to(tl.int64)[:, None] * stride_yt + columns.to(tl.int64)[None, :] * stride_yn
        inside = (rows[:, None] < last) & (columns[None, :] < N)
        tl.store(y_tile, accumulator.to(y_ptr.dtype.element_ty), mask=inside)


@tcache.autotune(configs=_TMA_CONFIGS, key=["T", "N", "K", "E", "W_ROWS"], buckets={"T": "pow2"})
@triton.jit
def grouped_gemm_tma_kernel(
    x_desc, w_desc, y_ptr, offsets_ptr, T, N, K, E, stride_yt, stride_yn,
    W_ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PER_SM: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    until = _tiles(offsets_ptr, E, T, BLOCK_M, EXPERTS)
    tiles_m = tl.max(until, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        expert, first, last, tile_n = _place(
            tile, until, offsets_ptr, E, T, tiles_m, tiles_n, BLOCK_M, GROUP_M, EXPERTS
        )
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            x = x_desc.load([first, k * BLOCK_K])  # rows of the next expert, too: computed, and not stored
            if W_ROWS:
                w = w_desc.load([expert, k * BLOCK_K, tile_n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            else:
                w = w_desc.load([expert, tile_n * BLOCK_N, k * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
            accumulator = tl.dot(x, w, accumulator)
        rows = first + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        y_tile = y_ptr + rows.to(tl.int64)[:, None] * stride_yt + columns.to(tl.int64)[None, :] * stride_yn
        inside = (rows[:, None] < last) & (columns[None, :] < N)
        tl.store(y_tile, accumulator.to(y_ptr.dtype.element_ty), mask=inside)


def _check(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors as they are to be read, after refusing what the kernels cannot take."""
    x, w = readable("x", x, FLOATS, 2), readable("w", w, FLOATS, 3)
    offsets = readable("offsets", offsets, (torch.int32, torch.int64), 1)
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"expected x [T, K] and w [E, K, N], got {tuple(x.shape)} and {tuple(w.shape)}")
    check_shape("offsets", offsets, (w.shape[0] + 1,), "w", contiguous=True)
    check_dtype("w", w, "x", x)
    check_device(x=x, w=w, offsets=offsets)
    if w.shape[0] > 1024:
        raise ValueError(f"w: expected at most 1024 experts, got {w.shape[0]}")
    return x, w, offsets


def _obstacle(x: torch.Tensor, w: torch.Tensor) -> str | None:
    """Return why tiles cannot come through TMA, None where they can.

    Host-side descriptors want 16-byte aligned addresses and strides, and a last dimension whose stride is 1
    (CUDA driver API, ``cuTensorMapEncodeTiled``).
    """
    if x.is_cuda and torch.version.hip is not None:
        return "AMD GPUs have none"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return f"{torch.cuda.get_device_name(x.device)} is older than compute capability 9.0"
    if x.element_size() != 2:
        return f"elements have {x.element_size()} bytes, expected 2"
    inner = w if w.stride(2) == 1 else w.transpose(1, 2)
    for name, tensor in (("x", x), ("w", inner)):
        strides = tuple(tensor.stride())
        if strides[-1] != 1:
            return f"{name} has no dimension of stride 1 where it is wanted, its strides are {strides}"
        if any(stride % 8 or stride < size for stride, size in zip(strides, tensor.shape[1:], strict=False)):
            return f"{name} overlaps, or is not aligned to 16 bytes everywhere: its strides are {strides}"
        if tensor.data_ptr() % 16:
            return f"{name} does not start at a multiple of 16 bytes"
    return None


def grouped_gemm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tma: bool | None = None) -> torch.Tensor:
    """Return, for every expert ``e``, ``x[offsets[e]:offsets[e + 1]] @ w[e]``.

    Args:
        x: ``[T, K]``, float32, float16 or bfloat16: tokens sorted by expert, any strides.
        w: ``[E, K, N]``: a weight for each of at most 1024 experts, any strides; weights stored ``[E, N, K]`` are
            given as ``w.transpose(1, 2)``. Of the dtype of ``x``.
        offsets: ``[E + 1]``, int32 or int64, ascending from 0 to T: where the rows of each expert begin. Read on the
            GPU only; values outside of 0..T count as the nearest inside.
        tma: whether tiles are read through the tensor memory accelerator; None where it can be and pays: from compute
            capability 9.0 on, two-byte elements, aligned to 16 bytes, and 32 rows for an expert on average.

    Returns:
        ``[T, N]``, contiguous, of the dtype of ``x``; products are accumulated in float32 (float32 inputs are
        multiplied in TF32). Rows that belong to no expert are not written.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes do not match, dtypes or devices differ, dtypes are none of those above, or ``tma`` is true
            and cannot be.
    """
    x, w, offsets = _check(x, w, offsets)
    tma = None if tma is None else flag("tma", tma)
    (t, k), (e, _, n) = x.shape, w.shape
    y = torch.empty((t, n), device=x.device, dtype=x.dtype)
    if y.numel() == 0 or e == 0:
        return y
    if k == 0:
        return y.zero_()
    why = "tma=False" if tma is False else _obstacle(x, w)
    if tma and why is not None:
        raise ValueError(f"tma: expected tensors that TMA can read: {why}")
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    experts = triton.next_power_of_2(e)

    def grid(meta: dict[str, int]) -> tuple[int]:
        most = (t // meta["BLOCK_M"] + min(e, t)) * triton.cdiv(n, meta["BLOCK_N"])
        return (min(processors * meta["PER_SM"], most),)

    with on_device_of(x):
        if why is None and (tma or t >= 32 * e):
            w_rows = w.stride(2) == 1
            stored = w if w_rows else w.transpose(1, 2)
            x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 8])
            w_desc = TensorDescriptor(stored, list(stored.shape), list(stored.stride()), [1, 1, 8])
            grouped_gemm_tma_kernel[grid](
                x_desc, w_desc, y, offsets, t, n, k, e, y.stride(0), y.stride(1), w_rows, experts
            )  # fmt: skip
        else:
            x, w = near(x, 1), near(w, 1)
            grouped_gemm_kernel[grid](
                x, w, y, offsets, t, n, k, e, x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2),
                y.stride(0), y.stride(1), experts,
            )  # fmt: skip
    return y


def grouped_gemm_reference(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tma: bool | None = None
) -> torch.Tensor:
    """Return what :func:`grouped_gemm` computes, in torch, rounded once from float32; waits for the offsets."""
    y = torch.zeros((x.shape[0], w.shape[2]), device=x.device, dtype=x.dtype)
    bounds = offsets.tolist()
    for e in range(w.shape[0]):
        rows = slice(bounds[e], bounds[e + 1])
        y[rows] = (x[rows].float() @ w[e].float()).to(x.dtype)
    return y


def grouped_gemm_torch(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tma: bool | None = None
) -> torch.Tensor:
    """Return the same by one ``torch.matmul`` (cuBLAS) for each expert; waits for the offsets."""
    y = torch.empty((x.shape[0], w.shape[2]), device=x.device, dtype=x.dtype)
    bounds = offsets.tolist()
    for e in range(w.shape[0]):
        torch.matmul(x[bounds[e] : bounds[e + 1]], w[e], out=y[bounds[e] : bounds[e + 1]])
    return y


def grouped_gemm_flops(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tma: bool | None = None) -> int:
    """Return the floating point operations: every token meets one weight, ``2 T N K``."""
    return 2 * x.shape[0] * x.shape[1] * w.shape[2]


def grouped_gemm_bytes(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tma: bool | None = None) -> int:
    """Return the least bytes to move: tokens, results and offsets, and the weights of the ``min(E, T)`` experts at most in use."""
    (t, k), (e, _, n) = x.shape, w.shape
    return (t * k + min(e, t) * k * n + t * n) * x.element_size() + offsets.numel() * offsets.element_size()


def grouped_gemm_inputs(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tma: bool | None = None) -> None:
    """Fill the offsets with those of tokens shared out at random, in place: experts differ as they do in use."""
    t, e = x.shape[0], w.shape[0]
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.randint(0, e, (t,), generator=generator), minlength=e)
    offsets[0] = 0
    offsets[1:] = counts.cumsum(0).to(offsets.dtype).to(offsets.device)


def grouped_gemm_tolerance(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, tma: bool | None = None
) -> tuple[float, float]:
    """Return (relative, absolute) of sums of K products in float32, by the inputs' values: see ``_sums.py``."""
    return tolerance_of_sums(x.dtype, x.shape[1], rms(x) * rms(w))
