# ruff: noqa: E501, PLW0108
"""Ghosts have the shape, strides, dtype, alignment and autograd state that real tensors have, and answer for a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tcache.keys import find_gpu
from tcache.replay import machine
from tcache.replay.ghost import ghost

H200 = find_gpu("NVIDIA H200")
MI300X = find_gpu("AMD Instinct MI300X")


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


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def agree(make, ones=True):
    """Run ``make(device)`` on the CPU and with ghosts, and compare."""
    wanted = facts(make(torch.device("cpu")), ones)
    with machine(H200):
        made = make(torch.device("cuda"))
        found = facts(made, ones)
        for tensor in tensors(made):
            assert tensor.device == torch.device("cuda", 0)
            assert tensor.is_cuda
            assert not tensor.is_meta
            assert not tensor.is_cpu
            assert tensor.get_device() == 0
            assert tensor.data_ptr() % 16 == tensor.storage_offset() * tensor.element_size() % 16
            assert str(tensor.device) in repr(tensor)
    for tensor in tensors(made):
        assert torch.Tensor.is_meta.__get__(tensor), "it needs memory"
    assert found == wanted


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


@pytest.mark.parametrize("name", OPERATIONS)
def test_like_real_tensors(name):
    agree(OPERATIONS[name])


steps = st.sampled_from(
    [
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
)


@settings(deadline=None, max_examples=150)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), chain=st.lists(steps, min_size=1, max_size=7))
def test_chains_of_operations(shape, chain):
    def make(device):
        found = [torch.empty(shape, device=device)]
        for step in chain:
            if found[-1].dim() > 6 or found[-1].numel() > 100_000:
                break
            found.append(step(found[-1]))
        return found

    agree(make, ones=False)


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    offset=st.integers(0, 9),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "int64", "float8_e4m3fn"]),
    data=st.data(),
)
def test_a_ghost_as_a_manifest_states_it(shape, offset, dtype, data):
    stride = data.draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    made = ghost(tuple(shape), dtype, tuple(stride), offset)
    assert (list(made.shape), list(made.stride()), made.storage_offset()) == (shape, stride, offset)
    assert 0 in shape or made.data_ptr() % 16 == offset * made.element_size() % 16
    with machine(H200):
        inside = ghost(tuple(shape), dtype, tuple(stride), offset)
        assert inside.is_cuda
        assert inside.dtype == getattr(torch, dtype)


def test_custom_functions_see_ghosts_forward_and_backward():
    seen = []

    class Scaled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, value, weight):
            seen.append((value.is_cuda, weight.device.type, torch.is_grad_enabled()))
            ctx.save_for_backward(value, weight)
            ctx.size = value.shape[0]
            return value @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            value, weight = ctx.saved_tensors
            seen.append((gradient.is_cuda, value.device.type, weight.get_device()))
            buffer = torch.empty(ctx.size, device=gradient.device)
            assert buffer.is_cuda
            return gradient @ weight.t(), value.t() @ gradient

    with machine(H200):
        value = torch.randn(3, 4, device="cuda", requires_grad=True)
        weight = nn.Parameter(torch.randn(4, 5, device="cuda"))
        Scaled.apply(value, weight).sum().backward()
        assert value.grad.shape == value.shape
        assert weight.grad.is_cuda
    assert seen == [(True, "cuda", False), (True, "cuda", 0)]


def test_places():
    with machine(H200):
        there = torch.empty(3, 4, device="cuda")
        here = there.cpu()
        assert (here.device.type, here.is_cuda, here.is_cpu, here.get_device()) == ("cpu", False, True, -1)
        assert (here + 1).device.type == "cpu"
        assert (here + 1).t().to("cuda").device == torch.device("cuda", 0)
        assert there.to("cpu", torch.float16).dtype == torch.float16
        second = torch.empty(2, device="cuda:1")
        assert (second * 2)[1:].device == torch.device("cuda", 1)
        with torch.cuda.device(1):
            assert torch.empty(2, device="cuda").device.index == 1
            assert torch.cuda.current_device() == 1
        assert torch.empty(2, device="cuda").device.index == 0
        plan = nn.Linear(3, 4, device="meta")
        assert plan.weight.is_meta
        assert not plan.weight.is_cuda
        assert plan.to_empty(device="cuda").weight.is_cuda
        torch.set_default_device("cuda")
        try:
            assert torch.ones(2).is_cuda
        finally:
            torch.set_default_device(None)
        assert torch.ones(2).device.type == "cpu"
        assert there.type() == "torch.cuda.FloatTensor"


def test_real_tensors_stay_real():
    with machine(H200):
        real = torch.arange(6).reshape(2, 3)
        assert real.sum().item() == 15
        assert real[real > 2].tolist() == [3, 4, 5]
        assert not real.is_cuda
    assert real.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_initial_weights_on_the_cpu_need_no_memory():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with machine(H200):
        layer = nn.Linear(16384, 16384)
        assert layer.weight.device.type == "cpu"
        assert layer.cuda().weight.is_cuda
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB; the weight has 1 GB


def test_everything_is_put_back():
    names = [
        (module, name, value)
        for module in (torch, torch.cuda, torch._C, torch.version, torch.accelerator, torch.autograd)
        for name, value in vars(module).items()
    ]
    present = {module.__name__: set(vars(module)) for module in (torch.cuda, torch._C, torch.version)}
    for gpu in (H200, MI300X):
        with machine(gpu):
            assert torch.cuda.is_available()
            with pytest.raises(ZeroDivisionError), machine(H200):
                raise ZeroDivisionError
    assert torch.overrides._get_current_function_mode_stack() == []
    for module, name, value in names:
        assert getattr(module, name) is value, f"{module.__name__}.{name}"
    for module in (torch.cuda, torch._C, torch.version):
        assert set(vars(module)) == present[module.__name__]
    assert torch.empty(2, device="meta").is_meta


def test_gradients_of_a_choice():
    def chosen(device):
        value = x(device, 4, 6, requires_grad=True)
        torch.where(value > 0, value, 3.0).sum().backward()
        value.clone().masked_fill(value > 0, 1.0).sum().backward()
        return value.grad, torch.zeros(2, device="meta").device.type

    agree(lambda device: chosen(device)[0])
    with machine(H200):
        assert chosen("cuda")[1] == "meta", "a program that says meta means it"


def test_generators_and_streams():
    with machine(H200):
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
        assert torch.Generator(device="cuda").device.type == "cuda"
        assert torch.randn(3, device="cuda", generator=generator).is_cuda
        stream = torch.cuda.Stream()
        with (
            torch.cuda.stream(stream),
            torch.cuda.device("cuda:0"),
            torch.cuda.device_of(torch.empty(1, device="cuda")),
        ):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.empty(4, device="cuda").record_stream(stream)
            end.record()
        torch.cuda.synchronize()
        assert torch.cuda.current_stream().cuda_stream == 0
        assert start.elapsed_time(end) == 0
        torch.cuda.manual_seed_all(1)
        assert torch.empty(3, pin_memory=True).pin_memory().cuda().is_cuda


def test_compiled_functions_run_as_written():
    seen = []

    @torch.compile(fullgraph=True)
    def compiled(value):
        seen.append(value.is_cuda)
        return value * 2

    with machine(H200):
        assert compiled(torch.empty(3, device="cuda")).is_cuda
    assert seen == [True]
