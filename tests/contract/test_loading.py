"""Bundles in use: found, skipped, shared by threads, processes and GPUs, preloaded, gone while a service runs."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

import tcache
from tcache import active as active_module
from tcache._triton.cache import compile_events, set_cache_directory
from tcache._triton.probe import compilation_of
from tcache.active import activate, active
from tcache.errors import CacheMiss, GPUMissing, UnsupportedValue
from tcache.keys import ShapeKey, find_gpu
from tcache.keys.config import config_key, space_identity
from tcache.keys.source import source_identity
from tcache.preloading import _TORCH, stand_in
from tcache.store import Entry, Kernel, Store, Timing

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project
import null_driver


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return bundle_project.make(tmp_path_factory.mktemp("project"))


@pytest.fixture
def project(packed, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(packed, root, ignore=shutil.ignore_patterns("cache", "__pycache__"))
    return root


@pytest.fixture(autouse=True)
def gpu(monkeypatch, triton_cache):
    monkeypatch.setenv("TCACHE_GPU_NAME", "NVIDIA H200")
    before = driver._active
    yield null_driver.activate()
    sys.modules.pop(bundle_project.NAME, None)
    gc.collect()
    driver._active = before


def scale(module, n=4096):
    x = torch.zeros(64)
    module.scale[(1,)](x, x, n, BLOCK=64)


# what is found, and what is said about it


def install(site, name, value, place=None):
    """Lay out a package with a bundle as pip would."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tcache.bundles]\n{name} = {value}\n")
    package = site / name
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    if place is not None:
        shutil.copytree(place, package, dirs_exist_ok=True)


@pytest.fixture
def site(project, tmp_path, monkeypatch):
    site = tmp_path / "site"
    install(site, "first_kernels", "first_kernels", project / "bundle")
    install(site, "second_kernels", "second_kernels")
    shutil.copytree(project / "bundle", site / "second_kernels" / "h200")
    install(site, "third_kernels", "third_kernels")
    install(site, "fourth_kernels", "no_such_package")
    monkeypatch.syspath_prepend(str(site))
    return site


def test_installed_bundles_are_found_without_importing_their_packages(site, caplog):
    caplog.set_level(logging.INFO, "tcache")
    found = activate()
    assert [bundle.root for bundle in found.bundles] == [site / "first_kernels", site / "second_kernels" / "h200"]
    assert [(row.path, row.kind) for row in found.skipped] == [
        ("no_such_package", "bundle"),
        ("third_kernels", "bundle"),
    ]
    assert found.mode == "frozen"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("tcache: mode frozen, 2 bundles (bundle, bundle), 6 entries; skipped no_such_package: ")


def test_installed_bundles_alone_do_not_freeze_a_process(site, project, monkeypatch):
    assert active().mode == "tune"
    assert len(active().bundles) == 2
    monkeypatch.setattr(active_module, "_active", None)
    monkeypatch.setenv("TCACHE_BUNDLES", str(project / "bundle"))
    assert active().mode == "frozen"
    assert active().bundles[0].root == project / "bundle"
    assert len(active().bundles) == 3


def test_installed_bundles_can_be_left_alone(site, monkeypatch):
    monkeypatch.setenv("TCACHE_INSTALLED_BUNDLES", "0")
    assert activate().bundles == ()
    monkeypatch.delenv("TCACHE_INSTALLED_BUNDLES")
    assert activate(bundles=[]).bundles == ()


def test_a_bundle_named_twice_is_used_once(project):
    (project / "link").symlink_to("bundle")
    assert len(activate(bundles=[project / "bundle", str(project / "link"), project / "bundle"]).bundles) == 1


def test_many_bundles_some_for_other_machines(project, caplog):
    caplog.set_level(logging.INFO, "tcache")
    other = project / "other"
    shutil.copytree(project / "bundle", other)
    bundle_project.edit(other / "bundle.json", lambda data: data["environment"].update(triton="9.9.9"))
    newer = project / "newer"
    shutil.copytree(project / "bundle", newer)
    bundle_project.edit(newer / "bundle.json", lambda data: data.update(schema=2))
    activate(bundles=[other, newer, project / "absent", project / "bundle"])
    scale(bundle_project.load(project))
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert "1 bundles (bundle), 3 entries; " in line
    assert f"skipped {other}: packed for Triton 9.9.9, this process has {triton.__version__}" in line
    assert "bundle schema 2, expected 1" in line
    assert "absent: not a bundle" in line
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_relative_path_outlives_a_change_of_directory_and_a_turned_link(project, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    (project / "current").symlink_to("bundle")
    activate(bundles=["current"])
    (project / "current").unlink()
    (project / "current").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path)
    module = bundle_project.load(project)
    scale(module)
    module.tuned[(1,)](torch.zeros(64), 16)


