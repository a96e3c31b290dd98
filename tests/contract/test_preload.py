"""Packed kernels on the GPU before the first launch: what is loaded, what is not and why."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import tcache
from tcache._triton.cache import compile_events
from tcache._triton.driver import stub
from tcache._triton.probe import compilation_of
from tcache.active import activate, active
from tcache.errors import GPUMissing, UnsupportedValue
from tcache.explain import facts_of
from tcache.replay.ghost import ghost
from tcache.standin import _TORCH, described_launch, stand_in, stand_ins

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project
import null_driver

pytestmark = pytest.mark.usefixtures("null_gpu")


def scale(module, n=4096):
    x = torch.zeros(64)
    module.scale[(1,)](x, x, n, BLOCK=64)


# preloading


def preloaded(gpu, monkeypatch):
    loads = []
    monkeypatch.setattr(
        gpu.utils, "load_binary", lambda name, *_: (loads.append(name) or object(), name, 32, 0, 1024), raising=False
    )
    return loads


def test_preloading_leaves_nothing_to_do_for_the_first_launch(project, null_gpu, monkeypatch):
    loads = preloaded(null_gpu, monkeypatch)
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    before = tcache.stats()["preloaded"]
    done = tcache.preload()
    assert done.failed == ()
    assert done.target == "cuda:90:32"
    assert sorted(row.kernel for row in done.loaded) == ["loadables:scale", "loadables:tuned", "loadables:wrapped"]
    assert {row.entry for row in done.loaded} == active().bundles[0].entries
    assert all(0 < row.ms <= done.seconds * 1e3 for row in done.loaded)
    assert sorted(loads) == ["scale", "tuned", "wrapped"]
    assert tcache.stats()["preloaded"] == before + 3
    events = []
    with compile_events(lambda name, _: events.append(name)):
        scale(module)
        module.increment(torch.zeros(64, dtype=torch.bfloat16))
        module.tuned[(1,)](torch.zeros(64), 16)
    assert events == []
    assert len(loads) == 3
    assert len(null_gpu.launches) == 3


@pytest.mark.parametrize("hook", ["pre_hook=seen", "pre_hook=seen if block == 32 else None"])
def test_a_kernel_whose_configs_have_hooks_is_preloaded_to_where_they_launch(tmp_path, null_gpu, monkeypatch, hook):
    """A config's own hook may change what is launched: the index does not answer then, Triton's memory does."""
    text = bundle_project.KERNELS.replace("CONFIGS =", "def seen(given):\n    given['x_ptr'].zero_()\n\n\nCONFIGS =")
    text = text.replace("num_warps=1)", f"num_warps=1, {hook})")
    project = bundle_project.make(tmp_path, text)
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    assert tcache.preload("*:tuned").failed == ()
    events, x = [], torch.ones(64)
    with compile_events(lambda name, _: events.append(name)):
        module.tuned[(1,)](x, 16)
    assert events == []
    assert not x.any()
    assert [name for name, _ in null_gpu.launches] == ["tuned"]


BARE = """\
import triton
import triton.language as tl

import tcache

CONFIGS = [triton.Config({"BLOCK": 16}, num_warps=1)]


