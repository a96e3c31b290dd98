"""Mixture of experts, moving rows: tokens to their experts' places, results back by weight; the gate between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import FLOATS, MOST, MOST_ACROSS, check_device, check_shape, integer, on_device_of, readable

WIDEST = 256 * MOST_ACROSS
"""Columns that a row may have: programs take 256 at least, along the second axis of the grid."""

_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in [(256, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8)]
]


@tcache.autotune(configs=_CONFIGS, key=["S", "H"], buckets={"S": "pow2"})
@triton.jit
def gather_kernel(x_ptr, order_ptr, y_ptr, S, H, K, stride_xt, stride_xh, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order_ptr + row)
    token = (pair // K).to(tl.int64)
    width = tl.where((pair >= 0) & (pair < S), H, 0)  # nothing is read where there is no pair
    x_row = x_ptr + token * stride_xt + columns.to(tl.int64) * stride_xh
    values = tl.load(x_row, mask=columns < width, other=0.0)
    tl.store(y_ptr + row * H + columns, values, mask=columns < H)


def gather(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """Return the tokens of the pairs in ``order``, a row for each: zeros where there is no pair.

    Args:
        x: ``[T, H]``, float32, float16 or bfloat16, any strides.
        order: ``[T * k]`` contiguous int32: pairs as ``token * k + choice``, as ``align`` returns them; what lies
            outside of 0..T * k - 1 gives a row of zeros.
        k: choices of a token.

    Returns:
        ``[T * k, H]``, contiguous, of the dtype of ``x``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes, dtypes, devices or layout are not those.
    """
    x, order = readable("x", x, FLOATS, 2), readable("order", order, (torch.int32,), 1)
    if x.shape[1] > WIDEST:
        raise ValueError(f"x: expected at most {WIDEST} columns, got shape {tuple(x.shape)}")
    k = integer("k", k, 1, MOST)
    check_shape("order", order, (x.shape[0] * k,), "x and k", contiguous=True)
    check_device(x=x, order=order)
    s, h = order.shape[0], x.shape[1]
    y = torch.empty((s, h), device=x.device, dtype=x.dtype)
    if y.numel():
        with on_device_of(x):
            gather_kernel[lambda meta: (s, triton.cdiv(h, meta["BLOCK"]))](
                x, order, y, s, h, k, x.stride(0), x.stride(1)
            )
    return y


def gather_reference(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """Return what :func:`gather` computes, in torch."""
    present = (order >= 0) & (order < order.shape[0])
    tokens = torch.where(present, order, 0).long() // k
    return torch.where(present[:, None], x[tokens], torch.zeros((), dtype=x.dtype, device=x.device))


def gather_flops(x: torch.Tensor, order: torch.Tensor, k: int) -> int:
    """Return 0: it moves rows."""
    return 0


def gather_bytes(x: torch.Tensor, order: torch.Tensor, k: int) -> int:
    """Return the least bytes to move: every token read once, every row written once, the order read."""
    return (x.shape[0] + order.shape[0]) * x.shape[1] * x.element_size() + order.numel() * 4


def gather_inputs(x: torch.Tensor, order: torch.Tensor, k: int) -> None:
    """Fill the order with all pairs at random, in place."""
    generator = torch.Generator().manual_seed(0)
    order.copy_(torch.randperm(order.numel(), generator=generator).to(order.dtype))


@tcache.autotune(configs=_CONFIGS, key=["T", "H", "K"], buckets={"T": "pow2"})
@triton.jit
def combine_kernel(y_ptr, position_ptr, weights_ptr, out_ptr, T, S, H, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(position_ptr + token * K + choice).to(tl.int64)
        weight = tl.load(weights_ptr + token * K + choice).to(tl.float32)
        width = tl.where((row >= 0) & (row < S), H, 0)
        values = tl.load(y_ptr + row * H + columns, mask=columns < width, other=0.0).to(tl.float32)
        total += tl.where(columns < width, weight * values, 0.0)
    tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


def combine(y: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return, for every token, the sum of its experts' results by weight.

    Args:
        y: ``[S, H]``, float32, float16 or bfloat16, contiguous: results, sorted by expert.
        position: ``[T, k]`` contiguous int32: the row in ``y`` of each choice, as ``align`` returns them; what lies
            outside of 0..S-1 adds nothing.
        weights: ``[T, k]`` contiguous, of any of these dtypes; k at most 32.

    Returns:
        ``[T, H]``, of the dtype of ``y``, added up in float32 in the order of the choices.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes, dtypes, devices or layout are not those.
    """
    y, position = readable("y", y, FLOATS, 2), readable("position", position, (torch.int32,), 2)
    weights = readable("weights", weights, FLOATS, 2)
    if y.shape[1] > WIDEST:
        raise ValueError(f"y: expected at most {WIDEST} columns, got shape {tuple(y.shape)}")
    if position.shape[1] > 32:
        raise ValueError(f"position: expected at most 32 choices, got shape {tuple(position.shape)}")
    check_shape("y", y, y.shape, contiguous=True)
    check_shape("position", position, position.shape, contiguous=True)
    check_shape("weights", weights, position.shape, "position", contiguous=True)
    check_device(y=y, position=position, weights=weights)
    (t, k), (s, h) = position.shape, y.shape
    out = torch.empty((t, h), device=y.device, dtype=y.dtype)
    if out.numel():
        with on_device_of(y):
            combine_kernel[lambda meta: (t, triton.cdiv(h, meta["BLOCK"]))](y, position, weights, out, t, s, h, k)
    return out


