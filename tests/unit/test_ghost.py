"""Ghosts have the shape, strides, dtype, alignment and autograd state that real tensors have, and answer for a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tcache.keys import find_gpu
from tcache.replay import machine
from tcache.replay.ghost import ghost

sys.path.insert(0, str(Path(__file__).parent))
from ghost_operations import EVERY, INVENTED, OPERATIONS, STEPS, facts, plain, x

H200 = find_gpu("NVIDIA H200")
MI300X = find_gpu("AMD Instinct MI300X")


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


@pytest.mark.parametrize("name", OPERATIONS)
def test_like_real_tensors(name):
    agree(OPERATIONS[name])


RECORDED = json.loads((Path(__file__).parent / "gpu_layouts.json").read_text())["operations"]


def test_every_operation_was_run_on_a_gpu():
    assert list(RECORDED) == list(EVERY)


def without_ones(found):
    if found and found[0] == "tensor":
        return [*found[:3], [step for step, size in zip(found[3], found[2], strict=True) if size > 1], *found[4:]]
    return [without_ones(one) if isinstance(one, list) else one for one in found]


@pytest.mark.parametrize("name", EVERY)
def test_like_the_tensors_of_an_h200(name):
    """``gpu_layouts.json`` is what an H200 answered; ``tests/gpu/test_ghosts_on_gpu.py`` writes it."""
    with machine(H200):
        found = plain(facts(EVERY[name](torch.device("cuda"))))
    change = without_ones if name in INVENTED else list
    assert change(found) == change(RECORDED[name])


@settings(deadline=None, max_examples=150)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    chain=st.lists(st.sampled_from(STEPS), min_size=1, max_size=7),
)
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


def test_the_state_of_a_generator_is_philoxs():
    with machine(H200):
        for generator in (torch.cuda.default_generators[0], torch.Generator(device="cuda")):
            generator.manual_seed(2**63 + 5)
            generator.set_offset(8)
            state = generator.get_state()
            seed, offset = state.view(torch.int64)
            assert (
                (int(seed) % 2**64, int(offset)) == (generator.initial_seed(), generator.get_offset()) == (2**63 + 5, 8)
            )
            offset += 4
            generator.set_state(state)
            assert generator.get_offset() == 12
        torch.cuda.manual_seed(7)
        assert torch.cuda.initial_seed() == 7
        assert torch.cuda.get_rng_state().view(torch.int64).tolist() == [7, 0]
        assert torch.default_generator.get_state().numel() > 16


def test_functions_of_functions():
    agree(lambda device: torch.vmap(lambda row: row.sum() * torch.arange(3, device=device))(x(device, 4, 5)))
    agree(lambda device: torch.func.grad(lambda value: (value * value).sum())(x(device, 4, 5)))
    agree(lambda device: torch.func.jacrev(torch.sin)(x(device, 4)))
    agree(lambda device: torch.vmap(torch.func.grad(lambda row: row.pow(2).sum()))(x(device, 4, 5)))


def test_attention_with_a_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    with machine(H200):
        mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, 256, 256, device="cuda")
        assert mask.kv_num_blocks.is_cuda
        assert mask.kv_indices.shape == (1, 1, 2, 2)


def test_graphs_and_ranges():
    with machine(H200):
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()), torch.cuda.nvtx.range("captured"):
            torch.cuda.nvtx.range_push("inner")
            made = torch.empty(3, device="cuda") + 1
            torch.cuda.nvtx.range_pop()
        graph.replay()
        assert graph.pool() == pool
        assert made.is_cuda


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


def test_products_of_another_dtype():
    """torch takes the dtype for a factor when tensors are meta, of some functions in some releases."""
    with machine(H200):
        left, right = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, 8, 16), (2, 16, 4)))
        bias, single = torch.empty(4, device="cuda"), torch.empty(8, 4, device="cuda")
        made = {
            "mm": torch.mm(left[0], right[0], out_dtype=torch.float32),
            "addmm": torch.addmm(bias, left[0], right[0], out_dtype=torch.float32, alpha=2),
            "by place": torch.addmm(single, left[0].contiguous(), right[0], torch.float32),
            "out": torch.addmm(input=single, mat1=left[0], mat2=right[0], out_dtype=torch.float32, out=single),
            "bmm": torch.bmm(left, right, out_dtype=torch.float32),
            "baddbmm": torch.baddbmm(bias, left, right, out_dtype=torch.float32),
        }
        assert made["out"] is single
        for name, value in made.items():
            assert value.shape == ((2, 8, 4) if name.endswith("bmm") else (8, 4)), name
            assert (value.dtype, value.is_cuda, value.is_contiguous()) == (torch.float32, True, True), name
        assert torch.addmm(bias.bfloat16(), left[0], right[0]).dtype == torch.bfloat16