@triton.jit
def bare(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


tuned = tcache.autotune(configs=CONFIGS, key=["n"])(bare)
"""
BARE_MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - {kernel: "loadables.py:tuned", args: {x_ptr: {shape: [16], dtype: float32}, n: 16}, grid: [1], cases: [{}]}
"""


@pytest.mark.parametrize("place", ["below another name", "in another module", "launched bare as well"])
def test_a_kernel_is_preloaded_to_wherever_it_is_launched_from(tmp_path, null_gpu, monkeypatch, place):
    path = tmp_path / "loadables.py"
    path.write_text(BARE)
    (tmp_path / "m.yaml").write_text(BARE_MANIFEST)
    bundle_project.run(tmp_path, "pack", "m.yaml", "--warmup", "-o", "bundle")
    if place == "in another module":
        path.write_text(BARE.replace("tuned = ", "lambda: "))
    loads = preloaded(null_gpu, monkeypatch)
    activate(bundles=[tmp_path / "bundle"])
    module = bundle_project.load(tmp_path)
    other = types.ModuleType("another_module")
    if place == "in another module":
        other.kernel = tcache.autotune(configs=module.CONFIGS, key=["n"])(module.bare)
    monkeypatch.setitem(sys.modules, "another_module", other)
    kernel = other.kernel if place == "in another module" else module.tuned
    assert tcache.preload("*:bare").failed == ()
    events, done = [], len(loads)
    with compile_events(lambda name, _: events.append(name)):
        kernel[(1,)](torch.zeros(64), 16)
        if place == "launched bare as well":
            module.bare[(1,)](torch.zeros(64), 16, **module.CONFIGS[0].all_kwargs())
    assert (events, len(loads)) == ([], done)


def test_kernels_of_the_running_script_are_not_imported_once_more(project, null_gpu, monkeypatch):
    """A script is ``__main__``; under its own name it would run again, and launch none of what was loaded there."""
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    module.__name__, module.__spec__ = "__main__", None
    del sys.modules["loadables"]
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.syspath_prepend(str(project))
    assert tcache.preload().failed == ()
    assert "loadables" not in sys.modules
    events = []
    with compile_events(lambda name, _: events.append(name)):
        scale(module)
        module.tuned[(1,)](torch.zeros(64), 16)
    assert events == []


@pytest.mark.parametrize("launch", [3, [], {"args": []}, {"args": 3, "kwargs": []}, {"args": [], "kwargs": [3]},
    {"args": [{"tensor": 3}], "kwargs": []}, {"args": [{"function": "loadables:nothing"}], "kwargs": []},
    {"args": [], "kwargs": [["x", {"named": "os:system", "items": []}]]}])  # fmt: skip
def test_an_index_that_describes_no_launch(project, launch):
    def change(index):
        for row in index["entries"].values():
            row["launch"] = launch

    bundle_project.edit(project / "bundle" / "index.json", change)
    bundle_project.sign(project / "bundle")
    activate(bundles=[project / "bundle"])
    bundle_project.load(project)
    done = tcache.preload("*:scale")
    assert done.loaded == ()
    assert [row.kernel for row in done.failed] == ["loadables:scale"]


def test_preloading_imports_nothing_but_the_kernels(project, monkeypatch):
    """A module that loads when it is asked for anything stays as it is."""
    (project / "unasked.py").write_text("raise AssertionError('imported')\n")
    spec = importlib.util.spec_from_file_location("unasked", project / "unasked.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "unasked", lazy)
    spec.loader.exec_module(lazy)
    activate(bundles=[project / "bundle"])
    bundle_project.load(project)
    assert tcache.preload().failed == ()
    assert tcache.adopt("loadables:tuned") == ["loadables:tuned"]


def test_preloading_by_pattern(project, null_gpu, monkeypatch):
    loads = preloaded(null_gpu, monkeypatch)
    activate(bundles=[project / "bundle"])
    bundle_project.load(project)
    assert [row.kernel for row in tcache.preload("*:sc*").loaded] == ["loadables:scale"]
    assert [row.kernel for row in tcache.preload(["nothing", "loadables:tuned"]).loaded] == ["loadables:tuned"]
    assert loads == ["scale", "tuned"]


def test_what_cannot_be_preloaded_says_why(project, null_gpu, triton_cache):
    activate(bundles=[project / "bundle"], mode="lookup")
    assert "No module named 'loadables'" in tcache.preload().failed[0].reason
    path = project / "loadables.py"
    path.write_text(path.read_text().replace("x * 2", "x * 3").replace("def wrapped", "def renamed"))
    path.write_text(path.read_text().replace("wrapped[(1,)]", "renamed[(1,)]"))
    bundle_project.load(project)
    done = tcache.preload()
    assert {row.kernel: row.reason for row in done.failed} == {
        "loadables:scale": "loadables:scale is not prebaked for this launch (mode frozen)",
        "loadables:wrapped": "loadables has no kernel 'wrapped'",
    }
    assert [row.kernel for row in done.loaded] == ["loadables:tuned"]
    assert not triton_cache.exists()  # nothing was compiled, whatever the mode


def test_preloading_is_for_the_current_target(project, null_gpu):
    activate(bundles=[project / "bundle"])
    null_gpu.target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    done = tcache.preload()
    assert (done.target, done.loaded, done.failed) == ("cuda:80:32", (), ())


def test_preloading_without_a_gpu(project):
    class NoDriver(null_driver.NullDriver):
        def get_current_target(self):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    driver.set_active(NoDriver())
    activate(bundles=[project / "bundle"])
    with pytest.raises(GPUMissing, match="nothing can be preloaded: 0 active drivers"):
        tcache.preload()


@triton.jit
def any_argument(x):
    tl.device_print("x", 0)


def again(value):
    """What Triton makes of a value, and of the stand-in for that."""
    found = compilation_of(any_argument, (), {"x": value}).specialization()
    made = stand_in(found["signature"]["x"], "x", found)
    return found, compilation_of(any_argument, (), {"x": made}).specialization()


@pytest.mark.parametrize("divisible", [True, False])
@pytest.mark.parametrize("kind", [*(f"*{kind}" for kind in _TORCH if kind != "i1"), "i32", "i64", "u64", "u1", "fp32"])
def test_a_stand_in_is_specialized_to_its_type(kind, divisible):
    attributes = {"x": ["tt.divisibility=16"]} if divisible else {}
    made = stand_in(kind, "x", {"constants": {}, "attributes": attributes})
    found = compilation_of(any_argument, (), {"x": made}).specialization()
    assert found["signature"]["x"].replace("*u1", "*i1") in (kind.replace("*u1", "*i1"), kind.replace("u1", "i1"))
    if kind[0] in "*iu" and kind != "u1":
        assert found["attributes"] == attributes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block", [[64], [32, 64], [2, 16, 128], [1, 1, 8, 2, 64]], ids=str)
def test_a_descriptor_is_specialized_to_its_block(dtype, block):
    base = torch.empty([2 * size for size in block], dtype=dtype)
    found, made = again(TensorDescriptor.from_tensor(base, block))
    assert made == found
    assert found["signature"]["x"].startswith("tensordesc<")


def test_a_tuple_is_specialized_as_its_members_are():
    x = torch.empty(8, dtype=torch.float16)
    for value in ((x, x[1:], 1, 16, 3, 1 << 40, True, 2.5), ((x, (7, 1)), 5), (1,), ()):
        found, made = again(value)
        assert made == found


@pytest.mark.parametrize("size", [2**20, 2**30])
def test_amd_launches_are_described_with_what_amds_backend_asks(size):
    """Whether a tensor's storage is within 2 GiB is part of the specialization there."""
    with stub("hip", "gfx942", 64):
        x = ghost((size,), "float32", (1,), 0)
        found = compilation_of(any_argument, (x,), {})
        facts = {**facts_of(found), "launch": json.loads(json.dumps(described_launch(any_argument, (x,), {}, None)))}
        args, kwargs = stand_ins(any_argument, facts)
        assert compilation_of(any_argument, args, kwargs).entry == found.entry
    assert ("tt.pointer_range=32" in facts["attributes"]["x"]) == (size < 2**29)


class Pair(NamedTuple):
    left: int
    right: int


def test_a_named_tuple_has_no_stand_in():
    with pytest.raises(UnsupportedValue, match="has no stand-in"):
        again(Pair(2, 3))


@pytest.mark.parametrize("kind", ["tensordesc<fp16[64, 64],layout>", "tensordesc<fp8e4b15[64]>", "('i32'", "*fp8e4b15"])
def test_what_has_no_stand_in(kind):
    with pytest.raises(UnsupportedValue, match="has no stand-in"):
        stand_in(kind, "x", {"constants": {}, "attributes": {}})
