"""Attention backward, without atomics: one kernel walks over the queries of a tile of keys, one the other way round.

Both recompute the weights from the forward's logarithms of sums. With ``P`` the weights, ``dP = dO @ V.T`` and
``delta = rowsum(dO * O)``: ``dS = P * (dP - delta)``, ``dV = P.T @ dO``, ``dK = scale * dS.T @ Q``,
``dQ = scale * dS @ K`` (Dao et al., FlashAttention, arXiv 2205.14135, appendix B.2).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

import tcache

from ._check import check_device, check_dtype, check_shape, flag, on_device_of, readable
from ._sums import rms
from .attention_forward import (
    DTYPES,
    SHARED_MEMORY,
    attention_forward_reference,
    check_attention,
    like,
    quick_to_multiply,
    row_chunks,
    scores_of,
    visible_pairs,
    widen,
)

# BLOCK_M, BLOCK_N, warps, stages
_KEY_TILES = [
    (64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2), (64, 64, 8, 3), (64, 64, 4, 2),
    (32, 64, 4, 3), (32, 64, 4, 2), (128, 128, 8, 2), (32, 32, 4, 2), (16, 32, 4, 1),
]  # fmt: skip
_QUERY_TILES = [
    (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2), (128, 32, 8, 3), (64, 128, 4, 2),
    (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2), (16, 32, 4, 1),
]  # fmt: skip
_LENGTHS = ["q_len", "kv_len", "HEAD_DIM", "CAUSAL", "GROUP"]
_BUCKETS = {"q_len": "pow2", "kv_len": "pow2"}
_COUNTS = ["heads", "kv_heads", "q_len", "kv_len"]
"""Not specialized: a length of 1 as a constant makes ptxas 12.8 crash, and one kernel serves lengths of all kinds."""


def _configs(tiles):
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in tiles
    ]


def _fitting(held: str, walked: str, tiles: int):
    """Return a pruning function for a kernel that holds two tiles, walks over two and sums up ``tiles`` of them."""

    def fitting(configs, named_args, **launch):
        dim = launch.get("HEAD_DIM", named_args.get("HEAD_DIM"))
        size = named_args["q_ptr"].element_size()

        def fits(config):
            kept, moving = config.kwargs[held], config.kwargs[walked]
            shared = (2 * kept + 2 * moving * config.num_stages) * dim * size + kept * moving * size
            accumulators = kept * (tiles * dim + 2 * moving) / (config.num_warps * 32)
            quick = quick_to_multiply(kept, moving, dim, size, config.num_warps)
            return shared <= SHARED_MEMORY and accumulators <= 208 and quick

        return [config for config in configs if fits(config)] or [
            min(configs, key=lambda config: config.kwargs[held] * config.kwargs[walked] * config.num_stages)
        ]

    return fitting


@tcache.autotune(
    configs=[triton.Config({"BLOCK_M": m}, num_warps=warps) for m, warps in [(64, 4), (16, 4), (32, 4), (128, 8)]],
    key=["HEAD_DIM"],
)
@triton.jit(do_not_specialize=_COUNTS)
def attention_delta_kernel(
    o_ptr, do_ptr, delta_ptr, heads, q_len,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(q_len, BLOCK_M)
    slot = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = slot // heads, slot % heads
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < q_len
    wide = rows.to(tl.int64)[:, None]
    depth = tl.arange(0, HEAD_DIM)[None, :]
    o_tile = o_ptr + batch * stride_ob + head * stride_oh + wide * stride_om + depth
    do_tile = do_ptr + batch * stride_gb + head * stride_gh + wide * stride_gm + depth
    o = tl.load(o_tile, mask=valid[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_tile, mask=valid[:, None], other=0.0).to(tl.float32)
    tl.store(delta_ptr + slot * q_len + rows, tl.sum(o * do, 1), mask=valid)


@triton.jit
def _gather_keys(
    dk, dv, k, v, q_head, do_head, lse_row, delta_row, stride_qm, stride_gm,
    columns, first, last, q_len, shift, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to ``dk`` and ``dv`` of a tile of keys what the queries ``first`` to ``last`` contribute."""
    lines = tl.arange(0, BLOCK_M)
    wide = lines.to(tl.int64)[:, None]
    depth = tl.arange(0, HEAD_DIM)[None, :]
    q_offsets, do_offsets = wide * stride_qm + depth, wide * stride_gm + depth
    for start in range(first, last, BLOCK_M):
        moved = tl.cast(start, tl.int64)
        rows = start + lines
        valid = rows < q_len  # rows past the end have q, dO and delta of 0: they add nothing
        q = tl.load(q_head + moved * stride_qm + q_offsets, mask=valid[:, None], other=0.0)
        lse = tl.load(lse_row + rows, mask=valid, other=0.0) * 1.4426950408889634
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        weights = tl.math.exp2(scores * scale - lse[None, :])
        if MASKED:
            weights = tl.where((columns - (shift + start))[:, None] <= lines[None, :], weights, 0.0)
        do = tl.load(do_head + moved * stride_gm + do_offsets, mask=valid[:, None], other=0.0)
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
        delta = tl.load(delta_row + rows, mask=valid, other=0.0)
        gradient = weights * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
        dk = tl.dot(gradient.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@tcache.autotune(
    configs=_configs(_KEY_TILES),
    key=_LENGTHS,
    buckets=_BUCKETS,
    prune_configs_by={"early_config_prune": _fitting("BLOCK_N", "BLOCK_M", 2)},
)
@triton.jit(do_not_specialize=_COUNTS)
def attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    scale, kv_heads, q_len, kv_len,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # the first tiles of keys are seen by most queries: program ids begin with the longest work, head after head
    tiles = tl.cdiv(kv_len, BLOCK_N)
    slot = (tl.program_id(0) // tiles).to(tl.int64)
    left = tl.program_id(0) % tiles * BLOCK_N
    batch, kv_head = slot // kv_heads, slot % kv_heads
    columns = left + tl.arange(0, BLOCK_N)
    inside = columns[:, None] < kv_len
    wide = columns.to(tl.int64)[:, None]
    depth = tl.arange(0, HEAD_DIM)[None, :]
    k = tl.load(k_ptr + batch * stride_kb + kv_head * stride_kh + wide * stride_kn + depth, mask=inside, other=0.0)
    v = tl.load(v_ptr + batch * stride_vb + kv_head * stride_vh + wide * stride_vn + depth, mask=inside, other=0.0)
    shift = kv_len - q_len
    scale2 = scale * 1.4426950408889634
    first, whole = 0, 0
    if CAUSAL:  # queries before `first` see no key of the tile, those from `whole` on see all of them
        first = tl.maximum(left - shift, 0) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(left + BLOCK_N - 1 - shift, 0), BLOCK_M) * BLOCK_M
    dk = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head = q_ptr + batch * stride_qb + head * stride_qh
        do_head = do_ptr + batch * stride_gb + head * stride_gh
        row = (batch * kv_heads * GROUP + head) * q_len
        if CAUSAL:
            dk, dv = _gather_keys(
                dk, dv, k, v, q_head, do_head, lse_ptr + row, delta_ptr + row, stride_qm, stride_gm,
                columns, first, tl.minimum(whole, q_len), q_len, shift, scale2, HEAD_DIM, BLOCK_M, MASKED=True,
            )  # fmt: skip
        dk, dv = _gather_keys(
            dk, dv, k, v, q_head, do_head, lse_ptr + row, delta_ptr + row, stride_qm, stride_gm,
            columns, whole, q_len, q_len, shift, scale2, HEAD_DIM, BLOCK_M, MASKED=False,
        )  # fmt: skip
    dk_tile = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + wide * stride_dkn + depth
    dv_tile = dv_ptr + batch * stride_dvb + kv_head * stride_dvh + wide * stride_dvn + depth
    tl.store(dk_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gather_queries(
    dq, q, do, lse, delta, k_head, v_head, stride_kn, stride_vn,
    rows, first, last, kv_len, shift, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to ``dq`` of a tile of queries what the keys ``first`` to ``last`` contribute."""
    columns = tl.arange(0, BLOCK_N)
    wide = columns.to(tl.int64)[:, None]
    depth = tl.arange(0, HEAD_DIM)[None, :]
    k_offsets, v_offsets = wide * stride_kn + depth, wide * stride_vn + depth
    for start in range(first, last, BLOCK_N):
        moved = tl.cast(start, tl.int64)
        k_tile = k_head + moved * stride_kn + k_offsets
        v_tile = v_head + moved * stride_vn + v_offsets
        if MASKED:
            inside = start + columns < kv_len
            k = tl.load(k_tile, mask=inside[:, None], other=0.0)
            v = tl.load(v_tile, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights = tl.math.exp2(scores * scale - lse[:, None])
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (start + columns[None, :] <= rows[:, None] + shift)
            weights = tl.where(seen, weights, 0.0)
        gradient = weights * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(gradient.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@tcache.autotune(
    configs=_configs(_QUERY_TILES),
    key=_LENGTHS,
    buckets=_BUCKETS,
    prune_configs_by={"early_config_prune": _fitting("BLOCK_M", "BLOCK_N", 1)},
)
@triton.jit(do_not_specialize=_COUNTS)
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    scale, heads, q_len, kv_len,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dqb, stride_dqh, stride_dqm,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(q_len, BLOCK_M)
    slot = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # long work first
    top = tile * BLOCK_M
    batch, head = slot // heads, slot % heads
    kv_head = head // GROUP
    rows = top + tl.arange(0, BLOCK_M)
    valid = rows < q_len
    wide = rows.to(tl.int64)[:, None]
    depth = tl.arange(0, HEAD_DIM)[None, :]
    q_tile = q_ptr + batch * stride_qb + head * stride_qh + wide * stride_qm + depth
    do_tile = do_ptr + batch * stride_gb + head * stride_gh + wide * stride_gm + depth
    q = tl.load(q_tile, mask=valid[:, None], other=0.0)
    do = tl.load(do_tile, mask=valid[:, None], other=0.0)
    lse = tl.load(lse_ptr + slot * q_len + rows, mask=valid, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + slot * q_len + rows, mask=valid, other=0.0)
    k_head = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_head = v_ptr + batch * stride_vb + kv_head * stride_vh

    shift = kv_len - q_len
    end = kv_len
    whole = kv_len
    if CAUSAL:
        end = tl.maximum(tl.minimum(kv_len, top + BLOCK_M + shift), 0)
        whole = tl.maximum(tl.minimum(kv_len, top + 1 + shift), 0)
    whole = whole // BLOCK_N * BLOCK_N
    scale2 = scale * 1.4426950408889634
    dq = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    dq = _gather_queries(
        dq, q, do, lse, delta, k_head, v_head, stride_kn, stride_vn,
        rows, 0, whole, kv_len, shift, scale2, CAUSAL, HEAD_DIM, BLOCK_N, MASKED=False,
    )  # fmt: skip
    dq = _gather_queries(
        dq, q, do, lse, delta, k_head, v_head, stride_kn, stride_vn,
        rows, whole, end, kv_len, shift, scale2, CAUSAL, HEAD_DIM, BLOCK_N, MASKED=True,
    )  # fmt: skip
    dq_tile = dq_ptr + batch * stride_dqb + head * stride_dqh + wide * stride_dqm + depth
    tl.store(dq_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=valid[:, None])


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v.

    Args:
        do: ``[B, Hq, Sq, D]``, the gradient of the output; copied if its last dimension is not contiguous.
        q, k, v, causal, scale: what :func:`attention_forward` was given.
        o, lse: what it returned.

    Returns:
        ``dq``, ``dk`` and ``dv``, shaped, typed and ordered in memory like ``q``, ``k`` and ``v``; accumulated in
        float32, the gradients of a group's query heads summed there too.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: as :func:`attention_forward`, or ``do``, ``o`` or ``lse`` do not fit ``q``.
    """
    q, k, v, scale = check_attention(q, k, v, scale)
    causal = flag("causal", causal)
    do, o, lse = readable("do", do, DTYPES, 4), readable("o", o, DTYPES, 4), readable("lse", lse, (torch.float32,), 3)
    for name, tensor in (("do", do), ("o", o)):
        check_shape(name, tensor, q.shape, "q")
        check_dtype(name, tensor, "q", q)
    check_shape("lse", lse, q.shape[:3], "q", contiguous=True)
    check_device(q=q, do=do, o=o, lse=lse)
    dq, dk, dv = like(q), like(k), like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    do, o = (x if x.stride(-1) == 1 else x.contiguous() for x in (do, o))
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    delta = torch.empty_like(lse)
    shape = {"HEAD_DIM": dim, "CAUSAL": causal, "GROUP": heads // kv_heads}
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])

    def queries(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(q_len, meta["BLOCK_M"]) * batch * heads,)

    def keys(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(kv_len, meta["BLOCK_N"]) * batch * kv_heads,)

    with on_device_of(q):
        attention_delta_kernel[queries](
            *(o, do, delta, heads, q_len), *(*o.stride()[:3], *do.stride()[:3]), HEAD_DIM=dim
        )  # fmt: skip
        attention_dkdv_kernel[keys](
            *(q, k, v, do, lse, delta, dk, dv, scale, kv_heads, q_len, kv_len),
            *(*inputs, *dk.stride()[:3], *dv.stride()[:3]),
            **shape,
        )
        attention_dq_kernel[queries](
            *(q, k, v, do, lse, delta, dq, scale, heads, q_len, kv_len), *(*inputs, *dq.stride()[:3]), **shape
        )
    return dq, dk, dv


def attention_backward_reference(do, q, k, v, o, lse, causal=True, scale=None):
    """Return what :func:`attention_backward` computes, in torch, from q, k, v and do alone: o and lse are not read."""
    q, k, v, scale = check_attention(q, k, v, scale)
    wide_q, wide_k, wide_v = widen(q, k, v)
    dq, dk, dv = (torch.zeros_like(x) for x in (wide_q, wide_k, wide_v))
    for first, last in row_chunks(q, k):
        part = slice(first, last)
        scores, sums = scores_of(wide_q[:, :, part], wide_k, (first, q.shape[2]), causal, scale)
        weights = torch.exp(scores - sums[..., None]).masked_fill((sums == -math.inf)[..., None], 0.0)
        slope = do[:, :, part].to(weights.dtype)
        dv += weights.transpose(2, 3) @ slope
        inner = slope @ wide_v.transpose(2, 3)
        inner = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
        dq[:, :, part] = inner @ wide_k
        dk += inner.transpose(2, 3) @ wide_q[:, :, part]
    group = q.shape[1] // max(k.shape[1], 1)
    if q.numel() and k.numel():
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    else:
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attention_backward_torch(do, q, k, v, o, lse, causal=True, scale=None):
    """Return the gradients from torch's own flash kernel; where it has none (CPU, float32), from the reference."""
    if not q.is_cuda or q.dtype == torch.float32:
        return attention_backward_reference(do, q, k, v, o, lse, causal, scale)
    seed = torch.empty(2, device=q.device, dtype=torch.uint64)  # of dropout, which is off
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, bool(causal), seed, seed), scale=scale
    )


