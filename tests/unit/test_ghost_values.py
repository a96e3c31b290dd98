"""Values: known where the program stated them, refused with the user's line where it did not."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton
import triton.language as tl

from tcache._triton.kernels import jit_of
from tcache._triton.written import written_arguments
from tcache.errors import ManifestError
from tcache.keys import find_gpu
from tcache.manifest import load_manifest
from tcache.replay import launches, machine
from tcache.replay.values import ValueUnknown, forget

H200 = find_gpu("NVIDIA H200")


def data(*shape):
    return torch.empty(shape or (4,), device="cuda")


READS = {
    "item": lambda: data().sum().item(),
    "tolist": lambda: data().tolist(),
    "if": lambda: 1 if (data() > 0).any() else 2,
    "bool": lambda: bool(data()[0]),
    "int": lambda: int(data().max()),
    "float": lambda: float(data().max()),
    "range": lambda: range(data(1).int()),
    "nonzero": lambda: data().nonzero(),
    "torch.nonzero": lambda: torch.nonzero(data()),
    "where": lambda: torch.where(data() > 0),
    "mask": lambda: data()[data() > 0],
    "masked_select": lambda: torch.masked_select(data(), data() > 0),
    "unique": lambda: data().unique(),
    "unique_consecutive": lambda: torch.unique_consecutive(data()),
    "numpy": lambda: data().cpu().numpy(),
    "equal": lambda: torch.equal(data(), data()),
    "allclose": lambda: torch.allclose(data(), data()),
    "contains": lambda: 3 in data(),
    "bincount": lambda: torch.bincount(data().long()),
    "repeat_interleave": lambda: data().repeat_interleave(data().long()),
    "after cpu": lambda: data().cpu().sum().item(),
    "copied to a real tensor": lambda: torch.zeros(4).copy_(data()),
    "argwhere": lambda: torch.argwhere(data()),
    "while": lambda: [0 for _ in iter(lambda: bool(data()[0]), None)],
}


@pytest.mark.parametrize("name", READS)
def test_reading_names_the_line(name):
    with machine(H200), pytest.raises(ValueUnknown, match="depends on the values") as caught:
        READS[name]()
    if name != "while":
        line = inspect.getsourcelines(READS[name])[1]
        assert caught.value.where == f"{__file__}:{line}"


def test_printing_is_not_reading():
    with machine(H200):
        value = data(2, 3)
        for text in (repr(value), str(value), f"{value}", f"{value.sum()}", f"{[value]}"):
            assert "device='cuda:0'" in text
            assert "size=" in text


def test_values_that_the_program_states_are_known():
    with machine(H200):
        ends = torch.tensor([0, 100, 356], device="cuda")
        assert ends.diff().tolist() == [100, 256]
        assert int(ends[-1]) == 356
        assert (ends[1:] - ends[:-1]).max().item() == 256
        assert ends.cpu().numpy().tolist() == [0, 100, 356]
        assert torch.tensor([3, 4]).cuda().to(torch.int32).tolist() == [3, 4]
        assert torch.arange(3, device="cuda").flip(0).tolist() == [2, 1, 0]
        assert torch.cat([ends, ends]).view(2, 3)[1].tolist() == [0, 100, 356]
        assert (ends > 50).nonzero().flatten().tolist() == [1, 2]
        assert (ends > 50).nonzero().is_cuda
        assert ends[ends > 50].shape == (2,)
        assert torch.equal(ends, ends.clone())
        assert torch.zeros_like(data()).sum().item() == 0
        assert f"{ends[1]}" == "100"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(data()),
        lambda t: t[1:].copy_(data(3)),
        lambda t: t.__setitem__(0, 5),
        lambda t: torch.add(data(), 1, out=t),
        lambda t: t.view(2, 2).mul_(2),
        lambda t: t.random_(),
        lambda t: forget([t]),
        lambda t: forget({"x": t[2:]}),
    ],
)
def test_values_are_unknown_after_a_change(change):
    with machine(H200):
        value = torch.zeros(4, device="cuda")
        view = value[1:]
        assert value.tolist() == [0, 0, 0, 0]
        change(value)
        for one in (value, view):
            with pytest.raises(ValueUnknown):
                one.tolist()


def test_sizes_that_are_known_tensors():
    with machine(H200):
        lengths = torch.tensor([3, 4, 5], device="cuda")
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        assert torch.empty((starts[-1], 8), device="cuda").shape == (12, 8)
        assert torch.randn(size=(starts[1], 2), device="cuda").shape == (3, 2)
        assert data(24).view(starts[-1], 2).shape == (12, 2)
        assert data(24).new_zeros((2, starts[-1])).shape == (2, 12)
        with pytest.raises(ValueUnknown, match=r"test_ghost_values\.py:\d+: torch\.empty\(\)"):
            torch.empty((data(4).sum().long(), 8), device="cuda")


@pytest.mark.parametrize("fill", [float("inf"), float("-inf"), float("nan"), 1e30, 7, True])
def test_what_a_tensor_is_filled_with(fill):
    with machine(H200):
        made = torch.full((2, 3), fill, device="cuda")
        assert (made.shape, made.is_cuda) == ((2, 3), True)
        wanted = torch.full((2, 3), fill, device="cpu")
        assert made.dtype == wanted.dtype
        assert torch.equal(torch.tensor(made.tolist()).nan_to_num(), wanted.nan_to_num())
        assert torch.full(size=(2,), fill_value=fill, device="cuda").shape == (2,)


def test_random_and_large_tensors_are_unknown():
    with machine(H200):
        for value in (
            torch.rand_like(torch.zeros(2, device="cuda")),
            torch.zeros(1 << 20, device="cuda"),
            torch.nn.functional.dropout(torch.ones(4, device="cuda")),
            torch.empty_like(torch.zeros(2, device="cuda")),
        ):
            with pytest.raises(ValueUnknown):
                value.tolist()


@triton.jit
def inner(pointer, value):
    tl.store(pointer, value)


@triton.jit
def writes(a, b, c, d, e, index, n, BLOCK: tl.constexpr):
    start = tl.load(index + tl.program_id(0))
    o = start + tl.arange(0, BLOCK)
    target = b + o
    x = tl.load(a + o, mask=o < n)
    tl.store(target, x, mask=o < n)
    tl.atomic_add(c + o, x)
    inner(d + o, x)
    block = tl.make_block_ptr(e, (n,), (1,), (0,), (BLOCK,), (0,))
    tl.store(block, x)


@triton.autotune([triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def reads(x, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    y_ptr = y
    for _ in range(n):
        y_ptr += BLOCK
        tl.store(y_ptr + o, tl.load(x + o) + tl.load(y + o))


def test_what_a_kernel_may_write_to():
    assert written_arguments(writes) & {"a", "b", "c", "d", "e", "index"} == {"b", "c", "d", "e"}
    assert "x" not in written_arguments(reads)
    assert "y" in written_arguments(reads)


WRAPPER = """\
import torch
import triton
import triton.language as tl

