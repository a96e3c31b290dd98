"""Mixture of experts, which token goes where: the top experts of every token, and all pairs sorted by expert.

Sorting is a stable counting sort in three launches (count per block, running sums over blocks, place): no atomics, so
the same choices give the same order every time, and nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import FLOATS, MOST, check_device, check_shape, flag, integer, on_device_of, readable, shown

_ROUTE_CONFIGS = [
    triton.Config({"BLOCK_T": rows}, num_warps=warps)
    for rows, warps in [(1, 1), (2, 1), (4, 1), (4, 4), (8, 4), (16, 4), (32, 4), (32, 8)]
]
_COUNT_CONFIGS = [triton.Config({}, num_warps=warps) for warps in (4, 8, 2)]
_SUM_CONFIGS = [triton.Config({"CHUNK": chunk}, num_warps=warps) for chunk, warps in [(64, 1), (256, 1), (1024, 4)]]
_BLOCK = 128
"""Pairs that one program counts and places."""


@tcache.autotune(configs=_ROUTE_CONFIGS, key=["T", "E", "K"], buckets={"T": "pow2"})
@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, T, E, stride_lt, stride_le,
    K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, BIASED: tl.constexpr,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids = tl.arange(0, EXPERTS)
    present = ids[None, :] < E
    at = logits_ptr + rows.to(tl.int64)[:, None] * stride_lt + ids.to(tl.int64)[None, :] * stride_le
    logits = tl.load(at, mask=(rows[:, None] < T) & present, other=0.0).to(tl.float32)
    logits = tl.where(present, logits, float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        # the row's maximum drops out of the quotient; without it exp overflows
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = powers / tl.sum(tl.where(present, powers, 0.0), axis=1)[:, None]
    choice = logits
    if BIASED:
        choice = scores + tl.load(bias_ptr + ids, mask=ids < E, other=0.0).to(tl.float32)[None, :]
    # NaN is chosen last, and is an expert all the same
    choice = tl.where(choice == choice, choice, float("-inf"))  # noqa: PLR0124
    free = present & (rows[:, None] >= 0)
    slots = tl.arange(0, CHOSEN)
    chosen = tl.zeros((BLOCK_T, CHOSEN), dtype=tl.int32)
    weights = tl.zeros((BLOCK_T, CHOSEN), dtype=tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for slot in tl.static_range(K):
        best = tl.max(tl.where(free, choice, float("-inf")), axis=1)
        # of equals the first
        winner = tl.min(tl.where(free & (choice >= best[:, None]), ids[None, :], EXPERTS - 1), axis=1)
        taken = ids[None, :] == winner[:, None]
        weight = tl.sum(tl.where(taken, scores, 0.0), axis=1)
        free = free & (taken == 0)
        chosen = tl.where(slots[None, :] == slot, winner[:, None], chosen)
        weights = tl.where(slots[None, :] == slot, weight[:, None], weights)
        total += weight
    if RENORMALISE:
        weights = weights / total[:, None]
    to = rows.to(tl.int64)[:, None] * K + slots[None, :]
    inside = (rows[:, None] < T) & (slots[None, :] < K)
    tl.store(weights_ptr + to, weights, mask=inside)
    tl.store(experts_ptr + to, chosen, mask=inside)


def route(
    logits: torch.Tensor, k: int, scoring: str = "softmax", renormalise: bool = True, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the numbers of the ``k`` experts with the largest scores, for every token.

    Args:
        logits: ``[T, E]``, float32, float16 or bfloat16: what the router says, any strides; at most 1024 experts.
        k: experts for a token, at most 32.
        scoring: ``softmax`` over all experts (Mixtral, DeepSeek-V2) or ``sigmoid`` of each (DeepSeek-V3).
        renormalise: whether the weights of a token are divided by their sum.
        bias: contiguous ``[E]`` of any of these dtypes, added to the scores for choosing only, as DeepSeek-V3 balances experts; None for none.

    Returns:
        ``[T, k]`` float32 weights and ``[T, k]`` int32 experts, in falling order of the score; of equal scores the
        expert of the lower number comes first. Experts of a token differ and exist even where logits are NaN.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes, dtypes or devices are not those, ``k`` is not in 1..min(E, 32), or ``scoring`` is unknown.
    """
    logits = readable("logits", logits, FLOATS, 2)
    t, e = logits.shape
    if e > 1024:
        raise ValueError(f"logits: expected at most 1024 experts, got {e}")
    k = integer("k", k, 1, min(e, 32))
    if not isinstance(scoring, str) or scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring: expected softmax or sigmoid, got {shown(scoring)}")
    renormalise = flag("renormalise", renormalise)
    if bias is not None:
        bias = readable("bias", bias, FLOATS, 1)
        check_shape("bias", bias, (e,), "logits", contiguous=True)
        check_device(logits=logits, bias=bias)
    weights = torch.empty((t, k), device=logits.device, dtype=torch.float32)
    experts = torch.empty((t, k), device=logits.device, dtype=torch.int32)
    if t:
        with on_device_of(logits):
            route_kernel[lambda meta: (triton.cdiv(t, meta["BLOCK_T"]),)](
                logits, logits if bias is None else bias, weights, experts, t, e, logits.stride(0), logits.stride(1),
                k, scoring == "sigmoid", renormalise, bias is not None,
                triton.next_power_of_2(e), triton.next_power_of_2(k),
            )  # fmt: skip
    return weights, experts


