"""What the matrix kernels ask of their operands beyond shape and dtype."""

from __future__ import annotations

import torch

FARTHEST = 2**31 // 1024
"""Elements from one K to the next up to which a step of a whole block, of at most 1024, fits 32 bits."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""What tensor cores multiply; which GPU has which, Triton says."""


def near(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return ``x``, copied where its elements along ``dimension`` are too far apart for a kernel that steps in 32 bits.

    Args:
        x: any tensor.
        dimension: the one that products are summed over.
    """
    if x.stride(dimension) < FARTHEST or x.shape[dimension] <= 1:
        return x
    return x.movedim(dimension, -1).contiguous().movedim(-1, dimension)
