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

from ._check import FLOATS, MOST, check_device, check_dtype, check_shape, on_device_of, readable
from .voxels import MOST_OFFSETS, fill_map, sort_rows

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


def read_map(neighbours: torch.Tensor) -> torch.Tensor:
    """Return a neighbour map as it is to be read.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is no contiguous int32 matrix.
    """
    neighbours = readable("neighbours", neighbours, (torch.int32,), 2)
    check_shape("neighbours", neighbours, neighbours.shape, contiguous=True)
    return neighbours


def read_rows(name: str, rows: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
    """Return the features, or what is shaped like them, of the voxels of a map, as they are to be read.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is no matrix of floats with contiguous rows, one for each of the map's, on its device.
    """
    rows = readable(name, rows, FLOATS, 2)
    check_shape(name, rows, (neighbours.shape[0], rows.shape[1]), "neighbours")
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"{name}: expected contiguous rows, got strides {rows.stride()}")
    check_device(**{name: rows, "neighbours": neighbours})
    return rows


def read_weight(
    weight: torch.Tensor,
    inputs: int | None,
    outputs: int | None,
    neighbours: torch.Tensor,
    name: str,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return a weight ``[V, inputs, outputs]``, None for any number, as it is to be read.

    It is copied where an offset's matrix reaches further than the 32 bits that it is counted in.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape, or the dtype or device of ``like``, the argument ``name``, is another one.
    """
    weight = readable("weight", weight, FLOATS, 3)
    v, cin, cout = weight.shape
    check_shape(
        "weight", weight,
        (neighbours.shape[1], cin if inputs is None else inputs, cout if outputs is None else outputs),
        f"neighbours and {name}",
    )  # fmt: skip
    check_dtype("weight", weight, name, like)
    check_device(**{name: like, "weight": weight})
    if v > MOST_OFFSETS:
        raise ValueError(f"neighbours, weight: expected at most {MOST_OFFSETS} offsets, got {v}")
    if cin * cout > MOST:
        raise ValueError(f"weight: expected at most {MOST} elements for an offset, got {cin} x {cout}")
    return weight if reach(weight) < 2**31 else weight.contiguous()


def reach(weight: torch.Tensor) -> int:
    """Return how far the last element of an offset's matrix is from its first."""
    return sum(stride * (size - 1) for stride, size in zip(weight.stride()[1:], weight.shape[1:], strict=True))


def read_sorted(
    order: torch.Tensor | None, masks: torch.Tensor | None, neighbours: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return what ``voxels.sort_rows`` returned for a map, as it is to be read.

    Raises:
        TypeError: one is no tensor.
        ValueError: they do not fit, or one of both is missing.
    """
    if order is None and masks is None:
        return None, None
    if order is None or masks is None:
        raise ValueError("expected both of order and masks, or neither")
    order, masks = readable("order", order, (torch.int32,), 1), readable("masks", masks, (torch.int64,), 1)
    check_shape("order", order, neighbours.shape[:1], "neighbours", contiguous=True)
    check_shape("masks", masks, neighbours.shape[:1], "neighbours", contiguous=True)
    check_device(neighbours=neighbours, order=order, masks=masks)
    return order, masks


def sparse_conv(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return ``out[n] = sum over v of features[neighbours[n, v]] @ weight[v]``.

    Args:
        features: ``[N, Cin]``, float32, float16 or bfloat16, rows contiguous.
        weight: ``[V, Cin, Cout]``, any strides, of the dtype of ``features``; V at most 62 (3 x 3 x 3 has 27).
        neighbours: ``[N, V]`` contiguous int32, the row of each neighbour, -1 for none (and so is any other
            number that is none of ``0..N - 1``).
        order, masks: what ``voxels.sort_rows`` returns for ``neighbours``; None sorts here.

    Returns:
        ``[N, Cout]``, contiguous, of the dtype of ``features``; products are accumulated in float32 (float32 inputs
        are multiplied in TF32).

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes, devices or layout are not those.
    """
    neighbours = read_map(neighbours)
    features = read_rows("features", features, neighbours)
    weight = read_weight(weight, features.shape[1], None, neighbours, "features", features)
    order, masks = read_sorted(order, masks, neighbours)
    (n, cin), (v, _, cout) = features.shape, weight.shape
    out = torch.empty((n, cout), device=features.device, dtype=features.dtype)
    if out.numel() == 0:
        return out
    if cin == 0 or v == 0:
        return out.zero_()
    if order is None or masks is None:
        order, masks = sort_rows(neighbours)
    with on_device_of(features):
        sparse_conv_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK_M"]) * triton.cdiv(cout, meta["BLOCK_N"]),)](
            features, weight, neighbours, order, masks, out, n, cin, cout, v, features.stride(0),
            weight.stride(0), weight.stride(1), weight.stride(2),
        )  # fmt: skip
    return out


def rows_or_zeros(neighbours: torch.Tensor) -> torch.Tensor:
    """Return the map with N, the row after the last, for whatever is no neighbour: for references, which put zeros there."""
    rows = neighbours.shape[0]
    return torch.where((neighbours >= 0) & (neighbours < rows), neighbours, rows).long()


def neighbours_present(neighbours: torch.Tensor) -> int:
    """Return how many neighbours there are; reads the map."""
    return int((rows_or_zeros(neighbours) < neighbours.shape[0]).sum())


def sparse_conv_reference(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what :func:`sparse_conv` computes, in torch, rounded once from float32: gather and multiply by offset."""
    padded = torch.cat([features.float(), features.new_zeros((1, features.shape[1])).float()])
    out = torch.zeros((features.shape[0], weight.shape[2]), device=features.device)
    rows = rows_or_zeros(neighbours)
    for v in range(weight.shape[0]):
        out = out + padded[rows[:, v]] @ weight[v].float()
    return out.to(features.dtype)


def sparse_conv_torch(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the same by one gather and one matmul: every neighbour's features side by side, zeros where there is none."""
    padded = torch.cat([features, features.new_zeros((1, features.shape[1]))])
    return padded[rows_or_zeros(neighbours)].flatten(1) @ weight.flatten(0, 1)


def sparse_conv_flops(
    features: torch.Tensor, weight: torch.Tensor, neighbours: torch.Tensor,
    order: torch.Tensor | None = None, masks: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """Return the floating point operations: ``2 Cin Cout`` for every neighbour that is present; reads the map."""
    return 2 * neighbours_present(neighbours) * weight.shape[1] * weight.shape[2]


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
