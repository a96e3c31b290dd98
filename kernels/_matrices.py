"""What the matrix kernels ask of their operands beyond shape and dtype."""

from __future__ import annotations

import torch

from ._check import check_device, check_dtype, check_fp8, readable

FARTHEST = 2**31 // 1024
"""Elements from one K to the next up to which a step of a whole block, of at most 1024, fits 32 bits."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""What tensor cores multiply, or Triton in float16 where they do not: float8_e5m2. Older GPUs have no float8_e4m3fn at all."""


def operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands of ``a @ b``, in memory as they are to be read.

    Raises:
        TypeError: one is no tensor.
        ValueError: one is no matrix of what tensor cores multiply, they do not fit together, or the GPU has not their
            dtype.
    """
    a, b = readable("a", a, DTYPES, 2), readable("b", b, DTYPES, 2)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"expected a [M, K] and b [K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
    check_dtype("b", b, "a", a)
    check_device(a=a, b=b)
    check_multiplied("a", a)
    return a, b


def check_multiplied(name: str, x: torch.Tensor) -> None:
    """Raise where the GPU that holds a matrix cannot multiply its dtype.

    Raises:
        ValueError: it cannot.
    """
    if x.dtype is torch.float8_e4m3fn:
        check_fp8(name, x, "float8_e5m2 or float16")


def near(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return ``x``, copied where its elements along ``dimension`` are too far apart for a kernel that steps in 32 bits.

    Args:
        x: any tensor.
        dimension: the one that products are summed over.
    """
    if x.stride(dimension) < FARTHEST or x.shape[dimension] <= 1:
        return x
    return x.movedim(dimension, -1).contiguous().movedim(-1, dimension)
