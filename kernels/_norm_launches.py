"""What layernorm and rmsnorm launch: checks, buffers and the choice between kernels (``kernels/_norms.py``)."""

from __future__ import annotations

import torch
import triton

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
from ._rows import as_rows, check_floats, check_vector, near_rows, on_device_of


def check_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """Raise unless the arguments fit together.

    Raises:
        ValueError: what does not.
    """
    check_floats(x=x, weight=weight, bias=bias)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a tensor without any")
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    if bias is not None and weight is None:
        raise ValueError("bias: goes with a weight, and there is none")


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd is to follow what is done with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return ``y``, the rows' means (None unless ``centred``) and reciprocal deviations, both float32 ``[M]``."""
    check_norm(x, weight, bias)
    rows = near_rows(as_rows(x))
    m, n = rows.shape
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    rstd = torch.empty(m, device=x.device, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    if x.numel():
        tensors = (rows, weight, bias, y, mean, rstd, m, n, float(eps), rows.stride(0), rows.stride(1), n)
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
        deterministic: sum over rows in one order, in two stages; else by atomic additions.

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_norm(x, weight, None)
    check_floats(dy=dy, x=x, mean=mean, rstd=rstd)
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise ValueError(f"dy: expected {tuple(x.shape)} of {x.dtype}, got {tuple(dy.shape)} of {dy.dtype}")
    if has_bias and weight is None:
        raise ValueError("has_bias: a bias goes with a weight, and there is none")
    rows, gradient = near_rows(as_rows(x)), near_rows(as_rows(dy, "dy"))
    m, n = rows.shape
    for name, vector in (("mean", mean), ("rstd", rstd)):
        if vector is not None and vector.dtype != torch.float32:
            raise ValueError(f"{name}: expected float32, got {vector.dtype}")
        check_vector(name, vector, m)
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
                grid = lambda meta: (parts, triton.cdiv(n, meta["BLOCK"]))  # noqa: E731
                column_gradients_kernel[grid](
                    *(gradient, rows, mean, rstd, sums, m, n, *strides, parts * n, n),
                    CENTRED=mean is not None, HAS_BIAS=kinds == 2,
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
