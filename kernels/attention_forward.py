"""Attention forward: tiles of queries walk over the keys with an online softmax, scores never reach memory.

The walk is cut in two: keys that every query of the tile sees, without any mask, and the rest (the diagonal and a
ragged end), with one. The softmax works in powers of two, because that is what the hardware computes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

import tcache

from ._check import MOST, check_device, check_dtype, flag, on_device_of, positive, readable

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHARED_MEMORY = 227 << 10
"""Bytes a block may have at most on any GPU so far (NVIDIA, compute capability 9.0)."""

_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "TOGETHER": 8}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in [
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 64, 4, 3),
        (128, 64, 4, 2),
        (128, 128, 8, 3),
        (64, 128, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 64, 8, 3),
        (128, 32, 4, 4),
        (64, 32, 4, 2),
        (32, 32, 4, 2),
        (16, 64, 4, 3),
    ]
]


def quick_to_multiply(kept: int, walked: int, dim: int, size: int, warps: int) -> bool:
    """Return whether a thread unrolls at most 2,048 multiply-adds a product; float32 has no tensor cores here."""
    return size < 4 or kept * walked * dim <= 2048 * 32 * warps


def fitting(configs, named_args, **launch):
    """Keep the configs whose tiles can fit the registers and the shared memory of a block, the smallest if none does."""
    dim = launch.get("HEAD_DIM", named_args.get("HEAD_DIM"))
    size = named_args["q_ptr"].element_size()

    def fits(config):
        m, n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
        shared = (m + 2 * n * config.num_stages) * dim * size
        accumulators = m * (dim + n) / (config.num_warps * 32)  # registers of a thread, of 255; more of them spill
        quick = quick_to_multiply(m, n, dim, size, config.num_warps)
        return shared <= SHARED_MEMORY and accumulators <= 160 and quick

    return [config for config in configs if fits(config)] or [
        min(configs, key=lambda config: config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"] * config.num_stages)
    ]


@triton.jit
def _attend(
    accumulator, total, largest, q, k_head, v_head, stride_kn, stride_vn,
    rows, first, last, kv_len, shift, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys ``first`` to ``last`` into the running maximum, sum and weighted values of a tile of queries."""
    columns = tl.arange(0, BLOCK_N)
    wide = columns.to(tl.int64)[:, None]
    depth = tl.arange(0, HEAD_DIM)[None, :]
    # a tile of offsets and one pointer that moves: tiles of pointers carried through both loops cost 128 registers
    k_offsets, v_offsets = wide * stride_kn + depth, wide * stride_vn + depth
    for start in range(first, last, BLOCK_N):
        moved = tl.cast(start, tl.int64)
        k_tile = k_head + moved * stride_kn + k_offsets
        v_tile = v_head + moved * stride_vn + v_offsets
        if MASKED:
            inside = start + columns < kv_len
            k = tl.load(k_tile, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_tile)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (start + columns[None, :] <= rows[:, None] + shift)
            scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1) * scale)
        # -inf here is a row without a finite score so far: with 0 in its place all its powers are 0, not NaN
        base = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.math.exp2(scores * scale - base[:, None])
        shrink = tl.math.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        v = tl.load(v_tile, mask=inside[:, None], other=0.0) if MASKED else tl.load(v_tile)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
        largest = above
    return accumulator, total, largest


