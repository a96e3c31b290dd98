"""Decode attention: one new query per sequence against keys and values in pages, the sequence split among programs.

All query heads of a key head are computed together, so that keys and values are read once. Each program takes one
part of one sequence's keys; a second kernel puts the parts together. How many parts is decided from sizes that the
host knows, where a part begins from the length on the device: nothing waits for the GPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

import tcache

from ._check import MOST, check_device, check_dtype, check_shape, on_device_of, positive, readable

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PAGE_SIZES = (16, 32, 64, 128)
PROGRAMS = 1024
"""Programs wanted at once: a few for each multiprocessor of a large GPU, whatever its count."""
LONGEST, SHORTEST = 4096, 256
"""Most and fewest keys of a part: sequences of very different lengths still share the GPU, and parts pay off."""

_CONFIGS = [
    triton.Config({"BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for n, warps, stages in [
        # the loads of keys wait for that of the table: up to 4 stages keep one tile of keys under way, 5 and 6 two
        (64, 4, 3),
        (64, 4, 5),
        (64, 4, 2),
        (128, 4, 3),
        (128, 8, 3),
        (128, 8, 5),
        (64, 2, 3),
        (64, 8, 5),
        (32, 4, 5),
        (32, 2, 3),
        (32, 4, 2),
        (16, 4, 3),
    ]
]


def _fitting(configs, named_args, **launch):
    """Keep the configs whose tiles of keys and values fit the shared memory of a block, the smallest if none does."""
    row = launch.get("HEAD_DIM", named_args.get("HEAD_DIM")) * named_args["k_ptr"].element_size()

    def shared(config):
        return 2 * config.kwargs["BLOCK_N"] * max(1, (config.num_stages - 1) // 2) * row

    return [config for config in configs if shared(config) <= 200 << 10] or [min(configs, key=shared)]


@triton.jit
def _attend(
    accumulator, total, largest, q, k_head, v_head, row, first, last, pages, scale,
    stride_kp, stride_ks, stride_vp, stride_vs,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, FLAT: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the tokens ``first`` to ``last`` into the running maximum, sum and weighted values of a group's queries."""
    depth = tl.arange(0, HEAD_DIM)[None, :]
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < last
        page = (
            tl.load(row + tokens // PAGE_SIZE, mask=inside, other=0) if MASKED else tl.load(row + tokens // PAGE_SIZE)
        )
        page = tl.minimum(page.to(tl.uint32), pages - 1).to(tl.int32)  # never outside the cache
        place = (tokens.to(tl.uint32) % PAGE_SIZE).to(tl.int32)
        if FLAT:  # half of the address arithmetic, which is a third of the loop
            k_offsets = (page * PAGE_SIZE + place).to(tl.int64) * stride_ks
            v_offsets = k_offsets
        else:
            k_offsets = page.to(tl.int64) * stride_kp + place.to(tl.int64) * stride_ks
            v_offsets = page.to(tl.int64) * stride_vp + place.to(tl.int64) * stride_vs
        k_tile = k_head + k_offsets[:, None] + depth
        v_tile = v_head + v_offsets[:, None] + depth
        k = tl.load(k_tile, mask=inside[:, None], other=0.0) if MASKED else tl.load(k_tile)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1) * scale)
        base = tl.where(above == float("-inf"), 0.0, above)  # no finite score so far: powers of 0, not NaN
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
    key=["slots", "splits", "table_width", "HEAD_DIM", "GROUP", "PAGE_SIZE"],
    buckets={"slots": "pow2", "splits": "pow2", "table_width": "pow2"},
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, o_ptr, part_ptr, lse_ptr,
    scale, slots, splits, kv_heads, pages, table_width,
    stride_qb, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_tb, stride_lb, stride_ob, stride_oh,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    FLAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # key heads vary fastest: the heads of a page lie side by side in memory
    slot, split = tl.program_id(0) % slots, tl.program_id(0) // slots
    batch, kv_head = (slot // kv_heads).to(tl.int64), (slot % kv_heads).to(tl.int64)
    length = tl.load(length_ptr + batch * stride_lb)
    length = tl.maximum(tl.minimum(length, table_width * PAGE_SIZE), 0)
    part = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    first = split * part
    last = tl.minimum(first + part, length)

    members = tl.arange(0, ROWS)  # rows past the group are padding: tensor cores take 16, and bandwidth is the limit
    member = members[:, None] < GROUP
    depth = tl.arange(0, HEAD_DIM)[None, :]
    head = kv_head * GROUP + members
    q = tl.load(q_ptr + batch * stride_qb + head[:, None] * stride_qh + depth, mask=member, other=0.0)
    k_head, v_head = k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh
    row = table_ptr + batch * stride_tb
    scale2 = scale * 1.4426950408889634

    accumulator = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    whole = first + tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
    accumulator, total, largest = _attend(
        accumulator, total, largest, q, k_head, v_head, row, first, whole, pages, scale2,
        stride_kp, stride_ks, stride_vp, stride_vs, HEAD_DIM, PAGE_SIZE, FLAT, BLOCK_N, MASKED=False,
    )  # fmt: skip
    accumulator, total, largest = _attend(
        accumulator, total, largest, q, k_head, v_head, row, whole, last, pages, scale2,
        stride_kp, stride_ks, stride_vp, stride_vs, HEAD_DIM, PAGE_SIZE, FLAT, BLOCK_N, MASKED=True,
    )  # fmt: skip

    nothing = total == 0.0
    accumulator = accumulator / tl.where(nothing, 1.0, total)[:, None]
    if WHOLE:
        o_tile = o_ptr + batch * stride_ob + head[:, None] * stride_oh + depth
        tl.store(o_tile, accumulator.to(o_ptr.dtype.element_ty), mask=member)
    else:
        target = (batch * kv_heads * GROUP + head) * splits + split
        lse = tl.where(nothing, float("-inf"), largest + tl.math.log2(total))
        tl.store(part_ptr + target[:, None] * HEAD_DIM + depth, accumulator, mask=member)
        tl.store(lse_ptr + target, lse, mask=members < GROUP)


@tcache.autotune(
    configs=[
        triton.Config({"BLOCK_S": block}, num_warps=warps) for block, warps in [(16, 4), (16, 2), (32, 4), (8, 1)]
    ],
    key=["splits", "HEAD_DIM"],
    buckets={"splits": "pow2"},
)
@triton.jit
def decode_combine_kernel(
    part_ptr, lse_ptr, o_ptr, heads, splits, stride_ob, stride_oh, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    batch, head = slot // heads, slot % heads
    depth = tl.arange(0, HEAD_DIM)
    accumulator = tl.zeros((HEAD_DIM,), tl.float32)
    total = 0.0
    largest = float("-inf")
    for start in range(0, splits, BLOCK_S):
        at = start + tl.arange(0, BLOCK_S)
        inside = at < splits
        lse = tl.load(lse_ptr + slot * splits + at, mask=inside, other=float("-inf"))
        parts = tl.load(
            part_ptr + (slot * splits + at)[:, None] * HEAD_DIM + depth[None, :], mask=inside[:, None], other=0.0
        )
        above = tl.maximum(largest, tl.max(lse, 0))
        base = tl.where(above == float("-inf"), 0.0, above)  # an empty sequence: all weights 0
        weights = tl.math.exp2(lse - base)
        shrink = tl.math.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 0)
        accumulator = accumulator * shrink + tl.sum(weights[:, None] * parts, 0)
        largest = above
    accumulator = accumulator / tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + batch * stride_ob + head * stride_oh + depth, accumulator.to(o_ptr.dtype.element_ty))


