"""``y = x @ weight.T + bias``, a linear layer: whichever matmul suits the number of rows."""

from __future__ import annotations

import torch

from ._check import FLOATS, check_device, check_dtype, check_shape, readable
from ._matrices import DTYPES, check_multiplied
from ._rows import as_rows
from ._sums import rms, tolerance_of_sums
from .matmul_decode import MOST_ROWS, matmul_decode
from .matmul_persistent import matmul_persistent


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, without a gradient for any of them.

    Args:
        x: ``[..., K]``, float32, float16, bfloat16, or without a bias float8_e4m3fn or float8_e5m2,
            any strides (copied where more than two dimensions do not merge); up to 128 rows are bound by reading the weight, more by multiplying.
        weight: ``[N, K]``, as ``torch.nn.Linear`` keeps it, any strides, of the dtype of ``x``.
        bias: ``[N]``, any stride, added to the rounded product; None for none.

    Returns:
        ``[..., N]``, contiguous, of the dtype of ``x``.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes do not match, dtypes or devices differ, or the dtype is none of these, or none that the GPU has.
    """
    x, weight = readable("x", x, DTYPES), readable("weight", weight, DTYPES, 2)
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x [..., K] and weight [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}")
    check_dtype("weight", weight, "x", x)
    check_device(x=x, weight=weight)
    check_multiplied("x", x)
    if bias is not None:
        bias = readable("bias", bias, FLOATS, 1)  # what torch adds up: no float8
        check_shape("bias", bias, (weight.shape[0],), "weight")
        check_dtype("bias", bias, "x", x)
        check_device(x=x, bias=bias)
    rows = as_rows(x)
    y = (matmul_decode if rows.shape[0] <= MOST_ROWS else matmul_persistent)(rows, weight.t())
    if bias is not None:
        y += bias.detach()  # a gradient of the bias alone would look like one of everything
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what :func:`linear` computes, in torch, rounded once from float32: the product is not rounded on its own."""
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


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

    The product is rounded before a bias is added. Where that cancels it, what is left of its rounding is one step of a
    value as large as the bias.
    """
    relative, absolute = tolerance_of_sums(x.dtype, x.shape[-1], rms(x) * rms(weight))
    if bias is None or bias.numel() == 0:
        return relative, absolute
    return relative, absolute + torch.finfo(x.dtype).eps * float(bias.abs().max())
