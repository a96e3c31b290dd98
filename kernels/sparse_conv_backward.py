"""Gradients of the submanifold sparse convolution; that of the weight is added up by many programs at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._check import MOST_ACROSS, check_any_order, check_dtype, on_device_of
from ._gradients import differentiable_once
from ._sums import rms
from .sparse_conv import (
    neighbours_present,
    read_map,
    read_rows,
    read_weight,
    rows_or_zeros,
    sparse_conv,
    sparse_conv_bytes,
    sparse_conv_flops,
    sparse_conv_inputs,
    sparse_conv_reference,
)
from .voxels import fill_map, sort_rows

_WEIGHT_CONFIGS = [
    triton.Config({"BLOCK_I": i, "BLOCK_O": o, "BLOCK_M": m, "CHUNKS": chunks}, num_warps=warps, num_stages=stages)
    for i, o, m, chunks, warps, stages in [
        (32, 32, 64, 16, 4, 3),
        (32, 64, 64, 32, 4, 3),
        (64, 32, 64, 32, 4, 3),
        (64, 64, 64, 16, 4, 3),
        (64, 64, 64, 64, 4, 4),
        (64, 128, 64, 32, 4, 3),
        (128, 64, 64, 32, 4, 3),
        (128, 128, 64, 16, 8, 3),
        (128, 128, 64, 64, 8, 3),
    ]
]

_SMALLEST = 32
"""Rows and columns of the smallest tile of these."""


@tcache.autotune(
    configs=_WEIGHT_CONFIGS, key=["N", "CIN", "COUT", "V"], buckets={"N": "log2"}, reset_to_zero=["out_ptr"]
)
@triton.jit
def sparse_conv_weight_kernel(
    features_ptr, grad_ptr, neighbours_ptr, out_ptr, N, CIN, COUT, V, stride_fn, stride_gn,
    BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add one chunk of rows to the gradient of a tile of one offset's weight."""
    offset = tl.program_id(0)
    tiles_o = tl.cdiv(COUT, BLOCK_O)
    inputs = (tl.program_id(1) // tiles_o) * BLOCK_I + tl.arange(0, BLOCK_I)
    outputs = (tl.program_id(1) % tiles_o) * BLOCK_O + tl.arange(0, BLOCK_O)
    accumulator = tl.zeros((BLOCK_I, BLOCK_O), dtype=tl.float32)
    for start in range(tl.program_id(2) * BLOCK_M, N, CHUNKS * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        source = tl.load(neighbours_ptr + rows.to(tl.int64) * V + offset, mask=rows < N, other=-1)
        present = (source >= 0) & (source < N)
        x_tile = features_ptr + source.to(tl.int64)[None, :] * stride_fn + inputs[:, None]
        x = tl.load(x_tile, mask=present[None, :] & (inputs[:, None] < CIN), other=0.0)
        g_tile = grad_ptr + rows.to(tl.int64)[:, None] * stride_gn + outputs[None, :]
        g = tl.load(g_tile, mask=present[:, None] & (outputs[None, :] < COUT), other=0.0)
        accumulator = tl.dot(x, g, accumulator)
    to = out_ptr + offset.to(tl.int64) * CIN * COUT + inputs[:, None] * COUT + outputs[None, :]
    tl.atomic_add(to, accumulator, mask=(inputs[:, None] < CIN) & (outputs[None, :] < COUT), sem="relaxed")


def sparse_conv_weight_gradient(
    features: torch.Tensor, gradient: torch.Tensor, neighbours: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the weight, ``[V, Cin, Cout]`` float32: ``sum over n of features[neighbours[n, v]]^T gradient[n]``.

    Rows are added up in float32 by many programs at once: sums differ in their last bits from run to run.

    Args:
        features: ``[N, Cin]``, float32, float16 or bfloat16, rows contiguous.
        gradient: ``[N, Cout]``, rows contiguous, of the dtype of ``features``: the gradient of the result.
        neighbours: as for :func:`sparse_conv`.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes, devices or layout are not those.
        RuntimeError: ``torch.use_deterministic_algorithms`` is on.
    """
    neighbours = read_map(neighbours)
    features, gradient = read_rows("features", features, neighbours), read_rows("gradient", gradient, neighbours)
    check_dtype("gradient", gradient, "features", features)
    check_any_order("sparse_conv_weight_gradient")
    (n, cin), cout, v = features.shape, gradient.shape[1], neighbours.shape[1]
    if triton.cdiv(cin, _SMALLEST) * triton.cdiv(cout, _SMALLEST) > MOST_ACROSS:
        # the tiles lie along the grid's second axis: of wider weights one half after the other
        wide, axis = (features, 1) if cin >= cout else (gradient, 2)
        halves = wide.split(triton.cdiv(wide.shape[1], 2), dim=1)
        pairs = [(half, gradient) if axis == 1 else (features, half) for half in halves]
        return torch.cat([sparse_conv_weight_gradient(*pair, neighbours) for pair in pairs], dim=axis)
    out = torch.zeros((v, cin, cout), device=features.device, dtype=torch.float32)
    if n and out.numel():

        def grid(meta: dict[str, int]) -> tuple[int, int, int]:
            tiles = triton.cdiv(cin, meta["BLOCK_I"]) * triton.cdiv(cout, meta["BLOCK_O"])
            return v, tiles, min(meta["CHUNKS"], triton.cdiv(n, meta["BLOCK_M"]))

        with on_device_of(features):
            sparse_conv_weight_kernel[grid](
                features, gradient, neighbours, out, n, cin, cout, v, features.stride(0), gradient.stride(0)
            )
    return out


def sparse_conv_features_gradient(
    gradient: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the features, ``[N, Cin]``: the convolution of the result's with the mirrored weight.

    Args:
        gradient: ``[N, Cout]``, rows contiguous: the gradient of the result.
        weight, neighbours, order, masks: as for :func:`sparse_conv`; the map symmetric, as :func:`neighbour_map` makes it.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes, devices or layout are not those.
    """
    neighbours = read_map(neighbours)
    gradient = read_rows("gradient", gradient, neighbours)
    weight = read_weight(weight, None, gradient.shape[1], neighbours, "gradient", gradient)
    return sparse_conv(gradient, _mirrored(weight), neighbours, order, masks)


class SparseConv(torch.autograd.Function):
    """:func:`sparse_conv` with gradients of features and weight: ``SparseConv.apply(features, weight, neighbours, …)``.

    Once differentiable. The map must be symmetric, as ``voxels.neighbour_map`` makes it: for another the gradient of the
    features is wrong, and the map is on the GPU, where nobody looks.
    """

    @staticmethod
    def forward(ctx, features, weight, neighbours, order=None, masks=None):
        neighbours = read_map(neighbours)
        features = read_rows("features", features, neighbours)
        if order is None and masks is None:
            order, masks = sort_rows(neighbours)
        ctx.save_for_backward(features, weight, neighbours, order, masks)
        return sparse_conv(features, weight, neighbours, order, masks)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):
        features, weight, neighbours, order, masks = ctx.saved_tensors
        gradient = gradient.contiguous()
        to_features = to_weight = None
        if ctx.needs_input_grad[0]:
            to_features = sparse_conv_features_gradient(gradient, weight, neighbours, order, masks)
        if ctx.needs_input_grad[1]:
            to_weight = sparse_conv_weight_gradient(features, gradient, neighbours).to(weight.dtype)
        return to_features, to_weight, None, None, None


def sparse_conv_weight_gradient_reference(
    features: torch.Tensor, gradient: torch.Tensor, neighbours: torch.Tensor
) -> torch.Tensor:
    """Return what :func:`sparse_conv_weight_gradient` computes, in torch and float32."""
    padded = torch.cat([features.float(), features.new_zeros((1, features.shape[1])).float()])
    return torch.stack([padded[column].t() @ gradient.float() for column in rows_or_zeros(neighbours).t()])


def sparse_conv_weight_gradient_flops(features: torch.Tensor, gradient: torch.Tensor, neighbours: torch.Tensor) -> int:
    """Return the floating point operations: ``2 Cin Cout`` for every neighbour that is present; reads the map."""
    return 2 * neighbours_present(neighbours) * features.shape[1] * gradient.shape[1]


def sparse_conv_weight_gradient_bytes(features: torch.Tensor, gradient: torch.Tensor, neighbours: torch.Tensor) -> int:
    """Return the least bytes to move: features, gradient and map read once, the float32 result written once."""
    weight = neighbours.shape[1] * features.shape[1] * gradient.shape[1]
    return (features.numel() + gradient.numel()) * features.element_size() + (neighbours.numel() + weight) * 4


def sparse_conv_weight_gradient_inputs(
    features: torch.Tensor, gradient: torch.Tensor, neighbours: torch.Tensor
) -> None:
    """Fill the map in place, as for :func:`sparse_conv`."""
    fill_map(neighbours)


def sparse_conv_weight_gradient_tolerance(
    features: torch.Tensor, gradient: torch.Tensor, neighbours: torch.Tensor
) -> tuple[float, float]:
    """Return (relative, absolute) of float32 sums of up to N products, which no dtype's own tolerance is meant for.

    N products of typical size s make a sum of sqrt(N) s. Added in another order it differs by a few float32 roundings
    of that, ``2**-22 sqrt(N) s``. Tensor cores cut partial sums off (``_sums.py``: ``2**-26 n**1.5 s`` for n products);
    the rows are added up in 16 chunks or more, whose errors have either sign: ``sqrt(16) 2**-26 (N / 16)**1.5 s``,
    which is ``2**-30 N**1.5 s``. Float32 inputs are cut to TF32, see there.
    """
    rows, size = features.shape[0], rms(features) * rms(gradient)
    if features.dtype == torch.float32:
        return 1e-2, 2**-8 * rows**0.5 * size
    return 1e-5, max(1e-6, (2**-22 * rows**0.5 + 2**-30 * rows**1.5) * size)


def _mirrored(weight: torch.Tensor) -> torch.Tensor:
    return weight.flip(0).transpose(1, 2)


def sparse_conv_features_gradient_reference(
    gradient: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what :func:`sparse_conv_features_gradient` computes, in torch and float32."""
    return sparse_conv_reference(gradient, _mirrored(weight), neighbours, order, masks)


def sparse_conv_features_gradient_flops(
    gradient: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """Return the floating point operations of the convolution of the gradient; reads the map."""
    return sparse_conv_flops(gradient, _mirrored(weight), neighbours, order, masks)


def sparse_conv_features_gradient_bytes(
    gradient: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """Return the least bytes to move: as for the convolution of the gradient."""
    return sparse_conv_bytes(gradient, _mirrored(weight), neighbours, order, masks)


def sparse_conv_features_gradient_inputs(
    gradient: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill map, order and masks in place, as for :func:`sparse_conv`."""
    sparse_conv_inputs(gradient, _mirrored(weight), neighbours, order, masks)
