"""How far two sums of the same products may lie apart: the tolerances of everything that multiplies matrices."""

from __future__ import annotations

import torch


def rms(x: torch.Tensor) -> float:
    """Return the root of the mean square, the size of typical values; 0 of nothing. Waits for the device."""
    if x.numel() == 0:
        return 0.0
    wide = x if x.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16) else x.float()
    return float(torch.linalg.vector_norm(wide, dtype=torch.float32)) / x.numel() ** 0.5


def tolerance_of_sums(dtype: torch.dtype, terms: int, size: float) -> tuple[float, float]:
    """Return the (relative, absolute) tolerance of sums of products, made in float32 and rounded once.

    Two float32 sums in different order round to neighbours of the result's dtype: 2**-7 apart in bfloat16, inside of
    the 1e-2 that the dtype has anyway. The absolute part is for sums that cancel: their error is that of the partial
    sums, which grow as sqrt(K) whatever the result is. Tensor cores add 16 products at a time to a float32 that they
    cut off instead of rounding (Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS 7:e330, 2021), so
    errors add up, not cancel: K / 16 steps of up to 2**-23 of a partial sum, which seldom is over 2 sqrt(K) times the
    size of a product, make 2**-26 K**1.5. Float32 inputs are cut to TF32, 10 bits: a product is off by up to 2**-10 of
    itself, a sum of K by about 2**-11 sqrt(K), and the worst of millions of sums by several times as much.

    Float8 results lie one step apart: ``eps`` of the dtype, or its smallest number. Hopper adds up products of float8 with
    about 14 bits (DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.2), 32 at a time, and Triton lets it do so
    over all of K (``max_num_imprecise_acc``): K / 32 steps of up to 2**-13 of such a partial sum make 2**-17 K**1.5.

    Args:
        dtype: of the inputs and the result.
        terms: K, products in a sum.
        size: of a typical product, the product of the inputs' :func:`rms`.
    """
    if dtype.itemsize == 1:
        kind = torch.finfo(dtype)
        return kind.eps, max(kind.tiny * kind.eps, 2**-17 * terms**1.5 * size)
    if dtype == torch.float32:
        return 1e-2, 2**-8 * terms**0.5 * size
    return 1e-2, max(1e-2, 2**-26 * terms**1.5 * size)
