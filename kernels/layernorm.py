"""Layer normalisation over the last dimension, forward and backward, for rows of any width."""

from __future__ import annotations

import torch

from ._check import flag
from ._gradients import differentiable_once
from ._norm_launches import backward, backward_bytes, forward, wants_gradient
from ._rows import as_rows


def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    deterministic: bool = True,
) -> torch.Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension; once differentiable.

    Args:
        x: ``[…, N]``, float32, float16 or bfloat16. Two-dimensional inputs may have any strides; others are copied
            where their leading dimensions do not merge.
        weight: contiguous ``[N]`` of any of these dtypes.
        bias: the same; only with a weight, and of its dtype where gradients are wanted.
        eps: added to the variance (that of the row: divided by N).
        deterministic: gradients of weight and bias are sums in one order, see :func:`layernorm_backward`.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``; the arithmetic is in float32.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: dtypes, devices or shapes do not fit.
    """
    deterministic = flag("deterministic", deterministic)
    if not wants_gradient(x, weight, bias):  # autograd costs as much as a small launch
        return layernorm_forward(x, weight, bias, eps)[0]
    return _LayerNorm.apply(x, weight, bias, eps, deterministic)


def layernorm_forward(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return :func:`layernorm`'s result, and float32 ``[M]`` of means and of ``1 / sqrt(variance + eps)``.

    ``M`` is the product of the leading dimensions. Arguments and errors are those of :func:`layernorm`.
    """
    return forward(x, weight, bias, eps, centred=True)


def layernorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    has_bias: bool = True,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``x``, ``weight`` and ``bias``; None for what there was not.

    Args:
        dy: gradient of the output, of the shape and dtype of ``x``; strides of both as for :func:`layernorm`.
        x, weight: as given to the forward.
        mean, rstd: what :func:`layernorm_forward` returned.
        has_bias: there was a bias.
        deterministic: sums over rows are taken in two stages and one order; otherwise by atomic additions, whose last
            bits change from run to run, unless ``torch.use_deterministic_algorithms`` is on. Rows of more than 8192 columns always take two stages.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: dtypes, devices or shapes do not fit.
    """
    if mean is None:  # which means rmsnorm to what they share
        raise TypeError("mean: expected a tensor, got None")
    return backward(dy, x, weight, mean, rstd, has_bias=has_bias, deterministic=deterministic)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, deterministic):
        y, mean, rstd = layernorm_forward(x, weight, bias, eps)
        if bias is not None and bias.dtype != weight.dtype and ctx.needs_input_grad[2]:
            raise ValueError(f"bias: expected the weight's {weight.dtype}, got {bias.dtype}")
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.has_bias, ctx.deterministic = bias is not None, deterministic
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        return *layernorm_backward(dy, x, weight, mean, rstd, ctx.has_bias, ctx.deterministic), None, None


def layernorm_reference(x, weight=None, bias=None, eps=1e-5, deterministic=True):
    """Return what :func:`layernorm` computes, in torch, in float64, rounded once."""
    wide = [None if vector is None else vector.double() for vector in (weight, bias)]
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], *wide, eps).to(x.dtype)


def layernorm_torch(x, weight=None, bias=None, eps=1e-5, deterministic=True):
    """Return what a user of torch would call."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layernorm_flops(x, weight=None, bias=None, eps=1e-5, deterministic=True):
    """Return for each element: sum, difference, square, sum, scale, and one for the weight and the bias each."""
    return (5 + (weight is not None) + (bias is not None)) * x.numel()


def layernorm_bytes(x, weight=None, bias=None, eps=1e-5, deterministic=True):
    """Return the bytes of the input, the output, the weight and the bias."""
    vectors = sum(vector.numel() * vector.element_size() for vector in (weight, bias) if vector is not None)
    return 2 * x.numel() * x.element_size() + vectors


def layernorm_backward_inputs(dy, x, weight, mean, rstd, has_bias=True, deterministic=True) -> None:
    """Fill in the statistics that belong to ``x``."""
    rows = as_rows(x).float()
    mean.copy_(rows.mean(-1))
    rstd.copy_(torch.rsqrt(rows.var(-1, unbiased=False) + 1e-5))


def layernorm_backward_reference(dy, x, weight, mean, rstd, has_bias=True, deterministic=True):
    """Return what :func:`layernorm_backward` computes, by its formula, in torch, in float64, rounded once."""
    g, rows = as_rows(dy.double()), as_rows(x.double())
    xhat = (rows - mean.double()[:, None]) * rstd.double()[:, None]
    inner = g if weight is None else g * weight.double()
    along = (inner * xhat).mean(-1, keepdim=True)
    dx = (inner - inner.mean(-1, keepdim=True) - xhat * along) * rstd.double()[:, None]
    dw = None if weight is None else (g * xhat).sum(0).to(weight.dtype)
    return dx.reshape(x.shape).to(x.dtype), dw, g.sum(0).to(weight.dtype) if has_bias and weight is not None else None


def layernorm_backward_torch(dy, x, weight, mean, rstd, has_bias=True, deterministic=True):
    """Return what torch's autograd would call: one fused operation."""
    rows = as_rows(x)
    bias = torch.empty_like(weight) if has_bias and weight is not None else None
    wanted = [True, weight is not None, bias is not None]
    found = torch.ops.aten.native_layer_norm_backward(
        dy.reshape(rows.shape), rows, x.shape[-1:], mean[:, None], rstd[:, None], weight, bias, wanted
    )
    return found[0].reshape(x.shape), found[1], found[2]


def layernorm_backward_flops(dy, x, weight, mean, rstd, has_bias=True, deterministic=True):
    """Return for each element 2 for xhat, 3 for two means, 4 for dx, 1 for the weight, 2 and 1 for the vectors' sums."""
    return (9 + 3 * (weight is not None) + (has_bias and weight is not None)) * x.numel()


def layernorm_backward_bytes(dy, x, weight, mean, rstd, has_bias=True, deterministic=True):
    """Return bytes of x, dy and dx, of the statistics, the weight and the gradients of weight and bias."""
    return backward_bytes(x, weight, has_bias=has_bias, vectors=2)
