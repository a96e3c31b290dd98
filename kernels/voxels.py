"""Maps of voxels, in torch: which are neighbours, and in which order a sparse convolution takes them."""

from __future__ import annotations

import torch

from ._check import INTEGERS, MOST, integer, readable, writable

MOST_OFFSETS = 62
"""Kernel offsets that a 64-bit mask of a row has bits for, its sign aside."""


def neighbour_map(coordinates: torch.Tensor, size: int = 3) -> torch.Tensor:
    """Return where the neighbours of every voxel are, in torch; nothing waits for the host.

    Args:
        coordinates: ``[N, 1 + D]`` integers (int32, int64, int16, int8 or uint8): the number of the sample in a batch,
            then a position in D dimensions; no voxel twice. Positions are told apart by one number of 64 bits: the
            samples' range times, for each dimension, the range plus ``size``, must be below ``2**62``. A cube of
            60,000 a side leaves room for 16,384 samples.
        size: edge of the kernel, odd.

    Returns:
        ``[N, size ** D]`` int32: the row of the voxel at each offset, the last dimension fastest, -1 where there is
        none. It is symmetric: ``map[n, v] == m`` means ``map[m, V - 1 - v] == n``.

    Raises:
        TypeError: ``coordinates`` are no tensor, or ``size`` no integer.
        ValueError: ``coordinates`` are no such integers, or ``size`` is even. On the CPU also where ranges are larger;
            a GPU's own values are not read here: there it stops with an assertion that fails.
    """
    coordinates = readable("coordinates", coordinates, INTEGERS, 2)
    if coordinates.shape[1] < 2:
        raise ValueError(f"coordinates: expected [N, 1 + D], D at least 1, got {tuple(coordinates.shape)}")
    size = integer("size", size, 1, MOST)
    if size % 2 == 0:
        raise ValueError(f"size: expected an odd number, got {size}")
    rows, dimensions = coordinates.shape[0], coordinates.shape[1] - 1
    if not rows:
        return torch.empty((0, size**dimensions), dtype=torch.int32, device=coordinates.device)
    radius = size // 2
    _check_range(coordinates, size)
    position = coordinates.long() - coordinates.long().amin(0)
    extent = position.amax(0)[1:] + 1 + 2 * radius  # a margin: what leaves on one side must not come in on the other
    steps = [torch.ones((), dtype=torch.int64, device=coordinates.device)]
    for dimension in reversed(range(dimensions)):
        steps.insert(0, steps[0] * extent[dimension])
    step = torch.stack(steps)  # [1 + D]
    key = (position * step).sum(1)
    keys, order = key.sort()
    reach = torch.arange(-radius, radius + 1, device=coordinates.device)
    shifts = (torch.cartesian_prod(*[reach] * dimensions).view(-1, dimensions) * step[1:]).sum(1, keepdim=True)
    wanted = key[:, None] + shifts.view(1, -1)
    at = torch.searchsorted(keys, wanted).clamp(max=rows - 1)
    return torch.where(keys[at] == wanted, order[at], -1).to(torch.int32)


def _check_range(coordinates: torch.Tensor, size: int) -> None:
    """Refuse coordinates whose keys do not fit 64 bits, without a wait for a GPU that has them."""
    wide = coordinates.double()
    ranges = wide.amax(0) - wide.amin(0) + 1
    ranges[1:] += size
    fits = ranges.prod() < 2.0**62
    if coordinates.device.type != "cpu":
        torch._assert_async(fits, "neighbour_map: coordinates reach further than keys of 64 bits")
    elif not fits:
        raise ValueError(
            "coordinates: expected ranges whose product, with the size added to each dimension's, is below 2**62, "
            f"got {[int(each) for each in ranges]}"
        )


def sort_rows(neighbours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order in which tiles take the rows of a neighbour map, in torch: rows with the same neighbours together.

    Args:
        neighbours: ``[N, V]`` int32, as :func:`neighbour_map` returns it, V at most 62.

    Returns:
        ``order [N]`` int32, rows by mask; ``masks [N]`` int64 in that order, bit ``v`` for a present neighbour ``v``.

    Raises:
        TypeError: ``neighbours`` is no tensor.
        ValueError: it is no such map.
    """
    neighbours = readable("neighbours", neighbours, (torch.int32,), 2)
    if neighbours.shape[1] > MOST_OFFSETS:
        raise ValueError(f"neighbours: expected at most {MOST_OFFSETS} offsets, got {neighbours.shape[1]}")
    bits = torch.ones((), dtype=torch.int64, device=neighbours.device) << torch.arange(
        neighbours.shape[1], device=neighbours.device
    )
    masks, order = ((neighbours >= 0).long() * bits).sum(1).sort(stable=True)
    return order.to(torch.int32), masks


def fill_map(neighbours: torch.Tensor) -> None:
    """Fill a neighbour map in place with that of a wavy, noisy sheet of voxels, for benchmarks.

    Scanned surfaces are like that: of 27 neighbours about 9 are present. Maps of other widths than 27 get neighbours
    at random, a third of them present.

    Args:
        neighbours: ``[N, V]`` int32.

    Raises:
        TypeError: ``neighbours`` is no tensor.
        ValueError: it is no such map, or cannot be written in place.
    """
    neighbours = writable("neighbours", neighbours, (torch.int32,), 2)
    n, v = neighbours.shape
    generator = torch.Generator().manual_seed(0)
    if v == 27:
        side = int(max(n, 1) ** 0.5) + 1
        at = torch.arange(n)
        x, y = at // side, at % side
        z = (8 * (torch.sin(x / 20) + torch.cos(y / 15))).round().long()
        z += (torch.rand(n, generator=generator) < 0.1).long()  # noise
        found = neighbour_map(torch.stack([torch.zeros_like(x), x, y, z], 1))
    else:
        found = torch.randint(-2 * max(n, 1), max(n, 1), (n, v), generator=generator).clamp(min=-1).int()
    neighbours.copy_(found)
