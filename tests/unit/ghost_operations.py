# ruff: noqa: E501, PLW0108
"""Operations on which ghosts and real tensors must agree, and what of a tensor they must agree on."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


def facts(value, ones=True):
    """What a kernel launch sees of a tensor, and what decides its gradients.

    Along sizes of 1 torch's meta functions and its real ones may disagree on the stride: ``ones=False`` leaves them out.
    """
    if isinstance(value, torch.Tensor):
        strides = [step for step, size in zip(value.stride(), value.shape, strict=True) if ones or size > 1]
        alignment = value.storage_offset() * value.element_size() % 16
        return (
            "tensor", type(value), tuple(value.shape), strides, value.dtype, value.requires_grad,
            value.is_leaf, alignment, value.is_contiguous(),
        )  # fmt: skip
    if isinstance(value, (tuple, list)):
        return [facts(item, ones) for item in value]
    return value


def plain(value):
    """Facts as JSON has them."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, type):
        return value.__name__
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def x(device, *shape, dtype=torch.float32, **rest):
    return torch.empty(shape or (4, 6, 8), device=device, dtype=dtype, **rest)


OPERATIONS = {
    # making tensors
    "empty": lambda d: torch.empty(3, 5, device=d),
    "empty string": lambda d: torch.empty(3, 5, device=str(d)),
    "empty strided": lambda d: torch.empty_strided((3, 5), (1, 3), device=d, dtype=torch.int32),
    "empty channels last": lambda d: torch.empty(2, 3, 4, 5, device=d, memory_format=torch.channels_last),
    "zeros ones full": lambda d: (torch.zeros(3, device=d), torch.ones(2, device=d), torch.full((2, 2), 7, device=d)),
    "arange": lambda d: torch.arange(2, 19, 3, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "eye linspace": lambda d: (torch.eye(4, device=d), torch.linspace(0, 1, 5, device=d)),
    "randn": lambda d: torch.randn(3, 4, device=d, dtype=torch.bfloat16),
    "randint randperm": lambda d: (torch.randint(0, 9, (4,), device=d), torch.randperm(6, device=d)),
    "requires_grad": lambda d: torch.empty(3, device=d, requires_grad=True),
    "like": lambda d: (torch.empty_like(x(d).transpose(0, 2)), torch.zeros_like(x(d)), torch.ones_like(x(d), dtype=torch.int8)),
    "new": lambda d: (x(d).new_empty(3), x(d).new_zeros((2, 3)), x(d).new_ones(2, dtype=torch.int64), x(d).new_full((2,), 3), x(d).new_tensor([1.0])),
    "new_empty_strided": lambda d: x(d).new_empty_strided((2, 3), (1, 2)),
    "device of another": lambda d: torch.empty(5, device=x(d).device, dtype=x(d).dtype),
    "with device": lambda d: with_device(d),
    "pinned and moved": lambda d: torch.empty(4).to(d, non_blocking=True),
    # casts and moves
    "to dtype": lambda d: x(d).to(torch.float16),
    "to device dtype": lambda d: x("cpu").to(d, torch.float16),
    "to keywords": lambda d: x("cpu").to(device=d, dtype=torch.int32, copy=True),
    "to other": lambda d: x("cpu").to(x(d, dtype=torch.bfloat16)),
    "to channels last": lambda d: x(d, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "casts": lambda d: (x(d).half(), x(d).bfloat16(), x(d).int(), x(d).bool(), x(d).double(), x(d).float(), x(d).byte()),
    "fp8": lambda d: (x(d).to(torch.float8_e4m3fn), x(d).to(torch.float8_e5m2)),
    "view dtype": lambda d: x(d, 4, 8).view(torch.int16),
    "type_as": lambda d: x(d).type_as(x(d, dtype=torch.float64)),
    "same device is itself": lambda d: [(y := x(d)).to(d) is y, y.to(y.device) is y, y.contiguous() is y],
    # views
    "slices": lambda d: (x(d)[1:], x(d)[..., 1::2], x(d)[0], x(d)[:, None], x(d)[:, -1]),
    "transposes": lambda d: (x(d).transpose(0, 1), x(d).permute(2, 0, 1), x(d, 3, 4).t(), x(d).mT, x(d, 3, 4).T),
    "reshapes": lambda d: (x(d).view(-1, 8), x(d).reshape(24, 8), x(d).flatten(), x(d).transpose(0, 1).reshape(-1), x(d).unflatten(2, (2, 4))),
    "expands": lambda d: (x(d, 1, 6, 8).expand(4, -1, -1), x(d, 6, 1).expand_as(x(d, 6, 5)), x(d, 3).broadcast_to(2, 3)),
    "squeezes": lambda d: (x(d, 1, 3, 1).squeeze(), x(d, 1, 3).squeeze(0), x(d, 3).unsqueeze(-1)),
    "splits": lambda d: (x(d).chunk(2, -1), x(d).split([1, 3]), x(d).unbind(1), x(d).tensor_split(3)),
    "narrow select diagonal": lambda d: (x(d).narrow(1, 2, 3), x(d).select(2, 5), x(d, 4, 4).diagonal()),
    "as_strided": lambda d: x(d).as_strided((2, 3), (1, 8), 5),
    "unfold": lambda d: x(d, 32).unfold(0, 8, 4),
    "movedim": lambda d: x(d).movedim(0, -1),
    "unaligned": lambda d: x(d, 40)[1:].view(3, 13),
    "contiguous": lambda d: (x(d).transpose(0, 1).contiguous(), x(d).t().contiguous() if x(d).dim() == 2 else x(d).contiguous()),
    "clone detach": lambda d: (x(d).transpose(0, 2).clone(), x(d).detach(), x(d).clone(memory_format=torch.contiguous_format)),
    # arithmetic
    "elementwise": lambda d: (x(d) + 1, x(d) * x(d, 8), x(d).exp(), -x(d), x(d) ** 2, x(d) > 0, x(d).sigmoid(), x(d) / 3, 2 - x(d)),
    "promotion": lambda d: (x(d, dtype=torch.float16) + x(d), x(d, dtype=torch.int32) * 1.5, x(d, dtype=torch.int8) + x(d, dtype=torch.int64)),
    "transposed elementwise": lambda d: x(d).transpose(0, 2) + x(d).transpose(0, 2),
    "where clamp": lambda d: (torch.where(x(d) > 0, x(d), 0.0), x(d).clamp(min=0), torch.maximum(x(d), x(d))),
    "cpu scalar": lambda d: x(d) * torch.tensor(2.0),
    "matmul": lambda d: (x(d, 3, 4) @ x(d, 4, 5), x(d) @ x(d, 8, 2), torch.bmm(x(d), x(d, 4, 8, 3)), torch.einsum("bij,jk->bik", x(d), x(d, 8, 3))),
    "addmm": lambda d: torch.addmm(x(d, 5), x(d, 3, 4), x(d, 4, 5)),
    "reductions": lambda d: (x(d).sum(), x(d).mean(-1), x(d).amax((0, 1)), x(d).var(-1, keepdim=True), x(d).argmax(-1), x(d).norm(dim=-1), x(d).all(), x(d).logsumexp(1)),
    "max with indices": lambda d: tuple(x(d).max(dim=1)),
    "softmax": lambda d: (x(d).softmax(-1), F.log_softmax(x(d), 0), torch.softmax(x(d, dtype=torch.float16), -1, dtype=torch.float32)),
    "sorts": lambda d: (*x(d).topk(3), *x(d).sort(-1), x(d).argsort(), *x(d).kthvalue(2), *x(d).median(1)),
    "scans": lambda d: (x(d).cumsum(0), x(d, dtype=torch.int32).cumsum(0), x(d).cumprod(1), x(d).diff(), x(d).flip(0), x(d).roll(1, 0)),
    "cat stack": lambda d: (torch.cat([x(d), x(d)], 1), torch.stack([x(d), x(d)], -1), torch.hstack([x(d, 3), x(d, 2)])),
    "indexing": lambda d: (x(d)[torch.tensor([0, 2], device=d)], x(d)[:, torch.tensor([[1], [3]], device=d)], x(d).index_select(1, torch.arange(2, device=d))),
    "gather": lambda d: (x(d, 4, 8).gather(1, torch.zeros(4, 2, dtype=torch.int64, device=d)), torch.take_along_dim(x(d, 4, 8), torch.zeros(4, 1, dtype=torch.int64, device=d), 1)),
    "scatter": lambda d: x(d, 4, 8).scatter_add(1, torch.zeros(4, 2, dtype=torch.int64, device=d), x(d, 4, 2)),
    "masks": lambda d: (x(d).masked_fill(x(d) > 0, 1.0), x(d).tril(), torch.triu(x(d, 5, 5), 1)),
    "pad": lambda d: (F.pad(x(d), (1, 2)), F.pad(x(d), (0, 0, 0, 3))),
    "repeat": lambda d: (x(d).repeat(2, 1, 1), x(d).tile(2), x(d).repeat_interleave(3, 0)),
    "repeat known": lambda d: x(d).repeat_interleave(torch.tensor([1, 0, 2, 3], device=d), 0),
    "one hot": lambda d: F.one_hot(torch.zeros(3, dtype=torch.int64, device=d), 7),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(3, device=d), torch.arange(4, device=d), indexing="ij"),
    "complex": lambda d: torch.view_as_real(torch.polar(x(d), x(d))),
    "inplace": lambda d: (x(d).add_(1), x(d).zero_(), x(d).copy_(x(d, 8)), x(d).mul_(x(d)), x(d).fill_(3), x(d).transpose_(0, 1)),
    "out": lambda d: (torch.matmul(x(d, 3, 4), x(d, 4, 5), out=x(d, 3, 5)), torch.add(x(d), 1, out=x(d))),
    "setitem": lambda d: setitem(x(d)),
    # modules and functions
    "linear": lambda d: nn.Linear(8, 3, device=d, dtype=torch.bfloat16)(x(d, dtype=torch.bfloat16)),
    "linear moved": lambda d: nn.Linear(8, 3).to(d)(x(d)),
    "parameters": lambda d: list(nn.Linear(8, 3).to(d, torch.float16).parameters()),
    "embedding": lambda d: nn.Embedding(10, 4, device=d)(torch.zeros(3, dtype=torch.int64, device=d)),
    "norms": lambda d: (nn.LayerNorm(8, device=d)(x(d)), nn.RMSNorm(8, device=d)(x(d)), nn.GroupNorm(2, 6, device=d)(x(d))),
    "convolutions": lambda d: (nn.Conv1d(6, 2, 3, device=d)(x(d)), F.conv2d(x(d, 1, 3, 8, 8), x(d, 5, 3, 3, 3), padding=1)),
    "activations": lambda d: (F.silu(x(d)), F.gelu(x(d), approximate="tanh"), F.relu(x(d)), F.softplus(x(d)), F.dropout(x(d), 0.1)),
    "losses": lambda d: (F.cross_entropy(x(d, 4, 8), torch.zeros(4, dtype=torch.int64, device=d)), F.mse_loss(x(d), x(d)), F.kl_div(x(d), x(d), reduction="batchmean")),
    "attention": lambda d: nn.MultiheadAttention(8, 2, device=d, batch_first=True)(x(d), x(d), x(d), need_weights=False)[0],
    "rnn": lambda d: nn.GRU(8, 5, device=d)(x(d))[0],
    "buffers": lambda d: list(nn.BatchNorm1d(6).to(d).buffers()),
    "deepcopy": lambda d: clone_module(nn.Linear(3, 4).to(d)),
    "no_grad": lambda d: no_grad(d),
    # autograd
    "backward": lambda d: backward(d),
    "autograd.grad": lambda d: torch.autograd.grad((y := x(d, 3, 4, requires_grad=True)).exp().sum(), [y]),
    "checkpoint": lambda d: checkpointed(d),
    "optimizer": lambda d: optimized(d),
}  # fmt: skip


def with_device(device):
    with torch.device(device):
        return torch.zeros(3, 4), nn.Linear(2, 3).weight


def setitem(tensor):
    tensor[0] = 1
    tensor[:, 1:] = tensor[:, :-1].clone()
    tensor[tensor > 0] = 0
    return tensor


def clone_module(module):
    import copy

    return list(copy.deepcopy(module).parameters())


def no_grad(device):
    weight = nn.Linear(3, 4, device=device).weight
    with torch.no_grad():
        inside = weight * 2
    with torch.inference_mode():
        inferred = torch.is_grad_enabled()
    return inside, weight * 2, inferred


def backward(device):
    module = nn.Linear(8, 3, device=device)
    data = x(device, requires_grad=True)
    module(data).float().sum().backward()
    return data.grad, module.weight.grad, module.bias.grad


def checkpointed(device):
    from torch.utils.checkpoint import checkpoint

    data = x(device, requires_grad=True)
    checkpoint(lambda value: (value * 2).relu(), data, use_reentrant=False).sum().backward()
    return data.grad


def optimized(device):
    module = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), fused=False, foreach=False)
    module(x(device, 2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False)
    optimizer.step()
    return list(module.parameters())


BF16 = torch.bfloat16


def heads(device, length=64, count=4, dtype=BF16, dim=64):
    return torch.empty(2, length, count, dim, device=device, dtype=dtype).transpose(1, 2)


def packed(device, length=64, count=4, dim=32):
    return torch.empty(2, length, 3, count, dim, device=device, dtype=BF16).permute(2, 0, 3, 1, 4).unbind(0)


def last(device, *shape, dtype=BF16, **rest):
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    return torch.empty(*shape, device=device, dtype=dtype, **rest).to(memory_format=layout)


def flipped(device, *shape, dtype=BF16, **rest):
    return torch.empty(*reversed(shape), device=device, dtype=dtype, **rest).permute(*reversed(range(len(shape))))


attend = F.scaled_dot_product_attention

WITH_KERNELS_OF_THEIR_OWN = {
    "matmul of one row": lambda d: (x(d, 1, 8) @ x(d, 8, 5), x(d, 1, 1, 8) @ x(d, 1, 8, 3), x(d, 1, 8)[:, :4] @ x(d, 4, 1)),
    "matmul bf16": lambda d: (x(d, 16, 64, dtype=BF16) @ x(d, 32, 64, dtype=BF16).t(), F.linear(x(d, 1, 7, 64, dtype=BF16), x(d, 32, 64, dtype=BF16))),
    "matmul of transposed": lambda d: (flipped(d, 2, 5, 8) @ x(d, 8, 3, dtype=BF16), x(d, 2, 5, 8, dtype=BF16) @ flipped(d, 8, 3), flipped(d, 5, 8) @ flipped(d, 8, 3), x(d, 8, 5).t() @ x(d, 8)),
    "matmul broadcast": lambda d: (x(d, 2, 1, 5, 8) @ x(d, 3, 8, 4), x(d, 5, 8) @ x(d, 2, 8, 3), x(d, 8) @ x(d, 2, 8, 3), x(d, 2, 5, 8).expand(2, 5, 8) @ x(d, 1, 8, 3)),
    "linear of transposed": lambda d: (F.linear(flipped(d, 4, 6, 8), x(d, 3, 8, dtype=BF16), x(d, 3, dtype=BF16)), F.linear(x(d, 1, 8)[:, ::2], x(d, 3, 4))),
    "products": lambda d: (torch.baddbmm(x(d, 2, 3, 5), x(d, 2, 3, 4), x(d, 2, 4, 5)), torch.tensordot(x(d), x(d, 8, 6), 1), torch.kron(x(d, 2, 2), x(d, 3, 3)), torch.outer(x(d, 3), x(d, 4)), torch.cdist(x(d, 3, 4), x(d, 5, 4))),
    "einsum": lambda d: (torch.einsum("bshd,bthd->bhst", x(d, 2, 6, 3, 8), x(d, 2, 7, 3, 8)), torch.einsum("bhst,bthd->bshd", x(d, 2, 3, 6, 7), x(d, 2, 7, 3, 8)), torch.einsum("ij->ji", x(d, 3, 4)), torch.einsum("bi,bj->bij", x(d, 3, 4), x(d, 3, 5))),
    "attention flash": lambda d: attend(heads(d), heads(d), heads(d), is_causal=True),
    "attention float16": lambda d: attend(*(heads(d, dtype=torch.float16) for _ in range(3)), scale=0.1),
    "attention contiguous": lambda d: attend(*(heads(d).contiguous() for _ in range(3))),
    "attention packed": lambda d: attend(*packed(d), is_causal=True),
    "attention sliced": lambda d: attend(*(x(d, 2, 4, 64, 192, dtype=BF16).chunk(3, -1))),
    "attention grouped": lambda d: attend(heads(d), heads(d, count=2), heads(d, count=2), enable_gqa=True),
    "attention grouped float32": lambda d: attend(heads(d, dtype=torch.float32), heads(d, count=2, dtype=torch.float32), heads(d, count=2, dtype=torch.float32), enable_gqa=True),
    "attention grouped mask": lambda d: attend(heads(d), heads(d, count=2), heads(d, count=2), torch.ones(64, 64, dtype=torch.bool, device=d), enable_gqa=True),
    "attention expanded": lambda d: attend(heads(d), heads(d, count=1).expand(2, 4, 64, 64), heads(d, count=1).expand(2, 4, 64, 64)),
    "attention float32": lambda d: attend(*(heads(d, dtype=torch.float32) for _ in range(3))),
    "attention float32 contiguous": lambda d: attend(*(heads(d, dtype=torch.float32).contiguous() for _ in range(3))),
    "attention float64": lambda d: attend(*(heads(d, dtype=torch.float64) for _ in range(3))),
    "attention bool mask": lambda d: attend(*(heads(d) for _ in range(3)), torch.ones(64, 64, dtype=torch.bool, device=d)),
    "attention float mask": lambda d: attend(*(heads(d).contiguous() for _ in range(3)), torch.zeros(2, 1, 64, 64, dtype=BF16, device=d)),
    "attention odd mask": lambda d: attend(heads(d, 63), heads(d, 61), heads(d, 61), torch.zeros(2, 1, 63, 61, dtype=BF16, device=d)),
    "attention mask with gradient": lambda d: attend(*(heads(d) for _ in range(3)), torch.zeros(1, 4, 64, 64, dtype=BF16, device=d, requires_grad=True)),
    "attention mask float32": lambda d: attend(*(heads(d, dtype=torch.float32) for _ in range(3)), torch.zeros(64, 64, device=d)),
    "attention dropout": lambda d: attend(*(heads(d) for _ in range(3)), dropout_p=0.1),
    "attention one token": lambda d: attend(heads(d, 1), heads(d), heads(d)),
    "attention one head": lambda d: attend(*(heads(d, count=1) for _ in range(3))),
    "attention causal lengths": lambda d: attend(heads(d, 16), heads(d), heads(d), is_causal=True),
    "attention without batch": lambda d: attend(x(d, 4, 64, 32, dtype=BF16), x(d, 4, 64, 32, dtype=BF16), x(d, 4, 64, 32, dtype=BF16)),
    "attention of five dimensions": lambda d: attend(*(x(d, 2, 2, 4, 64, 32, dtype=BF16) for _ in range(3))),
    "attention head dims": lambda d: [attend(*(heads(d, dim=dim) for _ in range(3))) for dim in (8, 20, 80, 96, 256)],
    "attention head dims contiguous": lambda d: [attend(*(heads(d, dim=dim).contiguous() for _ in range(3))) for dim in (20, 36, 128)],
    "attention wide heads": lambda d: attend(*(heads(d, dim=512) for _ in range(3))),
    "attention other values": lambda d: attend(heads(d), heads(d), heads(d, dim=32)),
    "attention other values float32": lambda d: attend(heads(d, dtype=torch.float32), heads(d, dtype=torch.float32), heads(d, dim=32, dtype=torch.float32)),
    "attention gradients": lambda d: torch.autograd.grad(attend(*(parts := [heads(d).requires_grad_() for _ in range(3)]), is_causal=True).sum(), parts),
    "attention gradients contiguous": lambda d: torch.autograd.grad(attend(*(parts := [heads(d).contiguous().requires_grad_() for _ in range(3)])).sum(), parts),
    "attention gradients float32": lambda d: torch.autograd.grad(attend(*(parts := [heads(d, dtype=torch.float32).requires_grad_() for _ in range(3)])).sum(), parts),
    "attention gradients packed": lambda d: torch.autograd.grad(attend(*[(qkv := torch.empty(2, 64, 3, 4, 32, device=d, dtype=BF16, requires_grad=True)).permute(2, 0, 3, 1, 4)[i] for i in range(3)]).sum(), [qkv]),
    "attention autocast": lambda d: autocast_attention(d),
    "encoder": lambda d: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device=d, dtype=BF16)(x(d, 2, 16, 64, dtype=BF16)),
    "self attention module": lambda d: nn.MultiheadAttention(64, 4, device=d, dtype=BF16)(*[x(d, 16, 2, 64, dtype=BF16)] * 3, need_weights=False)[0],
    "convolution channels last": lambda d: F.conv2d(last(d, 2, 8, 9, 9), x(d, 16, 8, 3, 3, dtype=BF16)),
    "convolution weight channels last": lambda d: F.conv2d(x(d, 2, 8, 9, 9, dtype=BF16), last(d, 16, 8, 3, 3), x(d, 16, dtype=BF16)),
    "convolution float32": lambda d: (F.conv2d(last(d, 2, 8, 9, 9, dtype=torch.float32), last(d, 16, 8, 3, 3, dtype=torch.float32)), F.conv2d(last(d, 2, 8, 9, 9, dtype=torch.float64), x(d, 16, 8, 3, 3, dtype=torch.float64))),
    "convolution transposed input": lambda d: F.conv2d(x(d, 2, 8, 9, 9, dtype=BF16).transpose(2, 3), x(d, 16, 8, 3, 3, dtype=BF16)),
    "convolution 1x1": lambda d: (F.conv2d(x(d, 1, 8, 5, 5, dtype=BF16), x(d, 4, 8, 1, 1, dtype=BF16)), F.conv2d(last(d, 2, 8, 5, 5), x(d, 4, 8, 1, 1, dtype=BF16))),
    "convolution of one channel": lambda d: (F.conv2d(last(d, 2, 1, 9, 9), x(d, 4, 1, 3, 3, dtype=BF16)), F.conv2d(x(d, 2, 8, 9, 9, dtype=BF16), last(d, 1, 8, 3, 3)), F.conv2d(last(d, 2, 8, 3, 3), x(d, 4, 8, 3, 3, dtype=BF16))),
    "convolution depthwise": lambda d: (F.conv2d(last(d, 2, 8, 9, 9), x(d, 8, 1, 3, 3, dtype=BF16), groups=8), F.conv2d(x(d, 2, 8, 9, 9, dtype=BF16), x(d, 8, 1, 3, 3, dtype=BF16), groups=8), F.conv2d(last(d, 2, 8, 9, 9, dtype=torch.float32), x(d, 8, 1, 3, 3), groups=8)),
    "convolution grouped": lambda d: F.conv2d(last(d, 2, 8, 9, 9), x(d, 16, 4, 3, 3, dtype=BF16), groups=2, dilation=2),
    "convolution transposed": lambda d: (F.conv_transpose2d(last(d, 2, 8, 9, 9), x(d, 8, 4, 3, 3, dtype=BF16), stride=2), F.conv_transpose2d(x(d, 2, 8, 9, 9, dtype=BF16), x(d, 8, 4, 3, 3, dtype=BF16))),
    "convolution 3d": lambda d: (F.conv3d(last(d, 1, 4, 5, 6, 7), x(d, 8, 4, 3, 3, 3, dtype=BF16)), F.conv3d(x(d, 1, 4, 5, 6, 7, dtype=BF16), x(d, 8, 4, 3, 3, 3, dtype=BF16))),
    "convolution 1d": lambda d: (F.conv1d(x(d, 2, 8, 16, dtype=BF16), x(d, 4, 8, 3, dtype=BF16)), F.conv1d(x(d, 2, 16, 8, dtype=BF16).transpose(1, 2), x(d, 4, 8, 3, dtype=BF16)), F.conv1d(x(d, 2, 16, 8, dtype=BF16).transpose(1, 2), x(d, 8, 1, 3, dtype=BF16), groups=8, padding=2)),
    "convolution unbatched": lambda d: F.conv2d(x(d, 8, 9, 9, dtype=BF16), x(d, 4, 8, 3, 3, dtype=BF16)),
    "convolution gradients": lambda d: torch.autograd.grad(F.conv2d(*(parts := [last(d, 2, 8, 9, 9).requires_grad_(), x(d, 16, 8, 3, 3, dtype=BF16, requires_grad=True)])).sum(), parts),
    "patches": lambda d: F.conv2d(x(d, 2, 3, 32, 32, dtype=BF16), x(d, 64, 3, 16, 16, dtype=BF16), stride=16).flatten(2).transpose(1, 2),
    "pools": lambda d: [pool(make(d, 2, 8, 8, 8)) for make in (last, bf16) for pool in (lambda t: F.max_pool2d(t, 2), lambda t: F.avg_pool2d(t, 2), lambda t: F.adaptive_avg_pool2d(t, 1), lambda t: F.adaptive_avg_pool2d(t, 4), lambda t: F.adaptive_max_pool2d(t, 2))],
    "norms channels last": lambda d: [norm(make(d, 2, 8, 6, 6)) for make in (last, bf16) for norm in (lambda t: F.batch_norm(t, None, None, training=True), lambda t: F.group_norm(t, 4), lambda t: F.instance_norm(t), lambda t: nn.BatchNorm2d(8, device=d, dtype=BF16).eval()(t), lambda t: F.layer_norm(t.permute(0, 2, 3, 1), (8,)))],
    "resized": lambda d: [F.interpolate(make(d, 2, 8, 6, 6), scale_factor=2, mode=mode) for make in (last, bf16) for mode in ("nearest", "bilinear", "bicubic")],
    "shuffled": lambda d: [step(make(d, 2, 8, 6, 6)) for make in (last, bf16) for step in (lambda t: F.pixel_shuffle(t, 2), lambda t: F.pixel_unshuffle(t, 2), lambda t: F.unfold(t, 3), lambda t: F.pad(t, (1, 1, 1, 1)), lambda t: F.pad(t, (1, 1, 1, 1), mode="reflect"), lambda t: t.mean((2, 3)), lambda t: t.mean((2, 3), keepdim=True), lambda t: torch.cat([t, t], 1), lambda t: torch.stack([t, t]), lambda t: t[:, :4].relu(), lambda t: t.float() + 1, lambda t: F.silu(t), lambda t: t * t[:, :1], lambda t: t.softmax(1), lambda t: t.flip(2), lambda t: F.dropout(t, 0.5), lambda t: t.sum(1), lambda t: t.amax(1, keepdim=True))],
    "sampled": lambda d: F.grid_sample(x(d, 1, 4, 6, 6), x(d, 1, 5, 5, 2), align_corners=False),
    "normed rows": lambda d: (F.layer_norm(x(d, 1, 64, dtype=BF16), (64,)), F.rms_norm(x(d, 1, 5, 64, dtype=BF16), (64,)), F.layer_norm(flipped(d, 5, 64), (64,)), F.rms_norm(flipped(d, 5, 64), (64,)), F.normalize(flipped(d, 5, 64), dim=-1)),
    "top experts": lambda d: x(d, 7, 16).softmax(-1).topk(2),
    "sorts of other dimensions": lambda d: (*x(d).topk(2, 1), *x(d).sort(0), *flipped(d, 4, 6, 8).sort(-1), *flipped(d, 4, 6, 8).topk(3), flipped(d, 4, 6).argsort(0), *x(d).mode(1), *x(d).cummax(1)),
    "one row sorted": lambda d: (*x(d, 1, 16).sort(-1, descending=True), x(d, 1, 16).argsort(0), *x(d, 16, 1).topk(1)),
    "of transposed": lambda d: [step(flipped(d, 4, 6, 8)) for step in (lambda t: t.softmax(-1), lambda t: t.log_softmax(0), lambda t: t.cumsum(0), lambda t: t.float(), lambda t: t + 1, lambda t: F.gelu(t), lambda t: F.dropout(t, 0.5), lambda t: t.flip(0), lambda t: t.roll(1, 0), lambda t: t.masked_fill(t > 0, 1.0), lambda t: torch.cat([t, t], -1), lambda t: torch.stack([t, t]), lambda t: t.sum(0), lambda t: t.mean(1, keepdim=True), lambda t: t.repeat(2, 1, 1), lambda t: t.repeat_interleave(2, 0), lambda t: t.tril(), lambda t: t.index_select(1, torch.arange(2, device=d)), lambda t: t[torch.arange(2, device=d)], lambda t: t.clamp(0, 1), lambda t: torch.where(t > 0, t, t), lambda t: torch.where(t > 0, t, 0.0), lambda t: t.clone(), lambda t: torch.empty_like(t), lambda t: t.new_empty(t.shape), lambda t: t.contiguous(), lambda t: t.reshape(-1), lambda t: t.isnan(), lambda t: t.argmax(-1), lambda t: t.amax(0), lambda t: t.var(0), lambda t: torch.lerp(t, t, 0.5), lambda t: torch.addcmul(t, t, t), lambda t: t.logsumexp(0), lambda t: t.gather(0, torch.zeros(1, 6, 8, dtype=torch.int64, device=d)), lambda t: F.glu(t), lambda t: t.diff(dim=0))],
    "of slices": lambda d: [step(x(d, 4, 6, 16, dtype=BF16)[:, ::2, :8]) for step in (lambda t: t + 1, lambda t: t.float(), lambda t: torch.empty_like(t), lambda t: t.clone(), lambda t: t.softmax(-1), lambda t: F.silu(t), lambda t: t.transpose(0, 2) * 2, lambda t: t.sum(1), lambda t: t.to(torch.float16).t() if t.dim() == 2 else t.half())],
    "of expanded": lambda d: [step(x(d, 4, 1, 8, dtype=BF16).expand(4, 6, 8)) for step in (lambda t: t + 1, lambda t: t.float(), lambda t: torch.empty_like(t), lambda t: t.clone(), lambda t: t.softmax(-1), lambda t: t.contiguous(), lambda t: torch.zeros_like(t), lambda t: t.to(torch.float16))],
    "of one": lambda d: [step(t) for t in (x(d, 1, 8), x(d, 8, 1), x(d, 1, 1, 8), x(d, 4, 1, 8)[:, :, :4], x(d, 2, 3, 8)[:1], x(d, 1, 8).t(), x(d, 4, 1, 8).transpose(0, 1), x(d, 2, 8)[1:].t(), x(d, 1, 6).expand(1, 6), x(d, 3, 5)[:, 2:3]) for step in (lambda t: t + 1, lambda t: t.half(), lambda t: torch.empty_like(t), lambda t: t.clone(), lambda t: t.contiguous(), lambda t: F.silu(t), lambda t: t.softmax(-1), lambda t: t.sum(0, keepdim=True), lambda t: t.cumsum(-1), lambda t: torch.cat([t, t], 0), lambda t: t.flip(0), lambda t: t.exp().transpose(0, 1), lambda t: torch.where(t > 0, t, t), lambda t: t.to(torch.bfloat16), lambda t: F.layer_norm(t, t.shape[-1:]), lambda t: F.rms_norm(t, t.shape[-1:]), lambda t: t.reshape(-1), lambda t: t.roll(1, 0), lambda t: t * t, lambda t: t.masked_fill(t > 0, 0.0))],
    "rotary": lambda d: torch.cat((-heads(d)[..., 32:], heads(d)[..., :32]), -1) * x(d, 64, 64, dtype=BF16),
    "rotary complex": lambda d: torch.view_as_real(torch.view_as_complex(x(d, 2, 16, 4, 32, 2)) * torch.polar(x(d, 16, 1, 32), x(d, 16, 1, 32))).flatten(3),
    "split heads": lambda d: packed(d),
    "scaled columns of one": lambda d: (x(d, 8, 1) * x(d, 1, 8), x(d, 8, 1).t() + 1, x(d, 1, 8).t().relu(), x(d, 4, 1, 8).transpose(0, 1).exp()),
    "kept dimensions": lambda d: (x(d, 4, 8).sum(1, keepdim=True), x(d, 4, 8).t().mean(0, keepdim=True), x(d, 4, 1, 8).amax(1)),
    "decompositions": lambda d: (*torch.linalg.qr(x(d, 6, 4)), torch.linalg.cholesky(torch.eye(4, device=d)), torch.linalg.inv(torch.eye(4, device=d)), torch.linalg.solve(torch.eye(4, device=d), x(d, 4, 2)), torch.linalg.solve_triangular(torch.eye(4, device=d), x(d, 4, 2), upper=True)),
    "transforms": lambda d: (torch.fft.fft(x(d)), torch.fft.rfft(x(d)), torch.fft.irfft(torch.fft.rfft(x(d))), torch.fft.fft2(x(d)), torch.fft.rfft(x(d), dim=0), torch.stft(torch.zeros(2, 400, device=d), 64, return_complex=True, window=torch.ones(64, device=d))),
    "indices": lambda d: (torch.searchsorted(torch.arange(8.0, device=d), x(d, 3)), torch.bucketize(x(d, 3), torch.arange(8.0, device=d)), torch.triu_indices(4, 4, device=d), x(d, 4, 8).scatter_reduce(0, torch.zeros(2, 8, dtype=torch.int64, device=d), x(d, 2, 8), "amax"), x(d, 4, 8).index_add(0, torch.zeros(2, dtype=torch.int64, device=d), x(d, 2, 8)), x(d, 4, 8).index_put((torch.zeros(2, dtype=torch.int64, device=d),), x(d, 2, 8)), x(d, 4, 8).index_copy(0, torch.arange(2, device=d), x(d, 2, 8))),
    "recurrent": lambda d: (nn.LSTM(8, 5, 2, device=d)(x(d))[0], nn.GRU(8, 5, device=d, batch_first=True)(x(d))[0], nn.LSTM(8, 5, device=d, bidirectional=True)(x(d))[0], *nn.LSTM(8, 5, device=d)(x(d))[1]),
    "embeddings": lambda d: (F.embedding_bag(torch.zeros(4, 3, dtype=torch.int64, device=d), x(d, 10, 8)), F.embedding(torch.zeros(2, 3, dtype=torch.int64, device=d), flipped(d, 10, 8))),
    "gradients": lambda d: torch.autograd.grad((y := x(d, 1, 8, requires_grad=True)).t().contiguous().sin().sum(), [y]),
    "gradients of matmul": lambda d: torch.autograd.grad((p := [flipped(d, 5, 8).requires_grad_(), x(d, 3, 8, dtype=BF16, requires_grad=True)]) and (p[0] @ p[1].t()).sum(), p),
    "gradients of linear": lambda d: torch.autograd.grad((p := [x(d, 2, 5, 8, requires_grad=True), x(d, 3, 8, requires_grad=True), x(d, 3, requires_grad=True)]) and F.linear(*p).square().sum(), p),
    "gradients of norms": lambda d: torch.autograd.grad((p := [flipped(d, 5, 64, dtype=torch.float32).requires_grad_(), x(d, 64, requires_grad=True)]) and F.layer_norm(p[0], (64,), p[1]).sum() + F.rms_norm(p[0], (64,), p[1]).sum(), p),
    "gradients of softmax": lambda d: torch.autograd.grad((y := flipped(d, 5, 64).requires_grad_()).softmax(-1).float().square().sum(), [y]),
    "gradients of indexing": lambda d: torch.autograd.grad((y := x(d, 5, 8, requires_grad=True))[torch.zeros(3, dtype=torch.int64, device=d)].sum() + y[:, ::2].square().sum(), [y]),
    "autocast": lambda d: autocast_linear(d),
    "scaled matmul fp8": lambda d: torch._scaled_mm(x(d, 16, 32, dtype=torch.float8_e4m3fn), x(d, 48, 32, dtype=torch.float8_e4m3fn).t(), torch.ones((), device=d), torch.ones((), device=d), out_dtype=BF16),
    "grouped matmul": lambda d: torch._grouped_mm(x(d, 32, 64, dtype=BF16), x(d, 4, 64, 32, dtype=BF16), offs=torch.tensor([8, 16, 24, 32], dtype=torch.int32, device=d)),
}  # fmt: skip
"""Operations whose results a GPU's kernels may lay out as neither those of the CPU nor torch's meta functions do."""