def _splits(slots: int, longest: int) -> int:
    """Return in how many parts sequences are cut, a power of two.

    Args:
        slots: sequences times key heads.
        longest: keys that the table has room for.
    """
    wanted = max(PROGRAMS // max(slots, 1), 1)
    fewest, most = -(-longest // LONGEST), -(-longest // SHORTEST)
    return 1 << (max(min(wanted, most), fewest, 1) - 1).bit_length()


def _check(q, k_cache, v_cache, block_table, lengths, scale):
    """Return all arguments, tensors as they are to be read and the scale's default filled in; refuse what cannot be.

    Raises:
        TypeError: see :func:`decode_attention`.
        ValueError: see :func:`decode_attention`.
    """
    q = readable("q", q, DTYPES, 3)
    k_cache, v_cache = readable("k_cache", k_cache, DTYPES, 4), readable("v_cache", v_cache, DTYPES, 4)
    block_table = readable("block_table", block_table, (torch.int32,), 2)
    lengths = readable("lengths", lengths, (torch.int32,), 1)
    if k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "expected q [B, Hq, D] and k_cache, v_cache [pages, page_size, Hkv, D], "
            f"got {tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    batch, heads, dim = q.shape
    _, page_size, kv_heads, _ = k_cache.shape
    if dim not in HEAD_DIMS or page_size not in PAGE_SIZES:
        raise ValueError(
            f"expected D of q in {HEAD_DIMS} and a page size of k_cache in {PAGE_SIZES}, got {dim} and {page_size}"
        )
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"q: expected heads in multiples of those of k_cache, got {heads} and {kv_heads}")
    check_dtype("k_cache", k_cache, "q", q)
    check_dtype("v_cache", v_cache, "q", q)
    check_shape("block_table", block_table, (batch, block_table.shape[1]), "q")
    check_shape("lengths", lengths, (batch,), "q")
    if batch * heads > MOST or block_table.shape[1] * page_size > MOST:
        raise ValueError(
            f"expected at most {MOST} heads in q and as many keys of a sequence in block_table, "
            f"got {tuple(q.shape)} and {tuple(block_table.shape)} with pages of {page_size}"
        )
    check_device(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, lengths=lengths)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)):
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if 0 < cache.stride(1) < dim:  # at a stride of 1 Triton's compiler takes such tokens for aligned ones
            raise ValueError(f"{name}: expected tokens that do not overlap, got strides {cache.stride()}")
    return q, k_cache, v_cache, block_table, lengths, positive("scale", scale, dim**-0.5)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of one query per sequence to the keys of its pages.

    Args:
        q: ``[B, Hq, D]``, float16, bfloat16 or float32, contiguous in the last dimension. D is 16, 32, 64, 128 or 256.
        k_cache, v_cache: ``[pages, page_size, Hkv, D]``, any strides with a contiguous last dimension and
            tokens that do not overlap; Hq is a multiple of Hkv, ``Hq / Hkv`` consecutive query heads share a key head.
            page_size is 16, 32, 64 or 128.
        block_table: ``[B, max_pages]`` int32, contiguous in the last dimension: token t of sequence b is in page ``block_table[b, t // page_size]``.
            Entries past a sequence's length are not read; an entry outside the cache stands for another page.
        lengths: ``[B]`` int32, any stride: keys of each sequence, at most ``max_pages * page_size``, beyond which it is cut off.
        scale: above 0; ``D ** -0.5`` if left out.

    Returns:
        ``[B, Hq, D]``, contiguous, of the dtype of ``q``; 0 where the length is 0. Accumulated in float32, the
        weights rounded to the dtype of ``v_cache`` in between.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes, dtypes, devices or strides are others than these.
    """
    q, k_cache, v_cache, block_table, lengths, scale = _check(q, k_cache, v_cache, block_table, lengths, scale)
    batch, heads, dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    o = torch.empty((batch, heads, dim), device=q.device, dtype=q.dtype)
    if o.numel() == 0:
        return o
    width = block_table.shape[1]
    if pages == 0 or width == 0:
        return o.zero_()
    slots, group = batch * kv_heads, heads // kv_heads
    splits = _splits(slots, width * page_size)
    whole = splits == 1
    parts = o if whole else torch.empty((batch, heads, splits, dim), device=q.device, dtype=torch.float32)
    lse = o if whole else torch.empty((batch, heads, splits), device=q.device, dtype=torch.float32)
    # the numbers of tokens, which it counts in 32 bits, times one stride
    flat = k_cache.stride() == v_cache.stride() and k_cache.stride(0) == page_size * k_cache.stride(1)
    with on_device_of(q):
        decode_attention_kernel[(slots * splits,)](
            *(q, k_cache, v_cache, block_table, lengths, o, parts, lse, scale, slots, splits, kv_heads, pages, width),
            *(*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]),
            *(block_table.stride(0), lengths.stride(0), *o.stride()[:2]),
            HEAD_DIM=dim,
            GROUP=group,
            ROWS=max(16, triton.next_power_of_2(group)),
            PAGE_SIZE=page_size,
            FLAT=flat and pages * page_size <= MOST,
            WHOLE=whole,
        )
        if not whole:
            decode_combine_kernel[(batch * heads,)](parts, lse, o, heads, splits, *o.stride()[:2], HEAD_DIM=dim)
    return o


def _gathered(cache, block_table, width, heads):
    """Return ``[B, Hq, width, D]``: the first tokens of each sequence, key heads repeated for their query heads."""
    page_size, kv_heads = cache.shape[1:3]
    tokens = torch.arange(width, device=cache.device)
    page = block_table[:, tokens // page_size].long().clamp(0, cache.shape[0] - 1)
    found = cache[page, (tokens % page_size).expand_as(page)]
    return found.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1)


def decode_attention_reference(q, k_cache, v_cache, block_table, lengths, scale=None):
    """Return what :func:`decode_attention` computes, in torch: in float64 for float32, else in float32."""
    q, k_cache, v_cache, block_table, lengths, scale = _check(q, k_cache, v_cache, block_table, lengths, scale)
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    width = block_table.shape[1] * k_cache.shape[1]
    o = torch.zeros(q.shape, device=q.device, dtype=q.dtype)
    if q.numel() == 0 or width == 0 or k_cache.shape[0] == 0:
        return o
    for b in range(q.shape[0]):  # one sequence after another: all of them gathered would not fit
        one = slice(b, b + 1)
        k, v = (_gathered(cache, block_table[one], width, q.shape[1]).to(wide) for cache in (k_cache, v_cache))
        hidden = torch.arange(width, device=q.device) >= lengths[one, None]
        k, v = (x.masked_fill(hidden[:, None, :, None], 0.0) for x in (k, v))
        scores = ((k @ q[one, :, :, None].to(wide)).squeeze(-1) * scale).masked_fill(hidden[:, None], -math.inf)
        # scores of -inf alone: no weight at all
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores, -1).masked_fill(hidden[:, None] | nothing, 0.0)
        o[one] = (weights[:, :, None] @ v).squeeze(2).to(q.dtype)
    return o


def decode_attention_torch(q, k_cache, v_cache, block_table, lengths, scale=None):
    """Return the same from torch's ``scaled_dot_product_attention``, which needs the pages gathered first."""
    width = block_table.shape[1] * k_cache.shape[1]
    k, v = (_gathered(cache, block_table, width, cache.shape[2]) for cache in (k_cache, v_cache))
    seen = torch.arange(width, device=q.device) < lengths[:, None]
    found = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k, v, attn_mask=seen[:, None, None], scale=scale, enable_gqa=q.shape[1] != k_cache.shape[2]
    )
    return found.squeeze(2)


