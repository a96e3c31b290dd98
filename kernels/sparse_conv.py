"""Submanifold sparse convolution by masked implicit GEMM: present voxels only, a sum of matmuls over kernel offsets.

``out[n] = sum over v of features[neighbours[n, v]] @ weight[v]``, where a neighbour is present. Most are not: rows are
sorted by which of their neighbours are, so that a tile of rows needs few offsets, and a tile walks over the offsets that
one of its rows needs. Sorting is done once for a neighbour map and serves all layers at its resolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

from ._rows import on_device_of
from .voxels import fill_map, sort_rows

MOST_OFFSETS = 62
"""Kernel offsets that a 64-bit mask of a row has bits for, its sign aside."""

_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    # five stages: one for the map, and two tiles under way; with fewer it is one (indirect loads share them out)
    for m, n, k, warps, stages in [
        (32, 32, 32, 4, 4),
        (64, 32, 32, 4, 5),
        (64, 64, 32, 4, 5),
        (64, 64, 64, 4, 3),
        (64, 64, 64, 4, 5),
        (64, 128, 32, 4, 5),
        (64, 128, 64, 4, 5),
        (64, 256, 32, 4, 5),
        (128, 32, 32, 4, 3),
        (128, 32, 32, 4, 5),
        (128, 64, 32, 4, 5),
        (128, 64, 64, 4, 3),
        (128, 64, 64, 4, 5),
        (128, 64, 64, 8, 5),
        (128, 128, 32, 8, 5),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 5),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 5),
        (256, 64, 64, 8, 5),
        (256, 128, 64, 8, 3),
        (256, 128, 64, 8, 5),
    ]
]


@triton.jit
def _either(left, right):
    return left | right


@tcache.autotune(configs=_CONFIGS, key=["N", "CIN", "COUT", "V", "stride_wo"], buckets={"N": "log2", "stride_wo": [1]})
@triton.heuristics({"EVEN_K": lambda arguments: arguments["CIN"] % arguments["BLOCK_K"] == 0})
@triton.jit
def sparse_conv_kernel(
    features_ptr, weight_ptr, neighbours_ptr, order_ptr, masks_ptr, out_ptr, N, CIN, COUT, V,
    stride_fn, stride_wv, stride_wi, stride_wo,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(COUT, BLOCK_N)
    places = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(order_ptr + places, mask=places < N, other=-1)
    known = (rows >= 0) & (rows < N)
    needed = tl.load(masks_ptr + places, mask=places < N, other=0)
    left = tl.reduce(needed, 0, _either) & ((tl.full((), 1, tl.int64) << V) - 1)
    offsets = tl.sum(((left >> tl.arange(0, 64).to(tl.int64)) & 1).to(tl.int32), 0)
    steps_k = tl.cdiv(CIN, BLOCK_K)
    map_rows = neighbours_ptr + rows.to(tl.int64) * V
    depth = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, offsets * steps_k):  # one loop over offsets and channels: loads run ahead across both
        lowest = left & -left
        # a power of two is exact as a float, whose exponent is the number of its bit
        offset = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        source = tl.load(map_rows + offset, mask=known, other=-1)
        present = (source >= 0) & (source < N)
        channels = (step % steps_k) * BLOCK_K + depth
        x_tile = features_ptr + source.to(tl.int64)[:, None] * stride_fn + channels[None, :]
        w_tile = weight_ptr + offset.to(tl.int64) * stride_wv
        w_tile += channels[:, None] * stride_wi + columns[None, :] * stride_wo
        if EVEN_K:
            x = tl.load(x_tile, mask=present[:, None], other=0.0)
            w = tl.load(w_tile, mask=columns[None, :] < COUT, other=0.0)
        else:
            x = tl.load(x_tile, mask=present[:, None] & (channels[None, :] < CIN), other=0.0)
            w = tl.load(w_tile, mask=(channels[:, None] < CIN) & (columns[None, :] < COUT), other=0.0)
        accumulator = tl.dot(x, w, accumulator)
        left = tl.where(step % steps_k == steps_k - 1, left ^ lowest, left)
    to = out_ptr + rows.to(tl.int64)[:, None] * COUT + columns[None, :]
    tl.store(to, accumulator.to(out_ptr.dtype.element_ty), mask=known[:, None] & (columns[None, :] < COUT))


def check_map(features: torch.Tensor, neighbours: torch.Tensor) -> None:
    """Raise unless features and neighbours fit together.

    Raises:
        ValueError: they do not.
    """
    if features.dim() != 2 or neighbours.dim() != 2 or features.shape[0] != neighbours.shape[0]:
        raise ValueError(
            f"expected features [N, Cin] and neighbours [N, V], got {tuple(features.shape)} and {tuple(neighbours.shape)}"
        )
    if not features.is_floating_point() or features.dtype == torch.float64 or features.stride(1) != 1:
        raise ValueError(f"expected floating features with contiguous rows, got {features.dtype}, {features.stride()}")
    if neighbours.dtype != torch.int32 or not neighbours.is_contiguous() or neighbours.device != features.device:
        raise ValueError(f"expected contiguous int32 neighbours on {features.device}, got {neighbours.dtype}")
    if neighbours.shape[1] > MOST_OFFSETS:
        raise ValueError(f"expected at most {MOST_OFFSETS} offsets, got {neighbours.shape[1]}")


def sparse_conv(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return ``out[n] = sum over v of features[neighbours[n, v]] @ weight[v]``.

    Args:
        features: ``[N, Cin]``, rows contiguous.
        weight: ``[V, Cin, Cout]``, any strides, of the dtype of ``features``; V at most 62 (3 x 3 x 3 has 27).
        neighbours: ``[N, V]`` contiguous int32, the row of each neighbour, -1 for none.
        order, masks: what ``voxels.sort_rows`` returns for ``neighbours``; None sorts here.

    Returns:
        ``[N, Cout]``, contiguous, of the dtype of ``features``; products are accumulated in float32 (float32 inputs
        are multiplied in TF32).

    Raises:
        ValueError: shapes, dtypes, devices or layout are not those.
    """
    check_map(features, neighbours)
    if weight.dim() != 3 or tuple(weight.shape[:2]) != (neighbours.shape[1], features.shape[1]):
        raise ValueError(
            f"expected weight [{neighbours.shape[1]}, {features.shape[1]}, Cout], got {tuple(weight.shape)}"
        )
    if weight.dtype != features.dtype or weight.device != features.device:
        raise ValueError(
            f"expected a weight of {features.dtype} on {features.device}, got {weight.dtype} on {weight.device}"
        )
    if (order is None) != (masks is None):
        raise ValueError("expected both of order and masks, or neither")
    (n, cin), (v, _, cout) = features.shape, weight.shape
    out = torch.empty((n, cout), device=features.device, dtype=features.dtype)
    if out.numel() == 0:
        return out
    if cin == 0 or v == 0:
        return out.zero_()
    if order is None or masks is None:
        order, masks = sort_rows(neighbours)
    for name, tensor, dtype in (("order", order, torch.int32), ("masks", masks, torch.int64)):
        if tuple(tensor.shape) != (n,) or tensor.dtype != dtype or tensor.device != out.device or tensor.stride(0) != 1:
            raise ValueError(
                f"expected {name} [{n}] of {dtype} on {out.device}, got {tuple(tensor.shape)} of {tensor.dtype}"
            )
    with on_device_of(features):
        sparse_conv_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK_M"]) * triton.cdiv(cout, meta["BLOCK_N"]),)](
            features, weight, neighbours, order, masks, out, n, cin, cout, v, features.stride(0),
            weight.stride(0), weight.stride(1), weight.stride(2),
        )  # fmt: skip
    return out


