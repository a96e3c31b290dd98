"""``c = a @ b`` for few rows of ``a``: bound by reading ``b`` once, so K is split until every multiprocessor reads.

The product is computed transposed, ``c^T = b^T a^T``: the many columns of ``b`` take the place of rows, of which the
tensor cores of Hopper want 64 at a time, and the few rows of ``a`` take that of columns, of which 8 are enough. Of the
programs that share a tile of the result the one that finishes last adds up the parts, always in the same order: one
launch, and the same bits every time.

That second pass costs microseconds, as much as reading a small matrix does. Up to 16 rows, K may be split among the
warps of a program instead, whose parts meet in shared memory: a tile of 16 columns is enough then, and the tiles of
4096 columns fill the GPU. A single row may be multiplied without tensor cores: weights are loaded straight into
registers, with the first instructions, and nothing waits for a pipeline to fill.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import is_traced, on_device_of
from ._matrices import near, operands
from ._sums import rms, tolerance_of_sums

MOST_ROWS = 128
"""Up to so many rows of ``a`` reading ``b`` takes longer than multiplying: 2 M operations for each 2 bytes of ``b``, where
an H200 computes about 200 in the time of a byte. For more see ``matmul_persistent``."""

_TILES = [
    # BLOCK_N, BLOCK_K, SPLIT_K, warps, stages; shared memory = stages * (BLOCK_N + BLOCK_M) * BLOCK_K * 2
    (64, 64, 1, 4, 4),  # first: fits everywhere, for shapes that were never tuned
    (32, 256, 1, 4, 4),
    (32, 128, 2, 4, 5),
    (32, 256, 2, 4, 4),
    (64, 128, 1, 4, 5),
    (64, 256, 1, 4, 4),
    (64, 128, 2, 4, 5),
    (64, 256, 2, 4, 4),
    (64, 64, 4, 4, 6),
    (64, 128, 4, 4, 5),
    (64, 128, 8, 4, 4),
    (128, 64, 1, 4, 5),
    (128, 128, 1, 8, 4),
    (128, 64, 2, 8, 5),
    (128, 128, 2, 8, 3),
    (128, 64, 4, 8, 5),
    (128, 128, 4, 8, 4),
    (256, 64, 1, 8, 4),
]
_WAY_TILES = [
    # BLOCK_N, BLOCK_K, WAYS, warps, stages: each warp multiplies its own part of K; shared memory is WAYS times as much
    (16, 64, 4, 4, 4),
    (16, 64, 4, 4, 6),
    (16, 128, 4, 4, 3),
    (32, 64, 4, 4, 4),
    (16, 64, 8, 8, 3),
    (32, 64, 8, 8, 3),
]
_ROW_TILES = [
    # BLOCK_N, BLOCK_K, SPLIT_K, warps: a thread has all of its BLOCK_N * BLOCK_K / threads elements under way at once
    (1, 4096, 1, 4),
    (2, 2048, 1, 2),
    (2, 4096, 1, 4),
    (4, 2048, 1, 4),
    (4, 4096, 1, 8),
    (8, 1024, 1, 4),
    (8, 2048, 1, 4),
    (8, 1024, 2, 4),
]
_SMALLEST_N = 8  # of those that split K, each tile of which has a counter
_LARGEST_SPLIT = 8


def _config(n: int, k: int, split: int, ways: int, warps: int, stages: int) -> triton.Config:
    return triton.Config(
        {"BLOCK_N": n, "BLOCK_K": k, "SPLIT_K": split, "WAYS": ways}, num_warps=warps, num_stages=stages
    )


_CONFIGS = [
    *(_config(n, k, split, 1, warps, stages) for n, k, split, warps, stages in _TILES),
    *(_config(n, k, 1, ways, warps, stages) for n, k, ways, warps, stages in _WAY_TILES),
    *(_config(n, k, split, 0, warps, 1) for n, k, split, warps in _ROW_TILES),
]


def _prune(configs, named, **_given):
    """Keep what splits K among warps for up to 16 rows, and what goes without tensor cores for one of contiguous columns."""
    single = named["M"] == 1 and named["stride_bk"] == 1
    ways = [1, *([4, 8] if named["M"] <= 16 else []), *([0] if single else [])]
    return [config for config in configs if config.kwargs["WAYS"] in ways]


@triton.jit
def _with_tensor_cores(a_ptr, b_ptr, columns, rows, first, steps, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                       BLOCK_K: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Return the products of columns of ``b`` and rows of ``a``, of BLOCK_K times ``steps`` terms from ``first`` on."""
    depth = first + tl.arange(0, BLOCK_K)
    b_tile = b_ptr + columns.to(tl.int64)[:, None] * stride_bn + depth.to(tl.int64)[None, :] * stride_bk
    a_tile = a_ptr + depth.to(tl.int64)[:, None] * stride_ak + rows.to(tl.int64)[None, :] * stride_am
    accumulator = tl.zeros((columns.shape[0], rows.shape[0]), dtype=tl.float32)
    for step in range(0, steps):
        if EVEN:
            b = tl.load(b_tile)
            a = tl.load(a_tile, mask=rows[None, :] < M, other=0.0)
        else:
            left = K - step * BLOCK_K
            b = tl.load(b_tile, mask=(columns[:, None] < N) & (depth[None, :] < left), other=0.0)
            a = tl.load(a_tile, mask=(rows[None, :] < M) & (depth[:, None] < left), other=0.0)
        accumulator = tl.dot(b.to(a.dtype), a, accumulator)
        b_tile += BLOCK_K * stride_bk
        a_tile += BLOCK_K * stride_ak
    return accumulator


