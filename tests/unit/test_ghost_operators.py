"""Custom operators: a replay runs what implements them on a GPU, where torch would run their fake implementation."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from tcache.keys import find_gpu
from tcache.manifest import load_manifest
from tcache.replay import launches, machine
from tcache.replay.launches import load_target

H200 = find_gpu("NVIDIA H200")
MI300X = find_gpu("AMD Instinct MI300X")

OPERATORS = """
import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op, triton_op, wrap_triton


@triton.jit
def k(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.load(x + o, mask=o < n), mask=o < n)


def copy(x: torch.Tensor) -> torch.Tensor:
    assert x.is_cuda and torch.empty(1, device="cuda").device == x.device
    y = torch.empty_like(x)
    k[(4,)](x, y, x.numel(), 128)
    return y


library = Library("tcache_tests", "DEF")
library.define("registered(Tensor x) -> Tensor")
library.impl("registered", copy, "CUDA")
library._register_fake("registered", torch.empty_like)
library.define("no_fake(Tensor x) -> Tensor")
library.impl("no_fake", copy, "CUDA")
library.define("anywhere(Tensor x) -> Tensor")
library.impl("anywhere", copy, "CompositeExplicitAutograd")
library.define("seen_through(Tensor x) -> Tensor")
library.impl("seen_through", copy)
library.define("two.first(Tensor x) -> Tensor")
library.define("two.second(Tensor x, int n) -> Tensor")
library.impl("two.second", lambda x, n: copy(x), "CUDA")
torch.library.define("tcache_tests::by_name", "(Tensor x) -> Tensor")
torch.library.impl("tcache_tests::by_name", "cuda", copy)
torch.library.register_fake("tcache_tests::by_name", torch.empty_like)
library.define("filled(Tensor x, Tensor(a!) y) -> ()")
library.impl("filled", lambda x, y: k[(4,)](x, y, x.numel(), 128) and None, "CUDA")


@custom_op("tcache_tests::custom", mutates_args=())
def custom(x: torch.Tensor) -> torch.Tensor:
    return copy(x)


custom.register_fake(torch.empty_like)


@custom_op("tcache_tests::custom_cuda", mutates_args=(), device_types="cuda")
def custom_cuda(x: torch.Tensor) -> torch.Tensor:
    return copy(x)


custom_cuda.register_fake(torch.empty_like)
custom_cuda.register_autograd(lambda ctx, gradient: custom_cuda(gradient[:8].clone()).new_empty(gradient.shape))


