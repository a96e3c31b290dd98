"""Root-mean-square normalisation over the last dimension, forward and backward, for rows of any width."""

from __future__ import annotations

import torch

from ._check import flag
from ._gradients import differentiable_once
from ._norm_launches import backward, backward_bytes, forward, wants_gradient
from ._rows import as_rows


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, deterministic: bool = True
) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension; once differentiable.

    Args:
        x: ``[…, N]``, float32, float16 or bfloat16. Two-dimensional inputs may have any strides; others are copied
            where their leading dimensions do not merge.
        weight: contiguous ``[N]`` of any of these dtypes.
        eps: added to the mean of the squares.
        deterministic: the weight's gradient is a sum in one order, see :func:`rmsnorm_backward`.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``; the arithmetic is in float32 and rounded once (some models
        round once more, before the weight).

    Raises:
        TypeError: an argument is of another kind.
        ValueError: dtypes, devices or shapes do not fit.
    """
    deterministic = flag("deterministic", deterministic)
    if not wants_gradient(x, weight):  # autograd costs as much as a small launch
        return rmsnorm_forward(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps, deterministic)


def rmsnorm_forward(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`rmsnorm`'s result and float32 ``[M]`` of ``1 / sqrt(mean(x**2) + eps)``.

    ``M`` is the product of the leading dimensions. Arguments and errors are those of :func:`rmsnorm`.
    """
    y, _, rstd = forward(x, weight, None, eps, centred=False)
    return y, rstd


def rmsnorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of ``x`` and ``weight``; None for a weight there was not.

    Args:
        dy: gradient of the output, of the shape and dtype of ``x``; strides of both as for :func:`rmsnorm`.
        x, weight: as given to the forward.
        rstd: what :func:`rmsnorm_forward` returned.
        deterministic: sums over rows are taken in two stages and one order; otherwise by atomic additions, whose last
            bits change from run to run, unless ``torch.use_deterministic_algorithms`` is on. Rows of more than 8192 columns always take two stages.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: dtypes, devices or shapes do not fit.
    """
    return backward(dy, x, weight, None, rstd, has_bias=False, deterministic=deterministic)[:2]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, deterministic):
        y, rstd = rmsnorm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.deterministic = deterministic
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        return *rmsnorm_backward(dy, x, weight, rstd, ctx.deterministic), None, None


def rmsnorm_reference(x, weight=None, eps=1e-6, deterministic=True):
    """Return what :func:`rmsnorm` computes, in torch, in float64, rounded once."""
    wide = None if weight is None else weight.double()
    return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], wide, eps).to(x.dtype)


def rmsnorm_torch(x, weight=None, eps=1e-6, deterministic=True):
    """Return what a user of torch would call."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def rmsnorm_flops(x, weight=None, eps=1e-6, deterministic=True):
    """Return for each element: square, sum, scale, and one for the weight."""
    return (3 + (weight is not None)) * x.numel()


def rmsnorm_bytes(x, weight=None, eps=1e-6, deterministic=True):
    """Return the bytes of the input, the output and the weight."""
    return 2 * x.numel() * x.element_size() + (0 if weight is None else weight.numel() * weight.element_size())


def rmsnorm_backward_inputs(dy, x, weight, rstd, deterministic=True) -> None:
    """Fill in the statistics that belong to ``x``."""
    rstd.copy_(torch.rsqrt(as_rows(x).float().square().mean(-1) + 1e-6))


def rmsnorm_backward_reference(dy, x, weight, rstd, deterministic=True):
    """Return what :func:`rmsnorm_backward` computes, by its formula, in torch, in float64, rounded once."""
    g, xhat = as_rows(dy.double()), as_rows(x.double()) * rstd.double()[:, None]
    inner = g if weight is None else g * weight.double()
    dx = (inner - xhat * (inner * xhat).mean(-1, keepdim=True)) * rstd.double()[:, None]
    return dx.reshape(x.shape).to(x.dtype), None if weight is None else (g * xhat).sum(0).to(weight.dtype)


def rmsnorm_backward_torch(dy, x, weight, rstd, deterministic=True):
    """Return what torch's autograd would call: one fused operation on a GPU; elsewhere forward and backward."""
    if x.is_cuda:
        wanted = [True, weight is not None]
        statistics = rstd.view(*x.shape[:-1], 1)
        return torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], statistics, weight, wanted)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight) if tensor is not None]
    found = torch.autograd.grad(rmsnorm_torch(*leaves), leaves, dy)
    return found[0], found[1] if weight is not None else None


def rmsnorm_backward_flops(dy, x, weight, rstd, deterministic=True):
    """Return for each element 1 for xhat, 2 for the mean, 3 for dx, 1 for the weight and 2 for its sum."""
    return (6 + 3 * (weight is not None)) * x.numel()


def rmsnorm_backward_bytes(dy, x, weight, rstd, deterministic=True):
    """Return bytes of x, dy and dx, of the statistics, the weight and its gradient."""
    return backward_bytes(x, weight, has_bias=False, vectors=1)
