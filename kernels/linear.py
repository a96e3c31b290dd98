"""``y = x @ weight.T + bias``, a linear layer: whichever matmul suits the number of rows."""

from __future__ import annotations

import torch

from ._sums import rms, tolerance_of_sums
from .matmul_decode import MOST_ROWS, matmul_decode
from .matmul_persistent import matmul_persistent


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, without a gradient for any of them.

    Args:
        x: ``[..., K]``; up to 128 rows are bound by reading the weight, more by multiplying.
        weight: ``[N, K]``, as ``torch.nn.Linear`` keeps it, of the dtype of ``x``.
        bias: ``[N]``, added to the rounded product; None for none.

    Returns:
        ``[..., N]``, contiguous, of the dtype of ``x``.

    Raises:
        ValueError: shapes do not match, dtypes or devices differ, or the dtype is not a floating one.
    """
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected [..., K] and [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and (
        tuple(bias.shape) != (weight.shape[0],) or bias.dtype != x.dtype or bias.device != x.device
    ):
        raise ValueError(
            f"expected a bias [{weight.shape[0]}] of {x.dtype} on {x.device}, "
            f"got {tuple(bias.shape)} of {bias.dtype} on {bias.device}"
        )
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = (matmul_decode if rows.shape[0] <= MOST_ROWS else matmul_persistent)(rows, weight.t())
    if bias is not None:
        y += bias.detach()  # a gradient of the bias alone would look like one of everything
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what :func:`linear` computes, in torch, rounded as it is."""
    y = (x.float() @ weight.float().t()).to(x.dtype)
    return y if bias is None else y + bias


def linear_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what ``torch.nn.functional.linear`` returns."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_flops(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> int:
    """Return the floating point operations: ``2 M N K``, and ``M N`` for a bias."""
    n, rows = weight.shape[0], x.shape[:-1].numel()
    return 2 * rows * weight.numel() + (0 if bias is None else rows * n)


def linear_bytes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> int:
    """Return the least bytes to move: every input read once, the result written once."""
    n = weight.shape[0]
    elements = x.numel() + weight.numel() + x.shape[:-1].numel() * n + (0 if bias is None else n)
    return elements * x.element_size()


def linear_tolerance(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[float, float]:
    """Return (relative, absolute) of sums of K products in float32: see ``_sums.py``.

    Where a bias cancels a product, what is left of the product's rounding is one step of a value as large as the bias.
    """
    relative, absolute = tolerance_of_sums(x.dtype, x.shape[-1], rms(x) * rms(weight))
    if bias is None or bias.numel() == 0:
        return relative, absolute
    return relative, absolute + torch.finfo(x.dtype).eps * float(bias.abs().max())