@triton.jit
def k(x, index, y, n, B: tl.constexpr):
    tl.store(y + tl.arange(0, B), tl.load(x + tl.arange(0, B)) + tl.load(index))

def reads_result(x):
    y = torch.zeros(16, device=x.device)
    k[(1,)](x, torch.tensor([3], device=x.device), y, 16, B=16)
    if y.sum() > 3:
        k[(1,)](x, x, y, 17, B=16)

def reads_index(x):
    index = torch.tensor([3], device=x.device)
    y = torch.zeros(16, device=x.device)
    k[(1,)](x, index, y, 16, B=16)
    for n in range(index.item()):
        k[(1,)](x, index, y, n + 16, B=16)

def swallows(x):
    try:
        x.sum().item()
    except RuntimeError:
        k[(1,)](x, x, x, 16, B=16)
"""


def cases(kernel_file, tmp_path, function):
    kernel_file("wrapper.py", WRAPPER)
    return cases_in(tmp_path, function)


def cases_in(tmp_path, function):
    path = tmp_path / "m.yaml"
    path.write_text(
        "version: 1\nkernels:\n"
        f"  - call: wrapper.py:{function}\n    args: {{x: {{shape: [n], dtype: float32}}}}\n    cases: [{{n: 16}}]\n"
    )
    return list(load_manifest(path).cases())


def test_a_manifest_error_names_both_lines_and_the_way_out(kernel_file, tmp_path):
    (case,) = cases(kernel_file, tmp_path, "reads_result")
    with machine(H200), pytest.raises(ManifestError) as caught:
        launches(case)
    assert "m.yaml:5:13" in caught.value.message
    assert "wrapper.py:12: .__bool__()" in caught.value.message
    assert "'kernel:'" in caught.value.hint
    assert "tcache record" in caught.value.hint


def test_a_kernel_keeps_what_it_only_reads(kernel_file, tmp_path):
    (case,) = cases(kernel_file, tmp_path, "reads_index")
    with machine(H200):
        assert [launch.args[3] for launch in launches(case)] == [16, 16, 17, 18]


def test_a_program_may_catch_it_as_on_any_device_without_values(kernel_file, tmp_path):
    (case,) = cases(kernel_file, tmp_path, "swallows")
    with machine(H200):
        assert len(launches(case)) == 1


HANDLES = """
import torch
import triton
import triton.language as tl
from triton import KernelInterface