def test_a_bundle_that_disappears_while_loaded(project):
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    scale(module)
    shutil.rmtree(project / "bundle")
    scale(module)  # what is loaded stays loaded
    with pytest.raises(CacheMiss) as caught:
        module.increment(torch.zeros(64, dtype=torch.bfloat16))
    assert caught.value.reasons == ("damaged",)
    assert "No such file or directory" in str(caught.value)


def test_a_file_that_changes_after_it_was_checked_is_looked_at_again(project):
    bundle = activate(bundles=[project / "bundle"]).bundles[0]
    path = next((project / "bundle" / "entries").glob("*/scale.cubin"))
    key = path.parent.name
    assert isinstance(bundle.entry_files(key), dict)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"x")
    assert "digest differs" in bundle.entry_files(key).reason
    path.write_bytes(data)
    assert isinstance(bundle.entry_files(key), dict)


@pytest.mark.parametrize("place", ["helper", "folder", "head"])
def test_a_helper_that_others_may_change_is_not_loaded(project, place):
    bundle = activate(bundles=[project / "bundle"]).bundles[0]
    [helper, *_] = bundle.helpers
    assert isinstance(bundle.helper(source=helper.source), Path)
    path = bundle.place / helper.path
    path = {"helper": path, "folder": path.parent, "head": bundle.place / "bundle.json"}[place]
    path.chmod(0o777)
    assert "writable by everyone" in bundle.helper(source=helper.source).reason


def test_a_helper_for_a_newer_glibc_says_so(project, monkeypatch):
    bundle = activate(bundles=[project / "bundle"]).bundles[0]
    monkeypatch.setattr("tcache.bundle.libc", lambda: "glibc 2.1")
    found = bundle.helper(source=bundle.helpers[0].source)
    assert found.kind == "libc"
    assert "needs glibc 2." in found.reason
    assert found.reason.endswith("this process has 2.1")


# layers


def test_a_writable_layer_above_the_bundle(project, triton_cache):
    activate(bundles=[project / "bundle"], mode="lookup")
    module = bundle_project.load(project)
    before = tcache.stats()
    seen = []
    with compile_events(lambda _, hit: seen.append(hit)):
        scale(module)
        scale(module, n=4097)
        module.scale.device_caches.clear()
        scale(module, n=4097)
    assert seen == [True, False, True]
    after = tcache.stats()
    assert (after["entries"] - before["entries"], after["compiled"] - before["compiled"]) == (1, 2)
    assert len(list(triton_cache.iterdir())) == 1


def test_kernels_of_torch_compile_hit_wherever_it_moves_the_cache(project, tmp_path, monkeypatch, triton_cache):
    """Inductor compiles through ``triton.compile`` under a cache directory of its own; here with its own autotuner."""
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    hints = pytest.importorskip("torch._inductor.runtime.hints")
    monkeypatch.setattr(heuristics.triton_helpers, "set_driver_to_gpu", lambda: None)
    kernel = bundle_project.load(project).wrapped
    device = hints.DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip

    def precompile(block):
        meta = {
            "signature": {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}, "device": device, "constants": {},
            "configs": [{(0,): [["tt.divisibility", 16]]}],
        }  # fmt: skip
        config = triton.Config({"BLOCK": block}, num_warps=1, num_stages=1)
        kind = heuristics.HeuristicType.POINTWISE
        tuner = heuristics.CachingAutotuner(kernel, meta, [config], None, [], optimize_mem=True, heuristic_type=kind)
        return tuner._precompile_config(config)

    activate(bundles=[], mode="tune")
    set_cache_directory(str(triton_cache))
    precompile(64)
    [entry] = [path for path in triton_cache.iterdir() if path.is_dir()]
    target = project / "bundle" / "entries" / entry.name
    target.mkdir()
    for file in entry.iterdir():
        if file.suffix == ".cubin" or (file.suffix == ".json" and not file.name.startswith("__grp__")):
            shutil.copy(file, target)
    bundle_project.sign(project / "bundle")
    activate(bundles=[project / "bundle"])
    elsewhere = tmp_path / "inductor"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(elsewhere))
    seen = []
    with compile_events(lambda _, hit: seen.append(hit)):
        precompile(64)
    assert seen == [True]
    with pytest.raises(CacheMiss) as caught:
        precompile(32)
    assert "constexpr" in caught.value.reasons
    assert "`tcache record` writes what a running program launches" in str(caught.value)
    assert not elsewhere.exists()


# threads, processes, GPUs