def sparse_conv_reference(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what :func:`sparse_conv` computes, in torch, rounded once from float32: gather and multiply by offset."""
    padded = torch.cat([features.float(), features.new_zeros((1, features.shape[1])).float()])
    out = torch.zeros((features.shape[0], weight.shape[2]), device=features.device)
    for v in range(weight.shape[0]):  # row -1 is the zeros
        out = out + padded[neighbours[:, v].long()] @ weight[v].float()
    return out.to(features.dtype)


def sparse_conv_torch(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the same by one gather and one matmul: every neighbour's features side by side, zeros where there is none."""
    padded = torch.cat([features, features.new_zeros((1, features.shape[1]))])
    return padded[neighbours.long()].flatten(1) @ weight.flatten(0, 1)


def sparse_conv_flops(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """Return the floating point operations: ``2 Cin Cout`` for every neighbour that is present; reads the map."""
    return 2 * int((neighbours >= 0).sum()) * weight.shape[1] * weight.shape[2]


def sparse_conv_bytes(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """Return the least bytes to move: features, weight and map read once, the result written once, order and masks."""
    n = features.shape[0]
    elements = features.numel() + weight.numel() + n * weight.shape[2]
    return elements * features.element_size() + neighbours.numel() * 4 + n * 12


def sparse_conv_inputs(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill map, order and masks, in place, with those of a surface, see ``voxels.fill_map``."""
    fill_map(neighbours)
    if order is not None and masks is not None:
        for tensor, values in zip((order, masks), sort_rows(neighbours), strict=True):
            tensor.copy_(values)