EVERY = {**OPERATIONS, **WITH_KERNELS_OF_THEIR_OWN}
INVENTED = ("of one", "scaled columns of one")
"""Those for which torch's meta functions invent strides along sizes of 1."""


def bf16(device, *shape):
    return torch.empty(*shape, device=device, dtype=BF16)


def autocast_attention(device):
    with torch.autocast("cuda", dtype=BF16):
        return attend(*(heads(device, dtype=torch.float32) for _ in range(3)))


def autocast_linear(device):
    with torch.autocast("cuda", dtype=torch.float16):
        y = F.linear(x(device, 4, 8), x(device, 3, 8))
        return y, y + x(device, 3), F.layer_norm(y, (3,)), y.softmax(-1), x(device, 4, 8) @ x(device, 8, 2)


STEPS = [
    lambda t: t.transpose(0, -1),
    lambda t: t[1:] if t.shape[0] > 1 else t,
    lambda t: t[..., ::2],
    lambda t: t.unsqueeze(0).expand(3, *t.shape),
    lambda t: t.reshape(-1, t.shape[-1]),
    lambda t: t.flatten(),
    lambda t: t.unsqueeze(1),
    lambda t: t.contiguous(),
    lambda t: t.clone(),
    lambda t: t + 1,
    lambda t: t.to(torch.bfloat16),
    lambda t: t.to(torch.int64),
    lambda t: torch.empty_like(t),
    lambda t: t.narrow(-1, t.shape[-1] // 2, t.shape[-1] - t.shape[-1] // 2),
    lambda t: t.sum(-1, keepdim=True),
    lambda t: torch.cat([t, t], -1),
    lambda t: t.roll(1, 0),
    lambda t: t.new_empty(t.shape),
    lambda t: t.chunk(2, -1)[-1],
]
