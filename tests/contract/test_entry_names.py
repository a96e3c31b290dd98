"""The contract with each supported Triton release: the entry computed is the directory Triton itself writes."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from tcache._triton.driver import stub
from tcache._triton.kernels import through_decorators
from tcache._triton.mock import MockTensor
from tcache._triton.probe import compilation_of
from tcache.compile import entry_present
from tcache.replay.ghost import GhostMode, ghost

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)]


@triton.jit
def inner(x, FACTOR: tl.constexpr):
    return x * FACTOR


@triton.jit
def kernel(x_ptr, y_ptr, n, a, flag, none, KIND: tl.constexpr, BLOCK: tl.constexpr = 64):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n).to(tl.float32)
    if KIND == "scaled":
        x = inner(x, 3)
    if flag:
        x += a
    tl.store(y_ptr + o, x.to(y_ptr.dtype.element_ty), mask=o < n)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
def loose(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty), mask=o < n)


@triton.jit
def annotated(x_ptr, n: tl.int64, scale: tl.float32, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, (o * scale).to(x_ptr.dtype.element_ty), mask=o < n)


@triton.jit
def tupled(x_ptr, sizes, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty), mask=o < sizes[0] * sizes[1])


def pointer(dtype="float32", offset=0):
    return MockTensor(dtype, (4096,), (1,), offset)


LAUNCHES = {
    "plain": (kernel, (pointer(), pointer(), 4096, 1.5, True, None, "plain"), {}),
    "odd n": (kernel, (pointer(), pointer(), 4097, 1.5, True, None, "plain"), {}),
    "n is one": (kernel, (pointer(), pointer(), 1, 1.5, True, None, "plain"), {}),
    "negative": (kernel, (pointer(), pointer(), -16, 1.5, False, None, "plain"), {}),
    "64 bits": (kernel, (pointer(), pointer(), 2**40, 1.5, False, None, "plain"), {}),
    "unsigned 64 bits": (kernel, (pointer(), pointer(), 2**63, 1.5, False, None, "plain"), {}),
    "unaligned": (kernel, (pointer(offset=4), pointer(), 4096, 1.5, True, None, "plain"), {}),
    "constexpr text": (kernel, (pointer(), pointer(), 4096, 1.5, True, None, "scaled"), {}),
    "integer a": (kernel, (pointer(), pointer(), 4096, 2, True, None, "plain"), {}),
    "keywords": (kernel, (pointer("bfloat16"), pointer("bfloat16")),
                 {"n": 64, "a": 0.0, "flag": 0, "none": None, "KIND": "x", "BLOCK": 32}),
    "options": (kernel, (pointer(), pointer(), 64, 1.0, True, None, "x"), {"num_warps": 2, "num_stages": 1}),
    "float16": (kernel, (pointer("float16"), pointer("float16"), 64, 1.0, True, None, "x"), {}),
    "loose": (loose, (pointer(offset=4), 16, 32), {}),
    "loose odd": (loose, (pointer(), 17, 32), {}),
    "annotated": (annotated, (pointer(), 16, 2.0, 32), {}),
    "tuple": (tupled, (pointer(), (4, 16), 64), {}),
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS[:2], ids=str)
def test_entry_is_the_directory_that_warmup_writes(triton_cache, target):
    with stub(*target):
        for name, (function, args, kwargs) in LAUNCHES.items():
            before = set(os.listdir(triton_cache)) if triton_cache.exists() else set()
            found = compilation_of(function, args, kwargs)
            assert entry_present(found.entry, found.name) == (found.entry in before), name
            assert not triton_cache.exists() or set(os.listdir(triton_cache)) == before, "resolving wrote something"
            written = function.warmup(*args, grid=(1,), **kwargs)
            new = set(os.listdir(triton_cache)) - before
            assert new == {found.entry} - before, name
            assert entry_present(found.entry, found.name), name
            # asked again, with the kernel now in JITFunction's own cache, the answer is the same
            assert compilation_of(function, args, kwargs).entry == found.entry
            assert found.run().hash == written.hash


def test_every_launch_above_is_an_entry_of_its_own():
    with stub(*TARGETS[1]):
        entries = {name: compilation_of(*launch).entry for name, launch in LAUNCHES.items()}
    assert entries.pop("loose odd") == entries["loose"]  # n is not specialized
    assert entries.pop("negative") == entries["plain"]  # -16 is divisible by 16 as well; booleans are not specialized
    assert len(set(entries.values())) == len(entries)


def test_targets_do_not_mix_in_one_process():
    found = []
    for _ in range(2):
        for target in TARGETS:
            with stub(*target):
                found.append(compilation_of(*LAUNCHES["plain"]).entry)
    assert found[:4] == found[4:]
    assert len(set(found)) == 4


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[3]], ids=str)
def test_other_targets_compile_here(triton_cache, target):
    with stub(*target):
        found = compilation_of(*LAUNCHES["plain"])
        made = found.run()
    assert os.listdir(triton_cache) == [found.entry]
    assert made.metadata.target.backend == target[0]


def test_ghosts_and_mocks_and_tensors_agree():
    with stub(*TARGETS[1]):
        for offset in (0, 1, 4):
            real = torch.zeros(4100)[offset:] if offset else torch.zeros(4096)
            assert real.data_ptr() % 16 == (4 * offset) % 16
            rest = (4096, 1.5, True, None, "plain")
            with GhostMode():
                made = torch.empty(5000, device="cuda", dtype=torch.float32)[offset:]
            entries = {
                compilation_of(kernel, (x, pointer(), *rest), {}).entry
                for x in (real, made, ghost((4096,), "float32", (1,), offset), pointer(offset=4 * offset))
            }
            assert len(entries) == 1, offset


def test_heuristics_and_autotuners_in_any_order():
    configs = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, num_warps=8)]

    def kind(args):
        return "scaled" if args["n"] > 100 else "plain"

    below = triton.autotune(configs, key=["n"])(triton.heuristics({"KIND": kind})(kernel))
    above = triton.heuristics({"KIND": kind})(triton.autotune(configs, key=["n"])(kernel))
    args = (pointer(), pointer(), 4096, 1.5, True, None)
    with stub(*TARGETS[1]):
        wanted = [compilation_of(kernel, args, {"KIND": "scaled", **config.all_kwargs()}).entry for config in configs]
        for decorated in (below, above):
            steps = through_decorators(decorated, args, {}, lambda tuner, _args, _kwargs: tuner.configs)
            assert [compilation_of(function, args, kwargs).entry for function, kwargs, _ in steps] == wanted


def test_a_config_hook_runs_before_binding():
    def hook(nargs):
        nargs["box"].append(nargs["BLOCK"])

    box = []
    tuner = triton.autotune([triton.Config({"BLOCK": 32}, pre_hook=hook)], key=["n"])(kernel)
    list(through_decorators(tuner, (pointer(), pointer(), 16), {"box": box}, lambda *_: []))
    assert box == [32]


def test_an_environment_variable_of_the_key_changes_the_entry(monkeypatch):
    with stub(*TARGETS[1]):
        before = compilation_of(*LAUNCHES["plain"]).entry
        monkeypatch.setenv("NVPTX_ENABLE_DUMP", "0")
        assert compilation_of(*LAUNCHES["plain"]).entry != before


def test_this_is_the_release_that_was_asked_for():
    assert os.environ.get("TCACHE_TEST_TRITON") in (None, triton.__version__)