@custom_op("tcache_tests::wrapped", mutates_args=())
def wrapped(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    WRAPPED[(4,)](x, y, x.numel(), B=128)
    return y


WRAPPED = wrap_triton(k)


@triton_op("tcache_tests::triton", mutates_args=())
def through_triton(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    wrap_triton(k)[(4,)](x, y, x.numel(), 128)
    return y


def registered(x):
    return torch.ops.tcache_tests.registered(x)


def no_fake(x):
    return torch.ops.tcache_tests.no_fake.default(x)


def anywhere(x):
    return torch.ops.tcache_tests.anywhere(x)


def seen_through(x):
    return torch.ops.tcache_tests.seen_through(x)


def overloaded(x):
    return torch.ops.tcache_tests.two(x, 3)


def by_name(x):
    return torch.ops.tcache_tests.by_name(x)


def filled(x):
    torch.ops.tcache_tests.filled(x, torch.empty_like(x))


def by_namespace(x):
    return torch.ops.tcache_tests.custom(x)


def within_a_layer(x):
    with torch.autocast("cuda", torch.float16), torch.inference_mode():
        return custom(torch.relu(x) * 2)


def with_gradient(x):
    custom_cuda(x.detach().requires_grad_()).sum().backward()


def in_torchs_place(x):
    library = Library("aten", "IMPL")
    library.impl("neg", copy, "CUDA")
    library.impl("t", lambda x: copy(x).new_empty(x.shape[::-1]), "CUDA")
    library.impl("mm", lambda a, b: copy(a).new_empty(a.shape[0], b.shape[1]), "CUDA")
    torch.mm(torch.neg(x).view(4, 8), x.view(8, 4))
    made = (-x.view(4, 8)).t()
    assert made.shape == (8, 4) and made.is_cuda
    library._destroy()
    del library
    torch.neg(x)


def left_in_torchs_place(x):
    global PLACED
    if PLACED is None:
        PLACED = Library("aten", "IMPL")
        PLACED.impl("neg", copy, "CUDA")
    torch.neg(x)


PLACED = None


def known_values(x):
    copied = custom(torch.tensor([1.0, 2.0], device=x.device))
    try:
        copied.tolist()
    except RuntimeError:
        return copy(x)
"""


FUNCTIONS = [
    "registered", "no_fake", "anywhere", "seen_through", "overloaded", "filled", "custom", "custom_cuda",
    "by_namespace", "through_triton", "wrapped", "by_name", "within_a_layer",
]  # fmt: skip
NUMBERS = itertools.count()


def case_of(kernel_file, tmp_path, function):
    kernel_file("operators.py", OPERATORS.replace("tcache_tests", f"tcache_tests_{next(NUMBERS)}"))
    path = tmp_path / "m.yaml"
    path.write_text(
        "version: 1\nkernels:\n"
        f"  - call: operators.py:{function}\n    args: {{x: {{shape: [n], dtype: float32}}}}\n    cases: [{{n: 32}}]\n"
    )
    (case,) = load_manifest(path).cases()
    return case


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("gpu", [H200, MI300X], ids=["cuda", "hip"])
def test_the_gpus_implementation_launches(kernel_file, tmp_path, function, gpu):
    with machine(gpu):
        (launch,) = launches(case_of(kernel_file, tmp_path, function))
        assert {**dict(zip(launch.kernel.arg_names, launch.args, strict=False)), **launch.kwargs}["n"] == 32


def test_gradients_of_operators_launch(kernel_file, tmp_path):
    with machine(H200):
        assert [launch.args[2] for launch in launches(case_of(kernel_file, tmp_path, "with_gradient"))] == [32, 8]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernels_in_torchs_place(kernel_file, tmp_path):
    """Libraries register theirs for torch's own operators, as FlagGems does."""
    with machine(H200):
        assert len(launches(case_of(kernel_file, tmp_path, "in_torchs_place"))) == 4
        assert torch.neg(torch.empty(3, device="cuda")).is_cuda
    assert torch.equal(torch.neg(torch.ones(3)), -torch.ones(3))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_what_is_left_in_torchs_place_is_nothing_to_meta_tensors_between_replays(kernel_file, tmp_path):
    case = case_of(kernel_file, tmp_path, "left_in_torchs_place")
    for gpu in (H200, H200, MI300X):
        with machine(gpu):
            assert len(launches(case)) == 1
            assert len(launches(case)) == 1
        assert torch.neg(torch.empty(3, device="meta")).shape == (3,)
    load_target(case).__globals__["PLACED"]._destroy()


def test_results_are_unknown_and_no_launch_is_of_tensors_on_the_cpu(kernel_file, tmp_path):
    with machine(H200):
        assert [launch.args[2] for launch in launches(case_of(kernel_file, tmp_path, "known_values"))] == [2, 32]


def test_operators_are_as_before_outside(kernel_file, tmp_path):
    case = case_of(kernel_file, tmp_path, "registered")
    higher = list(torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS)
    for gpu in (H200, MI300X, H200):  # imported anew each time, which torch allows for what is defined once only
        with machine(gpu):
            assert len(launches(case)) == 1
            assert len(launches(case)) == 1
        space = getattr(torch.ops, load_target(case).__globals__["library"].ns)
        made = space.registered(torch.empty(3, device="meta"))
        assert made.is_meta
        assert made.shape == (3,)
    assert higher == torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS


SHARING = """
import torch
import triton
import triton.language as tl
from SHARED import library

library.impl("shared", torch.empty_like, "Meta", allow_override=True)


@triton.jit
def k(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), n)


def f(x):
    k[(1,)](torch.ops.SHARED.shared(x), x.numel(), B=16)
"""


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_library_of_a_module_that_stays_is_left_to_it(kernel_file, tmp_path, monkeypatch):
    """It has nothing to do with Triton, and is not imported anew with what has."""
    name = f"tcache_tests_{next(NUMBERS)}"
    shared = "import torch\n\nlibrary = torch.library.Library('SHARED', 'DEF')\n"
    shared += "library.define('shared(Tensor x) -> Tensor')\n"
    kernel_file(f"{name}.py", shared.replace("SHARED", name))
    kernel_file("sharing.py", SHARING.replace("SHARED", name))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "m.yaml").write_text(
        "version: 1\nkernels:\n"
        "  - call: sharing.py:f\n    args: {x: {shape: [n], dtype: float32}}\n    cases: [{n: 8}]\n"
    )
    (case,) = load_manifest(tmp_path / "m.yaml").cases()
    importlib.import_module(name)
    for gpu in (H200, MI300X, H200):
        with machine(gpu):
            assert len(launches(case)) == 1