@triton.jit
def _in_ways(a_ptr, b_ptr, columns, rows, first, steps, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
             BLOCK_K: tl.constexpr, WAYS: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Return the same of WAYS times as many terms: as many products side by side, each a warp's own, added up at the end.

    A warp's multiplications on one tile wait for each other; split among warps, the chain is shorter, small tiles and so
    many programs are fast enough, and the parts meet in shared memory instead of in the GPU's.
    """
    way = tl.arange(0, WAYS)[:, None, None] * (steps * BLOCK_K)
    depth = first + tl.arange(0, BLOCK_K)
    down, across = (way + depth[None, :, None]).to(tl.int64), (way + depth[None, None, :]).to(tl.int64)
    b_tile = b_ptr + columns.to(tl.int64)[None, :, None] * stride_bn + across * stride_bk
    a_tile = a_ptr + down * stride_ak + rows.to(tl.int64)[None, None, :] * stride_am
    accumulator = tl.zeros((WAYS, columns.shape[0], rows.shape[0]), dtype=tl.float32)
    for step in range(0, steps):
        if EVEN:
            b = tl.load(b_tile)
            a = tl.load(a_tile, mask=rows[None, None, :] < M, other=0.0)
        else:
            left = K - step * BLOCK_K
            b = tl.load(b_tile, mask=(columns[None, :, None] < N) & (across < left), other=0.0)
            a = tl.load(a_tile, mask=(rows[None, None, :] < M) & (down < left), other=0.0)
        accumulator = tl.dot(b.to(a.dtype), a, accumulator)
        b_tile += BLOCK_K * stride_bk
        a_tile += BLOCK_K * stride_ak
    return tl.sum(accumulator, axis=0)


@triton.jit
def _of_one_row(a_ptr, b_ptr, columns, first, steps, N, K, stride_ak, stride_bk, stride_bn,
                BLOCK_K: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Return the same for the first row of ``a`` alone, ``[BLOCK_N, 1]``."""
    CHUNK: tl.constexpr = BLOCK_K // 4
    depth = tl.arange(0, CHUNK)[None, :]
    b_at = columns.to(tl.int64)[:, None] * stride_bn + depth.to(tl.int64) * stride_bk
    # every thread reads the part of the row that its own columns meet: no way through shared memory, no barrier
    a_at = tl.broadcast_to(depth.to(tl.int64) * stride_ak, (columns.shape[0], CHUNK))
    products = tl.zeros((columns.shape[0], CHUNK), dtype=tl.float32)
    for step in range(0, steps):
        for chunk in tl.static_range(4):
            start = first + step * BLOCK_K + chunk * CHUNK
            b_tile = b_ptr + tl.cast(start, tl.int64) * stride_bk + b_at
            a_tile = a_ptr + tl.cast(start, tl.int64) * stride_ak + a_at
            if EVEN:
                b = tl.load(b_tile, eviction_policy="evict_first")
                a = tl.load(a_tile)
            else:
                b = tl.load(b_tile, mask=(columns[:, None] < N) & (depth < K - start), other=0.0)
                a = tl.load(a_tile, mask=depth < K - start, other=0.0)
            products += b.to(tl.float32) * a.to(tl.float32)
    return tl.sum(products, axis=1)[:, None]


@tcache.autotune(
    configs=_CONFIGS, key=["M", "N", "K", "stride_bk"], buckets={"M": [1, 8, 16, 32, 64, 128], "stride_bk": [1]},
    prune_configs_by={"early_config_prune": _prune},
)  # fmt: skip
@triton.heuristics(
    {
        "BLOCK_M": lambda arguments: max(16, triton.next_power_of_2(arguments["M"])),
        "EVEN": lambda arguments: (
            arguments["N"] % arguments["BLOCK_N"] == 0
            and arguments["K"] % (arguments["BLOCK_K"] * arguments["SPLIT_K"] * max(1, arguments["WAYS"])) == 0
        ),
    }
)
@triton.jit
def matmul_decode_kernel(
    a_ptr, b_ptr, c_ptr, scale_ptr, parts_ptr, arrived_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, WAYS: tl.constexpr,
    BLOCK_M: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of columns, or one part of K of it; columns are scaled at the end where there is a scale."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    WIDE: tl.constexpr = SPLIT_K * max(1, WAYS)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), WIDE)
    first = part * (WIDE // SPLIT_K) * steps * BLOCK_K
    if WAYS == 0:  # the other rows are not stored
        row = _of_one_row(a_ptr, b_ptr, columns, first, steps, N, K, stride_ak, stride_bk, stride_bn, BLOCK_K, EVEN)
        accumulator = tl.broadcast_to(row, (BLOCK_N, BLOCK_M))
    elif WAYS == 1:
        accumulator = _with_tensor_cores(
            a_ptr, b_ptr, columns, rows, first, steps, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_K, EVEN
        )  # fmt: skip
    else:
        accumulator = _in_ways(
            a_ptr, b_ptr, columns, rows, first, steps, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_K, WAYS, EVEN,
        )  # fmt: skip
    inside = (columns[:, None] < N) & (rows[None, :] < M)
    c_tile = c_ptr + columns.to(tl.int64)[:, None] * stride_cn + rows.to(tl.int64)[None, :] * stride_cm
    if scale_ptr is not None:
        accumulator *= tl.load(scale_ptr + columns, mask=columns < N, other=0.0)[:, None]
    if SPLIT_K == 1:
        tl.store(c_tile, accumulator.to(c_ptr.dtype.element_ty), mask=inside)
    else:
        # [SPLIT_K, M, N]; read past the first-level cache, which is not kept coherent between multiprocessors
        parts_tile = parts_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(parts_tile + part.to(tl.int64) * M * N, accumulator, mask=inside, cache_modifier=".cg")
        tl.debug_barrier()  # every thread has written before one of them announces it
        before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT_K - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            if BLOCK_M <= 32:  # all loads at once; more do not fit into registers
                for other in tl.static_range(SPLIT_K):
                    offset = tl.full((), other, tl.int64) * M * N
                    total += tl.load(parts_tile + offset, mask=inside, other=0.0, cache_modifier=".cg")
            else:
                for other in range(SPLIT_K):
                    offset = tl.full((), other, tl.int64) * M * N
                    total += tl.load(parts_tile + offset, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(c_tile, total.to(c_ptr.dtype.element_ty), mask=inside)
            tl.store(arrived_ptr + tile, 0)  # for the next launch on this stream


_arrived: dict[tuple[int | None, int], torch.Tensor] = {}
_PER_THREAD = 2
"""The handle ``cudaStreamPerThread`` (CUDA runtime API, "Stream synchronization behavior"): every thread's own stream."""


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """Return zeros for a launch to count with; it leaves zeros behind.

    Launches on one stream run one after another and share theirs. A CUDA graph has its own, cleared by the graph:
    it may run beside others that were captured on the same stream. So has each launch on ``cudaStreamPerThread``, one
    handle for the streams of all threads, and each that torch.compile traces, which may make a CUDA graph of it.

    CUDA may give a destroyed stream's handle to a new one. The counters are as good for that: they are zeros once the
    old stream's launches are done, and a stream's resources, its handle among them, are released when its work is done
    (``cudaStreamDestroy``); torch's own streams are never destroyed. Nothing but zeros is left by a launch that failed
    either: one that was refused did not run, and one that a fault stopped half-way took the CUDA context with it, after
    which no launch of the process runs.
    """
    if device.type != "cuda" or is_traced() or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, device=device, dtype=torch.int32)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    if key[1] == _PER_THREAD:
        return torch.zeros(count, device=device, dtype=torch.int32)
    kept = _arrived.get(key)
    if kept is None or kept.numel() < count:
        kept = torch.zeros(max(count, 8192), device=device, dtype=torch.int32)
        if type(kept) is torch.Tensor and kept.data_ptr():  # not one without memory, of a replay
            _arrived[key] = kept
    return kept


def launch_decode(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Write ``a @ b * scale`` to ``c``; nothing is checked.

    Args:
        a: ``[M, K]``, M from 1 to 128, K at least 1.
        b: ``[K, N]``, of the dtype of ``a`` or of one that is exact in it.
        c: ``[M, N]``.
        scale: ``[N]`` float32, contiguous; None for none.
    """
    a, b = near(a, 1), near(b, 0)
    (m, k), n = a.shape, b.shape[1]
    parts = torch.empty((_LARGEST_SPLIT, m, n), device=a.device, dtype=torch.float32)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(n, meta["BLOCK_N"]), meta["SPLIT_K"]

    with on_device_of(a):
        arrived = _counters(a.device, triton.cdiv(n, _SMALLEST_N))
        matmul_decode_kernel[grid](
            a, b, c, scale, parts, arrived, m, n, k,
            a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        )  # fmt: skip


def matmul_decode(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` for at most 128 rows of ``a``.

    Args:
        a: ``[M, K]``, M at most 128, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, any strides.
        b: ``[K, N]``, any strides, of the dtype of ``a``; fastest where one of them is 1, as in a weight stored
            ``[N, K]`` and transposed.

    Returns:
        ``[M, N]``, contiguous, of the dtype of ``a``; products are accumulated in float32 (float32 inputs are
        multiplied in TF32; of float8 Hopper keeps about 14 bits of a sum, see ``_sums.py``). The same inputs give the
        same bits. Meanwhile 32 M N bytes are taken, for the parts of a K that is split into 8: which config will be
        launched is not known before.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes do not match, ``a`` has more than 128 rows, dtypes or devices differ, or the dtype is none
            of these, or none that the GPU has.
    """
    a, b = operands(a, b)
    (m, k), n = a.shape, b.shape[1]
    if m > MOST_ROWS:
        raise ValueError(f"a: expected at most {MOST_ROWS} rows, got {m}: use matmul or matmul_persistent")
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    if m == 0 or n == 0:
        return c
    if k == 0:
        return c.zero_()
    launch_decode(a, b, c, None)
    return c


def matmul_decode_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what :func:`matmul_decode` computes, in torch, rounded once from float32."""
    return (a.float() @ b.float()).to(a.dtype)


def matmul_decode_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` as torch computes it: through cuBLAS on an NVIDIA GPU."""
    return a @ b


def matmul_decode_flops(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the floating point operations of a product: a multiplication and an addition, ``2 M N K``."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def matmul_decode_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the least bytes to move: both matrices read once, the result written once."""
    (m, k), n = a.shape, b.shape[1]
    return (m * k + k * n + m * n) * a.element_size()


def matmul_decode_tolerance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return (relative, absolute) of sums of K products in float32, by the inputs' values: see ``_sums.py``."""
    return tolerance_of_sums(a.dtype, a.shape[1], rms(a) * rms(b))
