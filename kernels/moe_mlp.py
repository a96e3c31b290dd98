"""A whole feed-forward block of a mixture of experts: route, sort, gather, two grouped matmuls, gate, combine."""

from __future__ import annotations

import torch

from ._check import FLOATS, check_device, check_dtype, check_shape, readable
from ._sums import rms
from .grouped_gemm import grouped_gemm
from .moe import align, route, route_reference
from .moe_rows import combine, gather, silu_gate


def moe_mlp(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, k: int) -> torch.Tensor:
    """Return the sum over a token's top ``k`` experts of ``weight * (silu(x @ gate) * (x @ up)) @ down``.

    Args:
        x: ``[T, H]`` tokens, float32, float16 or bfloat16; all tensors may have any strides.
        logits: ``[T, E]`` of any of these dtypes: what the router says; weights are the softmax's, renormalised over the chosen.
        gate_up: ``[E, 2 F, H]``: both projections of every expert, the gate first, as checkpoints store them.
            Of the dtype of ``x``.
        down: ``[E, H, F]``, of the dtype of ``x``.
        k: experts for a token.

    Returns:
        ``[T, H]`` of the dtype of ``x``. Nothing waits for the host, so it can be captured in a CUDA graph.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes, dtypes or devices do not fit together.
    """
    x, logits = readable("x", x, FLOATS, 2), readable("logits", logits, FLOATS, 2)
    gate_up, down = readable("gate_up", gate_up, FLOATS, 3), readable("down", down, FLOATS, 3)
    (t, h), e, f = x.shape, logits.shape[1], gate_up.shape[1] // 2
    check_shape("logits", logits, (t, e), "x")
    check_shape("gate_up", gate_up, (e, 2 * f, h), "x and logits")
    check_shape("down", down, (e, h, f), "x, logits and gate_up")
    check_dtype("gate_up", gate_up, "x", x)
    check_dtype("down", down, "x", x)
    check_device(x=x, logits=logits, gate_up=gate_up, down=down)
    weights, experts = route(logits, k)
    offsets, order, position = align(experts, e)
    hidden = silu_gate(grouped_gemm(gather(x, order, k), gate_up.transpose(1, 2), offsets))
    return combine(grouped_gemm(hidden, down.transpose(1, 2), offsets), position, weights)


def moe_mlp_reference(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, k: int
) -> torch.Tensor:
    """Return what :func:`moe_mlp` computes, in torch and float32, rounded once; every expert sees every token."""
    scores = logits.float().softmax(1)
    experts = route_reference(logits, k)[1].long()  # of equal scores the first, which topk does not promise
    weights = scores.gather(1, experts)
    weights = weights / weights.sum(1, keepdim=True)
    share = torch.zeros_like(scores).scatter_(1, experts, weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(logits.shape[1]):
        gate, up = (x.float() @ gate_up[e].float().t()).chunk(2, dim=1)
        total += share[:, e, None] * ((torch.nn.functional.silu(gate) * up) @ down[e].float().t())
    return total.to(x.dtype)


def moe_mlp_flops(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, k: int) -> int:
    """Return the floating point operations of the matmuls: three of ``2 H F`` for each token and choice."""
    return 6 * x.shape[0] * k * x.shape[1] * down.shape[2]


def moe_mlp_bytes(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, k: int) -> int:
    """Return the least bytes to move: tokens in and out, logits, and the weights of as many experts as can be chosen."""
    used = min(logits.shape[1], x.shape[0] * k)
    weights = used * (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2])
    return (2 * x.numel() + weights) * x.element_size() + logits.numel() * logits.element_size()


def moe_mlp_tolerance(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, k: int
) -> tuple[float, float]:
    """Return (relative, absolute): four steps of the dtype (of TF32 for float32) of a typical result's size.

    The reference rounds once; here gate, up, their product and an expert's result are rounded, too, each by up to half
    a step, independently for each of the F terms of a sum: of a sum's typical size they take about one step, and the
    worst of millions four. A projection has the size ``g = rms(x) rms(gate_up) sqrt(H)``; ``silu(gate) * up`` at most
    ``g**2 / sqrt(2)``; the result ``sqrt(F / 2) g**2 rms(down)``, of which an expert's share is at most all.
    """
    projection = rms(x) * rms(gate_up) * x.shape[1] ** 0.5
    size = (down.shape[2] / 2) ** 0.5 * projection**2 * rms(down)
    step = max(torch.finfo(x.dtype).eps, 2**-10)
    return 1e-2, max(4 * step * size, 1e-2 if x.dtype != torch.float32 else 0.0)
