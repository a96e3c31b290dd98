"""Forward and backward passes of published operators, to be replayed: what a training step launches.

An operator alone is called straight from a manifest (``call: fla.ops.gla:chunk_gla``); these add the backward pass.
"""

import torch


def _train(function, tensors, **rest):
    """Run ``function(**tensors)`` forward and backward."""
    for tensor in tensors.values():
        if tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
    # a model's inputs are results of other operators, and some kernels write into them
    inputs = {name: tensor.view_as(tensor) if tensor is not None else None for name, tensor in tensors.items()}
    result = function(**inputs, **rest)
    results = result if isinstance(result, tuple) else (result,)
    outputs = [item for item in results if isinstance(item, torch.Tensor) and item.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(item) for item in outputs])


def _labels(rows):
    """Return a label for every row. Losses count the rows to ignore, so the labels are values that a replay knows."""
    return torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)


# flash-linear-attention


def chunk_gla(q, k, v, g):
    from fla.ops.gla import chunk_gla as operator

    _train(operator, {"q": q, "k": k, "v": v, "g": g})


def chunk_gla_varlen(q, k, v, g, lengths):
    """Several sequences packed into one, as trainers do.

    Args:
        lengths: of the sequences, separated by commas.
    """
    from fla.ops.gla import chunk_gla as operator

    ends = torch.tensor([0, *map(int, lengths.split(","))], device=q.device).cumsum(0)
    _train(operator, {"q": q, "k": k, "v": v, "g": g}, cu_seqlens=ends)


def chunk_simple_gla(q, k, v, g):
    from fla.ops.simple_gla import chunk_simple_gla as operator

    _train(operator, {"q": q, "k": k, "v": v, "g": g})


def chunk_retention(q, k, v):
    from fla.ops.retention import chunk_retention as operator

    _train(operator, {"q": q, "k": k, "v": v})


def chunk_delta_rule(q, k, v, beta):
    from fla.ops.delta_rule import chunk_delta_rule as operator

    _train(operator, {"q": q, "k": k, "v": v, "beta": beta}, use_qk_l2norm_in_kernel=True)


def chunk_gated_delta_rule(q, k, v, g, beta):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as operator

    _train(operator, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, use_qk_l2norm_in_kernel=True)


def chunk_kda(q, k, v, g, beta):
    from fla.ops.kda import chunk_kda as operator

    _train(operator, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, use_qk_l2norm_in_kernel=True)


def fused_recurrent_hgrn(x, g):
    from fla.ops.hgrn import fused_recurrent_hgrn as operator

    _train(operator, {"x": x, "g": g})


def parallel_attn(q, k, v):
    from fla.ops.attn import parallel_attn as operator

    _train(operator, {"q": q, "k": k, "v": v})


def fused_recurrent_gla(q, k, v, gk):
    from fla.ops.gla import fused_recurrent_gla as operator

    _train(operator, {"q": q, "k": k, "v": v, "gk": gk})


def fla_rms_norm(hidden, batch, length):
    """The module as a model holds it, under autocast."""
    from fla.modules import RMSNorm

    norm = RMSNorm(hidden, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.nn.Linear(hidden, hidden, bias=False).cuda()(torch.empty(batch, length, hidden, device="cuda"))
        norm(x).sum().backward()


def fla_cross_entropy(logits):
    from fla.modules import FusedCrossEntropyLoss

    logits.requires_grad_()
    FusedCrossEntropyLoss()(logits * 1, _labels(logits)).backward()


# liger-kernel


def rms_norm(x, weight):
    from liger_kernel.transformers.functional import liger_rms_norm as operator

    _train(operator, {"X": x, "W": weight}, eps=1e-6)


def fused_add_rms_norm(x, residual, weight):
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm as operator

    _train(operator, {"X": x, "R": residual, "W": weight}, eps=1e-6)


def layer_norm(x, weight, bias):
    from liger_kernel.transformers.functional import liger_layer_norm as operator

    _train(operator, {"X": x, "W": weight, "B": bias}, eps=1e-6)


def swiglu(a, b):
    from liger_kernel.transformers.functional import liger_swiglu as operator

    _train(operator, {"a": a, "b": b})


def geglu(a, b):
    from liger_kernel.transformers.functional import liger_geglu as operator

    _train(operator, {"a": a, "b": b})


def rope(q, k, cos, sin):
    from liger_kernel.transformers.functional import liger_rope as operator

    for tensor in (q, k):
        tensor.requires_grad_()
    outputs = operator(q * 1, k * 1, cos, sin)
    torch.autograd.backward(outputs, [torch.empty_like(item) for item in outputs])


def cross_entropy(logits):
    from liger_kernel.transformers.functional import liger_cross_entropy as operator

    logits.requires_grad_()
    operator(logits * 1, _labels(logits)).backward()


def fused_linear_cross_entropy(x, weight):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as operator

    for tensor in (x, weight):
        tensor.requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        operator(x * 1, weight, _labels(x)).backward()


def softmax(x):
    from liger_kernel.transformers.functional import liger_softmax as operator

    _train(operator, {"x": x})


def group_norm(x, weight, bias, channels, groups):
    from liger_kernel.transformers.functional import liger_group_norm as operator

    _train(
        operator,
        {"X": x, "affine_scaling_weight": weight, "affine_shifting_bias": bias},
        num_channels=channels, num_groups=groups, eps=1e-6,
    )  # fmt: skip


def kl_div(log_probabilities, target):
    from liger_kernel.transformers.functional import liger_kl_div as operator

    log_probabilities.requires_grad_()
    operator(log_probabilities * 1, target).backward()


def jsd(log_probabilities, target):
    from liger_kernel.transformers.functional import liger_jsd as operator

    log_probabilities.requires_grad_()
    operator(log_probabilities * 1, target).backward()


def dyt(x, alpha, gamma, beta):
    from liger_kernel.transformers.functional import liger_dyt as operator

    _train(operator, {"x": x, "alpha": alpha, "gamma": gamma, "beta": beta})


# cut-cross-entropy


def cut_cross_entropy(e, c):
    from cut_cross_entropy import linear_cross_entropy

    for tensor in (e, c):
        tensor.requires_grad_()
    linear_cross_entropy(e * 1, c, _labels(e)).backward()