@tcache.autotune(
    configs=_CONFIGS,
    key=["q_len", "kv_len", "HEAD_DIM", "CAUSAL", "GROUP"],
    buckets={"q_len": "pow2", "kv_len": "pow2"},
    prune_configs_by={"early_config_prune": fitting},
)
@triton.jit(do_not_specialize=["slots", "heads", "q_len", "kv_len"])
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    scale, slots, heads, q_len, kv_len,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # TOGETHER heads advance side by side, so that tiles which read the same keys run at the same time; under a causal
    # mask the long tiles come first and the short ones fill the gaps at the end
    program = tl.program_id(0)
    tiles = tl.cdiv(q_len, BLOCK_M)
    batch_of = program // (tiles * TOGETHER)
    within = program % (tiles * TOGETHER)
    together = tl.minimum(slots - batch_of * TOGETHER, TOGETHER)
    slot = (batch_of * TOGETHER + within % together).to(tl.int64)
    tile = within // together
    if CAUSAL:
        tile = tiles - 1 - tile
    batch, head = slot // heads, slot % heads
    kv_head = head // GROUP

    top = tile * BLOCK_M
    rows = top + tl.arange(0, BLOCK_M)
    depth = tl.arange(0, HEAD_DIM)
    valid = rows < q_len
    wide = rows.to(tl.int64)
    q = tl.load(
        q_ptr + batch * stride_qb + head * stride_qh + wide[:, None] * stride_qm + depth[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    k_head = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_head = v_ptr + batch * stride_vb + kv_head * stride_vh

    shift = kv_len - q_len  # the last query sees the last key
    end = kv_len
    whole = kv_len
    if CAUSAL:
        end = tl.maximum(tl.minimum(kv_len, top + BLOCK_M + shift), 0)
        whole = tl.maximum(tl.minimum(kv_len, top + 1 + shift), 0)
    whole = whole // BLOCK_N * BLOCK_N
    scale2 = scale * 1.4426950408889634
    accumulator = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    accumulator, total, largest = _attend(
        accumulator, total, largest, q, k_head, v_head, stride_kn, stride_vn,
        rows, 0, whole, kv_len, shift, scale2, CAUSAL, HEAD_DIM, BLOCK_N, MASKED=False,
    )  # fmt: skip
    accumulator, total, largest = _attend(
        accumulator, total, largest, q, k_head, v_head, stride_kn, stride_vn,
        rows, whole, end, kv_len, shift, scale2, CAUSAL, HEAD_DIM, BLOCK_N, MASKED=True,
    )  # fmt: skip

    nothing = total == 0.0  # no key seen: the output is 0, the logarithm of the sum -inf
    accumulator = accumulator / tl.where(nothing, 1.0, total)[:, None]
    lse = tl.where(nothing, float("-inf"), (largest + tl.math.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + slot * q_len + rows, lse, mask=valid)
    tl.store(
        o_ptr + batch * stride_ob + head * stride_oh + wide[:, None] * stride_om + depth[None, :],
        accumulator.to(o_ptr.dtype.element_ty),
        mask=valid[:, None],
    )


def check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return q, k and v as they are to be read and the scale, its default filled in, after refusing what cannot be.

    Raises:
        TypeError: see :func:`attention_forward`.
        ValueError: see :func:`attention_forward`.
    """
    q, k, v = readable("q", q, DTYPES, 4), readable("k", k, DTYPES, 4), readable("v", v, DTYPES, 4)
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "expected q [B, Hq, Sq, D] and k, v [B, Hkv, Skv, D], "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
    if dim not in HEAD_DIMS:
        raise ValueError(f"q: expected a head dimension of {', '.join(map(str, HEAD_DIMS))}, got {dim}")
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"q: expected heads in multiples of those of k, got {heads} and {kv_heads}")
    if q.shape[0] * heads > MOST:
        raise ValueError(f"q: expected at most {MOST} heads of all sequences together, got shape {tuple(q.shape)}")
    check_dtype("k", k, "q", q)
    check_dtype("v", v, "q", q)
    check_device(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}")
    return q, k, v, positive("scale", scale, dim**-0.5)


def like(x: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor in the memory order of ``x``, contiguous in the last dimension.

    ``torch.empty_like`` alone does not promise that: where elements of ``x`` share memory (sliding windows: strides of
    1 in two dimensions) it may put another dimension innermost.
    """
    found = torch.empty_like(x)
    return found if found.stride(-1) == 1 else torch.empty(x.shape, device=x.device, dtype=x.dtype)


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``softmax(scale * q @ k.T) @ v`` and the logarithm of the softmax's sum.

    Args:
        q: ``[B, Hq, Sq, D]``, float16, bfloat16 or float32; any strides with a contiguous last dimension, so that a
            ``[B, S, H, D]`` tensor goes in as ``x.transpose(1, 2)``. D is 16, 32, 64, 128 or 256.
        k: ``[B, Hkv, Skv, D]``; Hq is a multiple of Hkv, and ``Hq / Hkv`` consecutive query heads share a key head.
        v: shaped like ``k``.
        causal: query i sees the keys up to ``i + Skv - Sq``: the last query sees the last key, as when earlier keys
            come from a cache. With ``Sq == Skv`` that is torch's ``is_causal``; for other lengths it is torch's
            ``causal_lower_right``, whereas ``is_causal`` aligns the first query with the first key.
        scale: above 0; ``D ** -0.5`` if left out.

    Returns:
        ``[B, Hq, Sq, D]`` of the dtype and memory order of ``q``, and ``[B, Hq, Sq]`` in float32, the natural
        logarithm of ``sum(exp(scores))``. Products are accumulated in float32 and the weights rounded to the dtype of
        ``v`` in between; float32 is multiplied as float32. A query that sees no key gets 0 and -inf.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes, dtypes, devices or strides are others than these.
    """
    q, k, v, scale = check_attention(q, k, v, scale)
    causal = flag("causal", causal)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    o = like(q)
    lse = torch.empty((batch, heads, q_len), device=q.device, dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    if kv_len == 0:
        return o.zero_(), lse.fill_(-math.inf)
    slots = batch * heads

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(q_len, meta["BLOCK_M"]) * slots,)

    with on_device_of(q):
        attention_forward_kernel[grid](
            *(q, k, v, o, lse, scale, slots, heads, q_len, kv_len),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3]),
            HEAD_DIM=dim,
            CAUSAL=bool(causal),
            GROUP=heads // kv_heads,
        )
    return o, lse


def visible_pairs(q_len: int, kv_len: int, causal: bool) -> int:
    """Return how many (query, key) pairs count: all, or those that the causal mask leaves."""
    if not causal:
        return q_len * kv_len
    shortest = min(q_len, kv_len)
    return shortest * (shortest + 1) // 2 + (kv_len - shortest) * q_len


def scores_of(q, k, first, causal, scale):
    """Return ``(scores, lse)`` of the queries from ``first`` on, in the precision of ``q``, for references."""
    kv_len = k.shape[2]
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if causal:
        rows, length = torch.arange(first[0], first[0] + q.shape[2], device=q.device), first[1]
        hidden = torch.arange(kv_len, device=q.device)[None, :] > rows[:, None] + (kv_len - length)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores, torch.logsumexp(scores, -1)


def widen(q, k, v):
    """Return the tensors in the precision of references, keys and values repeated for each query head."""
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    group = q.shape[1] // max(k.shape[1], 1)
    return q.to(wide), *(x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))


def row_chunks(q, k):
    """Return the ranges of queries whose scores fill at most 2 GB in float32."""
    step = max(1, (1 << 29) // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [(first, min(first + step, q.shape[2])) for first in range(0, q.shape[2], step)]


def attention_forward_reference(q, k, v, causal=True, scale=None):
    """Return what :func:`attention_forward` computes, in torch: in float64 for float32, else in float32."""
    q, k, v, scale = check_attention(q, k, v, scale)
    wide_q, wide_k, wide_v = widen(q, k, v)
    outputs, sums = [], []
    for first, last in row_chunks(q, k):
        scores, lse = scores_of(wide_q[:, :, first:last], wide_k, (first, q.shape[2]), causal, scale)
        weights = torch.exp(scores - lse[..., None]).masked_fill((lse == -math.inf)[..., None], 0.0)
        outputs.append(torch.matmul(weights, wide_v).to(q.dtype))
        sums.append(lse.float())
    if not outputs:
        return torch.empty_like(q), torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def attention_forward_flops(q, k, v, causal=True, scale=None) -> int:
    """Return the operations of both products, ``4 * B * Hq * D`` for each pair of a query and a key it sees.

    The count of Dao, FlashAttention-2 (arXiv 2307.08691, section 4.1), with the exact number of pairs.
    """
    return 4 * q.shape[0] * q.shape[1] * q.shape[3] * visible_pairs(q.shape[2], k.shape[2], causal)


def attention_forward_bytes(q, k, v, causal=True, scale=None) -> int:
    """Return the bytes of q, k and v, read once, and of the output and its sums, written once."""
    return (2 * q.numel() + k.numel() + v.numel()) * q.element_size() + q.numel() // max(q.shape[3], 1) * 4