def decode_attention_flops(q, k_cache, v_cache, block_table, lengths, scale=None) -> int:
    """Return ``4 * B * Hq * D`` operations a key (both products), for sequences as long as the table has room for."""
    return 4 * q.numel() * block_table.shape[1] * k_cache.shape[1]


def decode_attention_bytes(q, k_cache, v_cache, block_table, lengths, scale=None) -> int:
    """Return the bytes of keys, values and table of sequences as long as the table has room for, of q and the output.

    A page that several sequences share counts once: as many as the table names, at most those there are. The lengths are on the GPU and not read here; :func:`decode_attention_inputs` makes them that long.
    """
    token = 2 * k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
    keys = min(block_table.numel(), k_cache.shape[0]) * k_cache.shape[1] * token
    return keys + (block_table.numel() + lengths.numel()) * 4 + 2 * q.numel() * q.element_size()


def decode_attention_inputs(q, k_cache, v_cache, block_table, lengths, scale=None) -> None:
    """Fill the table with pages in random order, none twice if there are enough, and the lengths with its room."""
    count, pages = block_table.numel(), max(k_cache.shape[0], 1)
    shuffled = torch.randperm(pages, device=block_table.device)
    order = shuffled.repeat(-(-count // pages))[:count]
    block_table.copy_(order.reshape(block_table.shape))
    lengths.fill_(block_table.shape[1] * k_cache.shape[1])
