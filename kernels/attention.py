"""Attention with its gradient: softmax(scale * q @ k.T) @ v, causal or not, with grouped key heads.

``attention`` is what a model calls; ``attention_forward`` and ``attention_backward`` are its halves.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from ._gradients import differentiable_once
from .attention_backward import attention_backward
from .attention_forward import (
    attention_forward,
    attention_forward_bytes,
    attention_forward_flops,
    attention_forward_reference,
)

__all__ = ["attention", "attention_backward", "attention_forward"]


class _Attention(torch.autograd.Function):
    """Attention that remembers its inputs, its output and the logarithms of its sums for the gradient."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        o, lse = attention_forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        return o

    @staticmethod
    @differentiable_once
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        return *attention_backward(do, q, k, v, o, lse, ctx.causal, ctx.scale), None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """Return ``softmax(scale * q @ k.T) @ v``; once differentiable.

    Args:
        q: ``[B, Hq, Sq, D]``, float16, bfloat16 or float32; any strides with a contiguous last dimension, so that a
            ``[B, S, H, D]`` tensor goes in as ``x.transpose(1, 2)``. D is 16, 32, 64, 128 or 256.
        k, v: ``[B, Hkv, Skv, D]``; Hq is a multiple of Hkv.
        causal: the last query sees the last key; see :func:`attention_forward`.
        scale: above 0; ``D ** -0.5`` if left out.

    Returns:
        ``[B, Hq, Sq, D]``, of the dtype and memory order of ``q``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes, dtypes, devices or strides are others than these.
    """
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v)):
        return _Attention.apply(q, k, v, causal, scale)
    return attention_forward(q, k, v, causal, scale)[0]


def attention_reference(q, k, v, causal=True, scale=None):
    """Return what :func:`attention` computes, in torch: in float64 for float32, else in float32. No gradient."""
    return attention_forward_reference(q, k, v, causal, scale)[0]


def attention_torch(q, k, v, causal=True, scale=None):
    """Return the same from ``torch.nn.functional.scaled_dot_product_attention``."""
    group = q.shape[1] // max(k.shape[1], 1)
    if causal and q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), scale=scale
        )
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=group > 1)


def attention_flops(q, k, v, causal=True, scale=None) -> int:
    """Return the operations of the forward, see :func:`attention_forward_flops`."""
    return attention_forward_flops(q, k, v, causal, scale)


def attention_bytes(q, k, v, causal=True, scale=None) -> int:
    """Return the bytes of the forward, see :func:`attention_forward_bytes`."""
    return attention_forward_bytes(q, k, v, causal, scale)