def combine_reference(y: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what :func:`combine` computes, in torch, rounded once from float32."""
    present = (position >= 0) & (position < y.shape[0])
    rows = torch.where(present, position, y.shape[0]).long()
    padded = torch.cat([y.float(), y.new_zeros((1, y.shape[1])).float()])
    picked = (
        padded[rows] * torch.where(present, weights.float(), torch.zeros_like(weights, dtype=torch.float32))[..., None]
    )
    return picked.sum(1).to(y.dtype)


def combine_flops(y: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> int:
    """Return the floating point operations: a multiplication and an addition for every value of every choice."""
    return 2 * position.numel() * y.shape[1]


def combine_bytes(y: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> int:
    """Return the least bytes to move: a row of ``y`` for each choice, none twice, one written for each token, the tables."""
    rows = min(position.numel(), y.shape[0]) + position.shape[0]
    return rows * y.shape[1] * y.element_size() + position.numel() * (4 + weights.element_size())


def combine_inputs(y: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> None:
    """Fill the positions with all rows at random and the weights with equal shares, in place."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(max(position.numel(), 1), generator=generator)[: position.numel()] % max(y.shape[0], 1)
    position.copy_(rows.view(position.shape).to(position.dtype))
    weights.fill_(1 / max(position.shape[1], 1))


@tcache.autotune(configs=_CONFIGS, key=["S", "F"], buckets={"S": "pow2"})
@triton.jit
def silu_gate_kernel(x_ptr, y_ptr, S, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * F + columns, mask=columns < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + columns, mask=columns < F, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * F + columns, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=columns < F)


def silu_gate(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x[:, :F]) * x[:, F:]``.

    Args:
        x: ``[S, 2 F]``, float32, float16 or bfloat16, contiguous: gate and up projections side by side.

    Returns:
        ``[S, F]``, of the dtype of ``x``, computed in float32.

    Raises:
        TypeError: ``x`` is no tensor.
        ValueError: shape, dtype or layout is another.
    """
    x = readable("x", x, FLOATS, 2)
    check_shape("x", x, x.shape, contiguous=True)
    if x.shape[1] % 2 or x.shape[1] > 2 * WIDEST:
        raise ValueError(f"x: expected [S, 2 F] with F at most {WIDEST}, got shape {tuple(x.shape)}")
    s, f = x.shape[0], x.shape[1] // 2
    y = torch.empty((s, f), device=x.device, dtype=x.dtype)
    if y.numel():
        with on_device_of(x):
            silu_gate_kernel[lambda meta: (s, triton.cdiv(f, meta["BLOCK"]))](x, y, s, f)
    return y


def silu_gate_reference(x: torch.Tensor) -> torch.Tensor:
    """Return what :func:`silu_gate` computes, in torch, rounded once from float32."""
    gate, up = x.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def silu_gate_torch(x: torch.Tensor) -> torch.Tensor:
    """Return the same by torch's own operations."""
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def silu_gate_flops(x: torch.Tensor) -> int:
    """Return the floating point operations: exponential, sum, quotient and two products for every value."""
    return x.numel() // 2 * 5


def silu_gate_bytes(x: torch.Tensor) -> int:
    """Return the least bytes to move: both halves read, one written."""
    return x.numel() // 2 * 3 * x.element_size()
