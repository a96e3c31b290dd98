"""Bundles and stores under threads, forked and spawned processes, and GPUs of different names in one process."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime import driver

import tcache
from tcache import active as active_module
from tcache import prebaked as prebaked_module
from tcache.active import activate, active
from tcache.errors import CacheMiss
from tcache.keys import ShapeKey, find_gpu
from tcache.keys.config import config_key, space_identity
from tcache.keys.source import source_identity
from tcache.store import Entry, Kernel, Store, Timing

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project
import null_driver

pytestmark = pytest.mark.usefixtures("null_gpu")


def scale(module, n=4096):
    x = torch.zeros(64)
    module.scale[(1,)](x, x, n, BLOCK=64)


# threads, processes, GPUs


def test_threads_that_meet_a_packed_kernel_first_at_once_use_one(project, null_gpu, monkeypatch):
    """One module on the GPU: the other would be unloaded while what it was launched for still runs."""
    loads, barrier = [], threading.Barrier(4)
    monkeypatch.setattr(
        null_gpu.utils, "load_binary", lambda name, *_: (loads.append(name) or object(), name, 32, 0, 1024)
    )
    real = prebaked_module.compiled

    def together(*args):
        barrier.wait(30)
        return real(*args)

    monkeypatch.setattr(prebaked_module, "compiled", together)
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    found = []
    packed = prebaked_module.prebaked()
    inner = {"BLOCK": 32, "num_warps": 1, "num_stages": 3, "num_ctas": 1}
    function = module.tuned.fn

    def work():
        found.append(packed.launch(function, (torch.zeros(64), 16), inner, (1,))[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(kernel) for kernel in found}) == 1
    assert len(found) == 4
    assert set(loads) == {"tuned"}


def test_threads_that_ask_for_the_packed_kernels_first_share_them(project, null_gpu, monkeypatch):
    activate(bundles=[project / "bundle"])
    real = prebaked_module.Prebaked.__init__

    def slow(self, settings):
        time.sleep(0.1)
        real(self, settings)

    monkeypatch.setattr(prebaked_module.Prebaked, "__init__", slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(prebaked_module.prebaked())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(packed) for packed in found}) == 1


def test_a_thread_that_comes_while_the_index_is_read_waits_for_it(project, null_gpu, monkeypatch):
    """It does not take a table that is being filled for an empty one, and go Triton's way."""
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    packed = prebaked_module.prebaked()
    reading, real = threading.Event(), prebaked_module._by_name

    def slow(bundle):
        reading.set()
        time.sleep(0.3)
        return real(bundle)

    monkeypatch.setattr(prebaked_module, "_by_name", slow)
    inner = {"BLOCK": 32, "num_warps": 1, "num_stages": 3, "num_ctas": 1}
    found = []

    def work():
        found.append(packed.launch(module.tuned.fn, (torch.zeros(64), 16), inner, (1,)))

    first = threading.Thread(target=work)
    first.start()
    assert reading.wait(30)
    work()
    first.join()
    assert len(found) == 2
    assert None not in found


def test_a_memory_that_another_thread_empties(project, null_gpu, monkeypatch):
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    module.tuned[(1,)](torch.zeros(64), 16)
    packed = prebaked_module.prebaked()
    packed._globals.clear()
    inner = {"BLOCK": 32, "num_warps": 1, "num_stages": 3, "num_ctas": 1}
    assert packed.launch(module.tuned.fn, (torch.zeros(64), 16), inner, (1,)) is not None


def test_threads_that_launch_one_kernel_at_once(project, null_gpu):
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
from tcache import prebaked as prebaked_module
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


def test_managers_made_at_once_hook_triton_once(monkeypatch):
    """None returns before Triton asks tcache for helpers; and a second hook would have the first for its fallback."""
    from tcache import overlay
    from tcache._triton import cache

    hooked, seen = [], []
    start = threading.Barrier(8)
    monkeypatch.setattr(overlay, "_answering", False)
    monkeypatch.setattr(overlay, "_previous", None)
    monkeypatch.setattr(cache, "set_build_impl", lambda impl: (time.sleep(0.02), hooked.append(impl))[1])
    for name in ("see_reads", "spare_platform_search", "skip_driver_search"):
        monkeypatch.setattr(cache, name, lambda *_: None)

    def make():
        start.wait()
        overlay.OverlayCacheManager("a")
        seen.append(len(hooked))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 8
