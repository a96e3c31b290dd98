"""What layernorm and rmsnorm launch: checks, buffers and the choice between kernels (``kernels/_norms.py``)."""

from __future__ import annotations

import math

import torch
import triton

from ._check import FLOATS, MOST_ACROSS, check_device, check_dtype, check_shape, flag, number, on_device_of, readable
from ._norms import (
    WIDEST_BACKWARD,
    WIDEST_FORWARD,
    backward_atomic_kernel,
    backward_kernel,
    backward_looped_kernel,
    column_gradients_kernel,
    column_sum_kernel,
    forward_kernel,
)
from ._norms_wide import WIDEST_SHARED, backward_wide_kernel, forward_wide_kernel
from ._rows import as_rows, near_rows, vector

WIDEST_COLUMNS = 64 * MOST_ACROSS
"""Columns that one launch of ``column_gradients_kernel`` takes, in blocks of 64 at least along the grid's second axis."""


def check_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the arguments as they are to be read, after refusing those that do not fit together.

    Raises:
        TypeError: one is no tensor.
        ValueError: what does not fit.
    """
    x = readable("x", x, FLOATS)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a tensor without any")
    weight, bias = vector("weight", weight, x.shape[-1]), vector("bias", bias, x.shape[-1])
    check_device(x=x, weight=weight, bias=bias)
    if bias is not None and weight is None:
        raise ValueError("bias: expected a weight to go with it, got none")
    return x, weight, bias


def statistic(name: str, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Return what the forward returned for each row, as it is to be read.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is no contiguous float32 vector with an element for each row.
    """
    value = readable(name, value, (torch.float32,), 1)
    check_shape(name, value, (rows,), "x", contiguous=True)
    return value


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd is to follow what is done with these tensors."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


def forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return ``y``, the rows' means (None unless ``centred``) and reciprocal deviations, both float32 ``[M]``."""
    x, weight, bias = check_norm(x, weight, bias)
    eps = number("eps", eps)
    rows = near_rows(as_rows(x))
    m, n = rows.shape
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    rstd = torch.empty(m, device=x.device, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    if n == 0:  # the mean of nothing
        for each in (rstd, mean) if centred else (rstd,):
            each.fill_(math.nan)
    elif m:
        tensors = (rows, weight, bias, y, mean, rstd, m, n, eps, rows.stride(0), rows.stride(1), n)
        with on_device_of(x):
            grid = lambda meta: (triton.cdiv(m, meta["ROWS"]),)  # noqa: E731
            if n <= WIDEST_FORWARD:
                forward_kernel[grid](*tensors, CENTRED=centred, BLOCK_N=triton.next_power_of_2(n))
            else:
                forward_wide_kernel[grid](*tensors, CENTRED=centred)
    return y, mean, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    has_bias: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``x``, ``weight`` and ``bias``; None for those that are not there.

    Args:
        dy: gradient of the output, of the shape and dtype of ``x``.
        x, weight: as they were given to the forward.
        mean: float32 ``[M]`` for layernorm, None for rmsnorm.
        rstd: float32 ``[M]``.
        has_bias: the forward had a bias, which has the dtype of the weight.
        deterministic: sum over rows in one order, in two stages; else by atomic additions, unless torch is told to
            be deterministic (``torch.use_deterministic_algorithms``).

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the arguments do not fit together.
    """
    x, weight, _ = check_norm(x, weight, None)
    dy = readable("dy", dy, FLOATS)
    check_shape("dy", dy, x.shape, "x")
    check_dtype("dy", dy, "x", x)
    has_bias, deterministic = flag("has_bias", has_bias), flag("deterministic", deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if has_bias and weight is None:
        raise ValueError("has_bias: a bias goes with a weight, and there is none")
    rows, gradient = near_rows(as_rows(x)), near_rows(as_rows(dy, "dy"))
    m, n = rows.shape
    rstd = statistic("rstd", rstd, m)
    mean = None if mean is None else statistic("mean", mean, m)
    check_device(dy=dy, x=x, mean=mean, rstd=rstd)
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    kinds = 0 if weight is None else 1 + has_bias
    if x.numel() == 0:
        zeros = torch.zeros((kinds, n), device=x.device, dtype=x.dtype if weight is None else weight.dtype)
        return dx, *_named(zeros, kinds)
    strides = (gradient.stride(0), gradient.stride(1), rows.stride(0), rows.stride(1))
    inputs = (gradient, rows, weight, mean, rstd)
    # two programs for each SM of an H200 where they have rows enough; four where a row leaves registers for them
    parts = min(m, 264 if n > 2048 else 528)
    with on_device_of(x):
        if n <= WIDEST_BACKWARD:
            flags = {"CENTRED": mean is not None, "HAS_BIAS": kinds == 2, "BLOCK_N": triton.next_power_of_2(n)}
            if not deterministic and kinds:
                sums = torch.zeros((kinds, n), device=x.device, dtype=torch.float32)
                backward_atomic_kernel[(parts,)](*inputs, dx, sums, m, n, *strides, n, n, **flags)
                return dx, *_named(sums.to(weight.dtype), kinds)
            sums = torch.empty((kinds, parts, n), device=x.device, dtype=torch.float32) if kinds else None
            backward_kernel[(parts,)](*inputs, dx, sums, m, n, *strides, n, parts * n, n, **flags)
        elif n <= WIDEST_SHARED:
            # an H200's 132 SMs: with a bias a row takes at least two of them
            parts = min(m, 66 if kinds == 2 else 132)
            sums = torch.empty((kinds, parts, n), device=x.device, dtype=torch.float32) if kinds else None
            grid = lambda meta: (parts * meta["SHARES"],)  # noqa: E731
            backward_wide_kernel[grid](
                *(*inputs, dx, sums, m, n, parts, *strides, n, parts * n, n),
                CENTRED=mean is not None, HAS_BIAS=kinds == 2, BLOCK_N=WIDEST_SHARED,
            )  # fmt: skip
        else:
            backward_looped_kernel[(m,)](*inputs, dx, m, n, *strides, n, CENTRED=mean is not None)
            parts = min(64, triton.cdiv(m, 32))
            sums = torch.empty((kinds, parts, n), device=x.device, dtype=torch.float32) if kinds else None
            if kinds:
                for first in range(0, n, WIDEST_COLUMNS):
                    part = slice(first, min(first + WIDEST_COLUMNS, n))
                    width = part.stop - first
                    grid = lambda meta, width=width: (parts, triton.cdiv(width, meta["BLOCK"]))  # noqa: E731
                    column_gradients_kernel[grid](
                        *(gradient[:, part], rows[:, part], mean, rstd, sums[..., part], m, width),
                        *(*strides, parts * n, n), CENTRED=mean is not None, HAS_BIAS=kinds == 2,
                    )  # fmt: skip
        if not kinds:
            return dx, None, None
        totals = torch.empty((kinds, n), device=x.device, dtype=weight.dtype)
        column_sum_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]), kinds)](sums, totals, parts, n, parts * n, n, n)
    return dx, *_named(totals, kinds)


def _named(sums: torch.Tensor, kinds: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return sums[0] if kinds else None, sums[1] if kinds == 2 else None


def backward_bytes(x: torch.Tensor, weight: torch.Tensor | None, has_bias: bool, vectors: int) -> int:
    """Return bytes of x and dy in, dx out, the weight, float32 ``vectors`` of statistics, and the vectors' gradients."""
    rows = x.numel() // max(1, x.shape[-1])
    weights = 0 if weight is None else (2 + has_bias) * weight.numel() * weight.element_size()
    return 3 * x.numel() * x.element_size() + weights + 4 * vectors * rows