def route_reference(
    logits: torch.Tensor, k: int, scoring: str = "softmax", renormalise: bool = True, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`route` computes, in torch."""
    scores = logits.float().softmax(1) if scoring == "softmax" else logits.float().sigmoid()
    choice = logits.float() if bias is None else scores + bias.float()
    choice = choice.masked_fill(choice.isnan(), -torch.inf)  # NaN is chosen last; torch sorts it first
    experts = choice.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    return weights, experts.to(torch.int32)


def route_torch(
    logits: torch.Tensor, k: int, scoring: str = "softmax", renormalise: bool = True, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same through ``torch.topk``, in no particular order of equals."""
    scores = logits.float().softmax(1) if scoring == "softmax" else logits.float().sigmoid()
    experts = (scores if bias is None else scores + bias).topk(k, dim=1).indices
    weights = scores.gather(1, experts)
    return weights / weights.sum(1, keepdim=True) if renormalise else weights, experts.to(torch.int32)


def route_flops(
    logits: torch.Tensor, k: int, scoring: str = "softmax", renormalise: bool = True, bias: torch.Tensor | None = None
) -> int:
    """Return the floating point operations: exponential, sum and quotient of every logit, ``k`` comparisons of each."""
    return logits.numel() * (3 + k)


def route_bytes(
    logits: torch.Tensor, k: int, scoring: str = "softmax", renormalise: bool = True, bias: torch.Tensor | None = None
) -> int:
    """Return the least bytes to move: the logits read once, weights and experts written once."""
    return logits.numel() * logits.element_size() + logits.shape[0] * k * 8


@tcache.autotune(configs=_COUNT_CONFIGS, key=["S", "E"], buckets={"S": "pow2"})
@triton.jit
def align_count_kernel(experts_ptr, counts_ptr, order_ptr, S, E, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pairs, mask=pairs < S, other=-1)
    ids = tl.arange(0, EXPERTS)
    counts = tl.sum((expert[:, None] == ids[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + block.to(tl.int64) * E + ids, counts, mask=ids < E)
    tl.store(order_ptr + pairs, tl.full((BLOCK,), -1, tl.int32), mask=pairs < S)  # places that nobody takes


@tcache.autotune(configs=_SUM_CONFIGS, key=["blocks", "E"], buckets={"blocks": "pow2"}, restore_value=["counts_ptr"])
@triton.jit
def align_sum_kernel(counts_ptr, totals_ptr, blocks, E, CHUNK: tl.constexpr):
    """Turn the counts of one expert into the numbers of its pairs in earlier blocks, in place."""
    expert = tl.program_id(0)
    before = tl.zeros((), dtype=tl.int32)
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        at = counts_ptr + block.to(tl.int64) * E + expert
        counts = tl.load(at, mask=block < blocks, other=0)
        tl.store(at, before + tl.cumsum(counts, 0) - counts, mask=block < blocks)
        before += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, before)


@tcache.autotune(configs=_COUNT_CONFIGS, key=["S", "E"], buckets={"S": "pow2"})
@triton.jit
def align_place_kernel(
    experts_ptr, counts_ptr, totals_ptr, offsets_ptr, order_ptr, position_ptr, S, E,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    ids = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + ids, mask=ids < E, other=0)
    ends = tl.cumsum(totals, 0)
    if block == 0:
        tl.store(offsets_ptr + 1 + ids, ends, mask=ids < E)
        tl.store(offsets_ptr, 0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pairs, mask=pairs < S, other=-1)
    mine = expert[:, None] == ids[None, :]
    earlier = tl.load(counts_ptr + block.to(tl.int64) * E + ids, mask=ids < E, other=0)
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1 + (ends - totals + earlier)[None, :]
    place = tl.sum(tl.where(mine, rank, 0), axis=1)
    known = (expert >= 0) & (expert < E)
    tl.store(position_ptr + pairs, tl.where(known, place, -1), mask=pairs < S)
    tl.store(order_ptr + place, pairs, mask=(pairs < S) & known)


def align(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all pairs of a token and an expert sorted by expert; pairs of one expert keep their order.

    Args:
        experts: ``[T, k]`` int32, contiguous: the experts of every token; a number that is none of ``0..count - 1``
            (an expert of another GPU, say) leaves the pair out. T * k at most 2**31 - 2**24.
        count: how many experts there are, at most 1024.

    Returns:
        ``offsets [count + 1]``: where the pairs of each expert begin; ``order [T * k]``: the pairs, as ``token * k +
        choice``, sorted, and -1 after the last; ``position [T, k]``: where each pair is in ``order``, -1 for those left
        out. All int32.

    Raises:
        TypeError: ``experts`` is no tensor, or ``count`` no integer.
        ValueError: shape, dtype or layout is another, or ``count`` is not in 1..1024.
    """
    experts = readable("experts", experts, (torch.int32,), 2)
    check_shape("experts", experts, experts.shape, contiguous=True)
    count = integer("count", count, 1, 1024)
    pairs, device = experts.numel(), experts.device
    if pairs > MOST:
        raise ValueError(f"experts: expected at most {MOST} pairs, got {pairs}")
    order = torch.empty((pairs,), device=device, dtype=torch.int32)
    position = torch.empty(experts.shape, device=device, dtype=torch.int32)
    if not pairs:
        return torch.zeros((count + 1,), device=device, dtype=torch.int32), order, position
    offsets = torch.empty((count + 1,), device=device, dtype=torch.int32)
    blocks, width = triton.cdiv(pairs, _BLOCK), triton.next_power_of_2(count)
    counts = torch.empty((blocks, count), device=device, dtype=torch.int32)
    totals = torch.empty((count,), device=device, dtype=torch.int32)
    with on_device_of(experts):
        align_count_kernel[(blocks,)](experts, counts, order, pairs, count, width, _BLOCK)
        align_sum_kernel[(count,)](counts, totals, blocks, count)
        align_place_kernel[(blocks,)](experts, counts, totals, offsets, order, position, pairs, count, width, _BLOCK)
    return offsets, order, position


def align_reference(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what :func:`align` computes, in torch."""
    flat = experts.flatten().long()
    known = (flat >= 0) & (flat < count)
    bucket = torch.where(known, flat, count)
    order = bucket.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(flat.numel(), device=flat.device)
    order = torch.where(known[order], order, -1)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, bucket, torch.ones_like(flat)
    )
    offsets = torch.cat([counts.new_zeros(1), counts[:count].cumsum(0)])
    return offsets.int(), order.int(), torch.where(known, position, -1).int().view(experts.shape)


def align_flops(experts: torch.Tensor, count: int) -> int:
    """Return 0: it moves integers."""
    return 0


def align_bytes(experts: torch.Tensor, count: int) -> int:
    """Return the least bytes to move: the experts read, order, positions and offsets written once."""
    return experts.numel() * 12 + (count + 1) * 4


def align_inputs(experts: torch.Tensor, count: int) -> None:
    """Fill the experts with different ones for each token, at random, in place."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(experts.shape[0], count, generator=generator).argsort(dim=1)[:, : experts.shape[1]]
    experts.copy_(chosen.to(experts.dtype))
