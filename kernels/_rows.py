"""What the kernels over rows share: how they see a tensor, and which of their configs suit a row's width.

Every kernel here sees a matrix ``[M, N]``: leading dimensions are one, rows are reduced or mapped one by one. A tile
has ``ROWS`` rows of ``BLOCK_N`` columns; a thread should hold 16 of its elements (several loads of 16 bytes in
flight), fewer than 4 leave bandwidth unused and more than 64 do not fit its registers.

Wider rows (more than 8192 columns for softmax and quantisation) are streamed: ``STREAMED``. Still wider ones stay in
registers as far as they fit (``KEEP`` chunks of ``BLOCK`` columns, in the tensor's own 16 bits: ``unpacked``); what is
beyond is read a second time, backwards, while it is still in the L2 cache.

The number of rows is what varies while a service runs. It is bucketed in the key (``ROW_BUCKETS``) and not specialized
(``do_not_specialize=["M"]``), so that what was tuned and packed for one number of rows serves all of its bucket.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ._check import FLOATS, MOST, check_shape, readable

ROW_BUCKETS = [64, 1024, 16384]
"""Row counts up to which one winner serves: a few programs, about one for each SM, several, many."""


def as_rows(x: torch.Tensor, name: str = "x") -> torch.Tensor:
    """Return ``x`` as ``[M, N]``: a view where its strides allow one (always in two dimensions), else a copy.

    Raises:
        ValueError: it has no dimension, or more rows than kernels count.
    """
    if x.dim() == 0:
        raise ValueError(f"{name}: expected at least one dimension, got a tensor without any")
    if x.dim() == 2:
        return x
    rows = math.prod(x.shape[:-1])
    if rows > MOST:
        raise ValueError(f"{name}: expected at most {MOST} rows, got shape {tuple(x.shape)}")
    return x.reshape(rows, x.shape[-1])


def vector(name: str, value: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """Return a contiguous vector of floats as long as the rows are wide; None for None.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is another one.
    """
    if value is None:
        return None
    value = readable(name, value, FLOATS, 1)
    check_shape(name, value, (size,), "x", contiguous=True)
    return value


def near_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return a matrix, copied where its rows reach further than the 32 bits that their columns are counted in."""
    return rows if abs(rows.stride(1)) * rows.shape[1] < 2**31 else rows.contiguous()


def tiles(
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32), warps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
) -> list[triton.Config]:
    """Return configs of ``ROWS`` and warps; a tile of several rows needs no more than 8 warps."""
    return [
        triton.Config({"ROWS": count}, num_warps=number, num_stages=1)
        for count in rows
        for number in warps
        if count == 1 or number in (4, 8)
    ]


def prune_tiles(configs: list[triton.Config], named: dict[str, object], **given: object) -> list[triton.Config]:
    """Keep the configs whose threads hold 4 to 64 elements, those nearest to 16 first (the first serves untuned).

    Several rows a program only where as many programs remain as two for each of an H200's 132 SMs.
    """
    width, height = int(given["BLOCK_N"]), int(named["M"])

    def elements(config: triton.Config) -> float:
        return config.kwargs["ROWS"] * width / (32 * config.num_warps)

    def fits(config: triton.Config) -> bool:
        count = config.kwargs["ROWS"]
        return 4 <= elements(config) <= 64 and (count == 1 or height >= 264 * count)

    ranked = sorted(configs, key=lambda config: (abs(math.log2(elements(config)) - 4), config.kwargs["ROWS"]))
    return [config for config in ranked if fits(config)] or ranked[:1]


PRUNE = {"early_config_prune": prune_tiles}
EACH = 1 << 20
"""As many programs as rows (up to here): none takes a second row."""
STREAMED = [
    triton.Config({"PROGRAMS": programs, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for warps, stages, programs in [
        (32, 1, EACH),
        (16, 1, EACH),
        (8, 1, EACH),
        (32, 2, 132),
        (32, 2, 264),
        (32, 3, 132),
        (32, 3, 264),
        (32, 4, 132),
        (16, 2, 132),
        (16, 2, 264),
        (16, 2, 396),
        (16, 3, 132),
        (16, 3, 264),
        (16, 3, 396),
        (16, 4, 264),
        (8, 2, 264),
        (8, 3, 264),
        (8, 2, 528),
        (8, 3, 528),
    ]
]
"""Configs of kernels whose programs go from row to row and load the next one while they compute this one.

``STAGES - 1`` rows wait in shared memory. 132, 264 and 396 programs are one, two and three for each SM of an H200.
"""


def prune_streamed(configs: list[triton.Config], named: dict[str, object], **given: object) -> list[triton.Config]:
    """Keep the configs whose threads hold 8 to 64 elements and whose waiting rows fit an SM's shared memory."""
    width, size = int(given["BLOCK_N"]), named["x_ptr"].element_size()

    def fits(config: triton.Config) -> bool:
        waiting = (config.num_stages - 1) * width * size
        return 8 <= width / (32 * config.num_warps) <= 64 and waiting <= 200 << 10

    return [config for config in configs if fits(config)] or configs[:1]


PRUNE_STREAMED = {"early_config_prune": prune_streamed}


@triton.jit
def unpacked(x, zero):
    """Return ``x`` in float32; ``zero`` is an int32 of 0 that the compiler does not know to be 0.

    A row waits in registers between one pass over it and the next. In 16 bits it takes half of them, but a compiler
    that sees one conversion twice keeps the first one's result, all of it. It does not see that these are the same.
    """
    if x.dtype == tl.bfloat16:
        x = ((x.to(tl.int16, bitcast=True).to(tl.int32) << 16) ^ zero).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        x = (x.to(tl.int16, bitcast=True) ^ zero.to(tl.int16)).to(tl.float16, bitcast=True)
    return x.to(tl.float32)