def attention_backward_flops(do, q, k, v, o, lse, causal=True, scale=None) -> int:
    """Return the operations of five products, ``10 * B * Hq * D`` a visible pair: 2.5 times the forward's.

    The count of Dao, FlashAttention-2 (arXiv 2307.08691, section 4.1). The two kernels here do seven products: each
    recomputes the scores and dP.
    """
    return 10 * q.shape[0] * q.shape[1] * q.shape[3] * visible_pairs(q.shape[2], k.shape[2], causal)


def attention_backward_bytes(do, q, k, v, o, lse, causal=True, scale=None) -> int:
    """Return the bytes of the inputs, read once, and of the three gradients, written once."""
    return (4 * q.numel() + 2 * k.numel() + 2 * v.numel()) * q.element_size() + lse.numel() * 4


def attention_backward_inputs(do, q, k, v, o, lse, causal=True, scale=None) -> None:
    """Fill ``o`` and ``lse`` with what the forward returns for q, k and v."""
    output, sums = attention_forward_reference(q, k, v, causal, scale)
    o.copy_(output)
    lse.copy_(sums)


def attention_backward_tolerance(do, q, k, v, o, lse, causal=True, scale=None):
    """Return (relative, absolute): the absolute by the size of typical gradients, not of one that happens to be near 0.

    ``dS = P (dP - delta)`` cancels, and is rounded to the dtype before it is multiplied: a gradient of size
    ``rms(do) max(1, scale sqrt(D) rms(v) rms(q or k))``, of a row with few keys, is off by some steps (bfloat16: 2**-7;
    float32 is not cut), one that Hq / Hkv heads add up to by sqrt of that more.
    """
    q, k, v, scale = check_attention(q, k, v, scale)
    step = {torch.bfloat16: 2e-2, torch.float16: 1e-2}.get(q.dtype, 1e-5)
    size = rms(do) * max(1.0, scale * q.shape[3] ** 0.5 * rms(v) * max(rms(q), rms(k)))
    return step, step * (q.shape[1] / max(k.shape[1], 1)) ** 0.5 * max(1.0, size)