@triton.jit
def k(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 1.0)

@triton.autotune([triton.Config({"B": size}) for size in (16, 32)], key=["n"])
@triton.jit
def tuned(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 1.0)

def runs(x):
    k.run(x, 16, 16, grid=(1,), warmup=False)
    tuned.run(x, 17, grid=(1,), warmup=False)

def warms(x):
    compiled = k.warmup(x, 16, B=16, grid=(1,))
    compiled._init_handles()
    compiled[(4, 1, 1)](x, 16)
    k.warmup(torch.float16, 17, B=16, grid=(1,))

def keeps(x):
    compiled = k[(1,)](x, 16, B=16)
    if hasattr(compiled, "packed_metadata"):
        raise AssertionError

def asks(x):
    compiled = k.warmup(x, 16, B=16, grid=(1,))
    compiled._init_handles()
    k[(65536 // compiled.n_regs,)](x, 16, B=16)

def benchmarks(x):
    triton.testing.do_bench(lambda: k[(1,)](x, 16, B=16))

def misses_a_module(x):
    import not_installed_here

class Chooser(KernelInterface):
    # measures configs by itself, as the tuner of AutoGPTQ does
    def __init__(self, fn):
        self.fn, self.arg_names = fn, fn.arg_names

    def run(self, *args, **kwargs):
        times = {size: triton.testing.do_bench(lambda: self.fn.run(*args, B=size, **kwargs)) for size in (16, 32)}
        return self.fn.run(*args, B=min(times, key=times.get), **kwargs)

chosen = Chooser(k)

def chooses(x):
    chosen[(1,)](x, 16)

def loads(x):
    from triton.runtime import driver
    driver.active.utils.load_binary("k", b"", 0, 0)
"""


@pytest.mark.parametrize(("function", "made"), [
    ("runs", [("torch.float32", 16), ("torch.float32", 17)]), ("keeps", [("torch.float32", 16)]),
    ("warms", [("torch.float32", 16), ("torch.float16", 17)]),
])  # fmt: skip
def test_other_ways_to_launch(kernel_file, tmp_path, function, made):
    kernel_file("wrapper.py", HANDLES)
    (case,) = cases_in(tmp_path, function)
    with machine(H200):
        found = launches(case)
        assert {tuple(jit_of(launch.kernel).arg_names) for launch in found} == {("x", "n", "B")}
        assert [(str(launch.args[0].dtype), launch.args[1]) for launch in found] == made


@pytest.mark.parametrize(("function", "message", "hint"), [
    ("asks", r"wrapper\.py:\d+: compiled_kernel\.n_regs is known once a kernel is compiled", "tcache record"),
    ("benchmarks", "benchmarks cannot be replayed for n=16: nothing can be benchmarked", "kernel:"),
    ("chooses", "chooses cannot be replayed for n=16: a Chooser measures configs, which needs a GPU", "tcache record"),
    ("misses_a_module", r"failed for n=16 at \S+wrapper\.py:\d+: ModuleNotFoundError", "install it here, too"),
    ("loads", "loads cannot be replayed for n=16: kernel k cannot be loaded", "kernel:"),
])  # fmt: skip
def test_what_only_a_gpu_tells(kernel_file, tmp_path, function, message, hint):
    kernel_file("wrapper.py", HANDLES)
    with machine(H200), pytest.raises(ManifestError, match=message) as caught:
        launches(cases_in(tmp_path, function)[0])
    assert "m.yaml:5:13" in caught.value.message
    assert hint in caught.value.hint