def test_threads_that_launch_one_kernel_at_once(project, gpu):
    """Each thread's launch sees its own arguments, although upstream keeps them on the autotuner."""
    seen, wrong = [], []

    def hook(arguments):
        time.sleep(0.002)
        seen.append(arguments["n"])
        if arguments["n"] != arguments["x_ptr"].numel():
            wrong.append(arguments)

    activate(bundles=[project / "bundle"], mode="lookup", store=project / "store")
    module = bundle_project.load(project)
    configs = [triton.Config({"BLOCK": block}, num_warps=1, pre_hook=hook) for block in (16, 32)]
    kernel = tcache.autotune(configs, key=["n"], on_untuned="default")(module.tuned.fn)
    barrier, failed = threading.Barrier(8), []

    def work(number):
        try:
            barrier.wait()
            for step in range(6):
                n = 16 * (1 + number + 8 * (step % 2))
                kernel[(1,)](torch.zeros(n), n)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert wrong == []
    assert len(seen) == 48
    assert set(kernel.__dict__["_nargs_by_thread"]) <= {threading.get_ident()}


def test_activation_by_many_threads_at_once_happens_once(project, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tcache")
    monkeypatch.setenv("TCACHE_BUNDLES", str(project / "bundle"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(active())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(row) for row in found}) == 1
    assert len(caplog.records) == 1


def test_a_forked_child_goes_on_although_a_thread_held_the_locks(project):
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    before = tcache.stats()["entries"]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child():
        scale(module)
        module.increment(torch.zeros(64, dtype=torch.bfloat16))
        again = activate(bundles=[project / "bundle"])
        there.send((tcache.stats()["entries"] - before, again.mode))

    process = context.Process(target=child)
    from tcache import counters

    with active_module._lock, counters._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: threads are alive at fork
        process.start()
    assert here.poll(60)
    assert here.recv() == (2, "frozen")
    process.join()
    assert tcache.stats()["entries"] == before


SPAWN = """
import json, multiprocessing, sys
import tcache
from tcache._triton.driver import stub
if sys.argv[1:] == ["code"]:
    tcache.activate(bundles=["bundle"])

def work(queue):
    from tcache._triton.mock import MockTensor
    import loadables
    with stub("cuda", 90, 32):
        x = MockTensor("float32", (4096,), (1,))
        loadables.scale.warmup(x, x, 4096, grid=(1,), BLOCK=64)
        try:
            loadables.scale.warmup(x, x, 4097, grid=(1,), BLOCK=64)
        except tcache.CacheMiss as miss:
            queue.put([tcache.stats()["entries"], list(miss.reasons)])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(json.dumps(queue.get(timeout=120)))
    process.join()
"""


@pytest.mark.parametrize("how", ["code", "environment"])
def test_a_spawned_child_activates_as_its_parent_did(project, how):
    (project / "main.py").write_text(SPAWN)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    if how == "environment":
        environment |= {
            "TCACHE_BUNDLES": "bundle",
            "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager",
        }
    done = subprocess.run(
        [sys.executable, "main.py", how], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1, ["divisibility"]]


class TwoGPUs(null_driver.NullDriver):
    """Two GPUs of one target and different names; the current one is each thread's own, as in CUDA."""

    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")

    def __init__(self):
        super().__init__()
        self.current = threading.local()
        self.seen = []

    def get_current_device(self):
        return 100 + getattr(self.current, "number", 0)

    def launcher_cls(self, source, metadata):
        return lambda *_: self.seen.append((self.get_current_device() - 100, source.constants[(2,)]))


@pytest.fixture
def two(monkeypatch, project):
    monkeypatch.delenv("TCACHE_GPU_NAME")
    gpus = TwoGPUs()
    driver.set_active(gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: gpus.names[gpus.get_current_device() - 100])
    module = bundle_project.load(project)
    configs = [config_key(config) for config in module.CONFIGS]
    source, shape = source_identity(module.tuned.fn), ShapeKey((("n", 16),), (("x_ptr", "float32"),))
    for name, winner in zip(gpus.names, configs, strict=True):
        timings = {key: Timing(1.0 if key == winner else 2.0, 0.9, 2.1, 10) for key in configs}
        entry = Entry(
            shape, winner, timings, source, space_identity(configs), triton.__version__, "2026-01-01T00:00:00Z"
        )
        kernel = Kernel(bundle_project.NAME, "tuned", ("n",))
        Store(project / "both").update(find_gpu(name), kernel, shape, lambda _, entry=entry: entry)
    activate(bundles=[project / "bundle"], store=project / "both", mode="lookup")
    yield gpus, module
    module.tuned.fn.device_caches.clear()


def test_two_gpus_of_different_names_use_each_its_own_winner(two):
    gpus, module = two
    for number in (0, 1, 0, 1):
        gpus.current.number = number
        module.tuned[(1,)](torch.zeros(64), 16)
    assert gpus.seen == [(0, 16), (1, 32), (0, 16), (1, 32)]


def test_two_gpus_driven_by_two_threads(two):
    gpus, module = two

    def work(number):
        gpus.current.number = number
        for _ in range(20):
            module.tuned[(1,)](torch.zeros(64), 16)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(gpus.seen) == {(0, 16), (1, 32)}
    assert len(gpus.seen) == 40


def test_a_miss_names_the_gpu_that_is_current(two):
    gpus, module = two
    activate(bundles=[], mode="frozen", store=None)
    gpus.current.number = 1
    with pytest.raises(CacheMiss, match="GPU: NVIDIA H100 80GB HBM3"):
        module.tuned[(1,)](torch.zeros(64), 17)


# preloading


def preloaded(gpu, monkeypatch):
    loads = []
    monkeypatch.setattr(
        gpu.utils, "load_binary", lambda name, *_: (loads.append(name) or object(), name, 32, 0, 1024), raising=False
    )
    return loads


def test_preloading_leaves_nothing_to_do_for_the_first_launch(project, gpu, monkeypatch):
    loads = preloaded(gpu, monkeypatch)
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
    assert len(gpu.launches) == 3


def test_preloading_by_pattern(project, gpu, monkeypatch):
    loads = preloaded(gpu, monkeypatch)
    activate(bundles=[project / "bundle"])
    bundle_project.load(project)
    assert [row.kernel for row in tcache.preload("*:sc*").loaded] == ["loadables:scale"]
    assert [row.kernel for row in tcache.preload(["nothing", "loadables:tuned"]).loaded] == ["loadables:tuned"]
    assert loads == ["scale", "tuned"]


def test_what_cannot_be_preloaded_says_why(project, gpu, triton_cache):
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


def test_preloading_is_for_the_current_target(project, gpu):
    activate(bundles=[project / "bundle"])
    gpu.target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
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


@pytest.mark.parametrize("divisible", [True, False])
@pytest.mark.parametrize("kind", [*(f"*{kind}" for kind in _TORCH if kind != "i1"), "i32", "i64", "u64", "u1", "fp32"])
def test_a_stand_in_is_specialized_to_its_type(kind, divisible):
    found = compilation_of(any_argument, (), {"x": stand_in(kind, None, divisible=divisible)}).specialization()
    assert found["signature"]["x"].replace("*u1", "*i1") in (kind.replace("*u1", "*i1"), kind.replace("u1", "i1"))
    if kind[0] in "*iu" and kind != "u1":
        assert (found["attributes"] == {"x": ["tt.divisibility=16"]}) is divisible


@pytest.mark.parametrize("kind", ["tensordesc<fp16[64, 64]>", "('i32', '*fp32')", "*fp8e4b15"])
def test_what_has_no_stand_in(kind):
    with pytest.raises(UnsupportedValue, match="has no stand-in"):
        stand_in(kind, None, divisible=True)


# what verify compares


def test_verify_compares_the_index_with_what_it_replayed(project):
    manifest = bundle_project.MANIFEST.replace("cases: [{n: 64}]", "cases: [{n: [128, 64]}]").replace(
        "    cases: [{n: 4096}]\n", "    cases: [{n: 8192}]\n"
    )
    (project / "other.yaml").write_text(manifest)
    found = json.loads(bundle_project.run(project, "verify", "bundle", "other.yaml", "--json").stdout)
    assert found["proven"]
    assert found["unreplayed"] == found["unindexed"] == []  # other shapes, the same launches
    lines = (project / "other.yaml").read_text().split("  - call:")
    (project / "less.yaml").write_text(lines[0])
    done = bundle_project.run(project, "verify", "bundle", "less.yaml", "--json")
    found = json.loads(done.stdout)
    assert sorted(row["ref"] for row in found["unreplayed"]) == ["loadables.py:increment", "loadables.py:tuned"]
    assert found["unreplayed"][0].keys() == {"gpu", "ref", "shape", "entry"}
    assert "2 launches on NVIDIA H200 are in the index and not replayed, the first: loadables.py:" in found["notes"][0]


def test_verify_says_what_the_index_does_not_know(project):
    def drop(data):
        data["launches"] = [row for row in data["launches"] if not row["ref"].endswith(":scale")]

    bundle_project.edit(project / "bundle" / "index.json", drop)
    bundle_project.sign(project / "bundle")
    found = json.loads(bundle_project.run(project, "verify", "bundle", "--json").stdout)
    assert [row["ref"] for row in found["unindexed"]] == ["loadables.py:scale"]
    assert "replayed and not in the index" in found["notes"][0]
