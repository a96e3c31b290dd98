"""Operators of fla-core and liger-kernel: inputs, the library's launch, and what it should give.

Each function here returns ``(inputs, launch, reference)``; ``reference`` is the library's own naive implementation
where it has one, else plain PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Operator = tuple[list[Any], Callable[..., Any], Callable[..., Any]]

DEVICE = "cuda"


def tensors(seed: int, dtype: str, *shapes: tuple[int, ...], change: Callable[..., Any] | None = None) -> list[Any]:
    """Return normal random tensors that ask for gradients, the same in every process.

    Args:
        seed: of the generator.
        dtype: name of a torch dtype.
        shapes: their shapes.
        change: applied to the list of tensors in float32, before they are rounded.
    """
    import torch

    made = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=made) for shape in shapes]
    return [value.to(DEVICE, getattr(torch, dtype)).requires_grad_() for value in (change(*found) if change else found)]


def with_gradients(function: Callable[..., Any], inputs: list[Any]) -> dict[str, Any]:
    """Run forward and backward; return the output and the inputs' gradients, detached."""
    import torch

    for value in inputs:
        value.grad = None
    out = function(*inputs)
    made = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=made).to(out.device, out.dtype))
    found = {"out": out.detach()}
    for number, value in enumerate(inputs):
        found[f"grad{number}"] = value.grad
    return found


B, T, H, D = 2, 256, 4, 64


def gla() -> Operator:
    from fla.ops.gla import chunk_gla
    from fla.ops.gla.naive import naive_recurrent_gla
    from torch.nn import functional

    return (
        tensors(2, "float16", *[(B, T, H, D)] * 4, change=lambda q, k, v, g: (q, k, v, functional.logsigmoid(g))),
        lambda q, k, v, g: chunk_gla(q, k, v, g)[0],
        lambda q, k, v, g: naive_recurrent_gla(q, k, v, g)[0],
    )


def delta_rule() -> Operator:
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from torch.nn import functional

    def change(q: Any, k: Any, v: Any, beta: Any) -> Any:
        return q, functional.normalize(k, dim=-1), v, beta.sigmoid()

    return (
        tensors(3, "float16", *[(B, T, H, D)] * 3, (B, T, H), change=change),
        lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta)[0],
        lambda *inputs: delta_rule_recurrence(*(value.transpose(1, 2) for value in inputs))[0].transpose(1, 2),
    )


def rms_norm_gated() -> Operator:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated as fused
    from torch.nn import functional

    return (
        tensors(5, "float16", *[(B, T, 512)] * 2, (512,)),
        lambda x, g, w: fused(x, g, w, None),
        lambda x, g, w: functional.rms_norm(x, (512,), w, 1e-6) * functional.silu(g),
    )


def layer_norm() -> Operator:
    from fla.modules.norm.layernorm import layer_norm as fused
    from torch.nn import functional

    inputs = tensors(6, "float16", (B, T, 512), (512,), (512,))
    return inputs, fused, lambda x, w, b: functional.layer_norm(x, (512,), w, b)


def dyt(width: int = 4096) -> Operator:
    import torch
    from liger_kernel.ops.dyt import LigerDyTFunction

    inputs = tensors(7, "float32", (1024, width), (1,), (width,), (width,))
    return inputs, LigerDyTFunction.apply, lambda x, alpha, gamma, beta: gamma * torch.tanh(alpha * x) + beta


def mlp() -> Operator:
    from liger_kernel.ops.mlp import LigerMLPFunction
    from torch.nn import functional

    inputs = tensors(
        8,
        "bfloat16",
        *[(2, 512, 1024), (2048, 1024), (2048, 1024), (1024, 2048)],
        change=lambda x, *weights: [x, *(0.03 * weight for weight in weights)],
    )
    return (
        inputs,
        LigerMLPFunction.apply,
        lambda x, g, u, d: functional.linear(functional.silu(functional.linear(x, g)) * functional.linear(x, u), d),
    )


def moe() -> Operator:
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    from torch.nn import functional

    experts, width, inner, tokens, top = 8, 512, 512, 1024, 2
    shapes = (tokens, width), (experts, 2 * inner, width), (experts, width, inner)
    inputs = tensors(9, "bfloat16", *shapes, change=lambda x, up, down: (x, 0.05 * up, 0.05 * down))
    scores, chosen = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(10)).softmax(-1).topk(top)
    scores, chosen = scores.to(DEVICE), chosen.to(DEVICE)

    def reference(x: Any, up: Any, down: Any) -> Any:
        out = torch.zeros_like(x)
        for expert in range(experts):
            gate, value = functional.linear(x, up[expert]).chunk(2, -1)
            weight = (scores * (chosen == expert)).sum(-1, keepdim=True)
            out = out + weight * functional.linear(functional.silu(gate) * value, down[expert])
        return out

    def launch(x: Any, up: Any, down: Any) -> Any:
        return LigerFusedMoEFunction.apply(x, up, down, chosen.int(), scores)

    return inputs, launch, reference


OPERATORS = {
    "fla": [gla, delta_rule, rms_norm_gated, layer_norm],
    "liger_kernel": [dyt, mlp, moe],
}
