"""Warming up: the pool of workers, what does not stop it, what it leaves, and tuning before it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from tcache.compile import Pool, compile_all
from tcache.keys.gpu import catalogue
from tcache.manifest import load_manifest
from tcache.replay import leave, machine
from tcache.resolve import resolve

GPUS = [
    "NVIDIA A100-SXM4-80GB", "NVIDIA A10", "NVIDIA L4", "NVIDIA H200", "NVIDIA B200", "NVIDIA GeForce RTX 5090",
    "AMD Instinct MI300X", "AMD Instinct MI350X",
]  # fmt: skip
KERNEL = """\
import triton
import triton.language as tl

import tcache

@triton.jit
def fill(x, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + o, o.to(x.dtype.element_ty), mask=o < n)

@triton.jit
def refused(x, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 8, "too wide")

@tcache.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + o, o.to(x.dtype.element_ty), mask=o < n)

def wrong(x, size):
    raise RuntimeError("only sizes that are even")
"""


def item(ref, cases, **more):
    """One kernel of the manifest; the autotuned one states no block."""
    block = {} if ref == "tuned" else {"BLOCK": 64}
    args = {"x": {"shape": ["n"], "dtype": "float32"}, "n": "n", **block}
    return {"kernel": f"k.py:{ref}", "args": args, "grid": [1], "cases": [{"n": n} for n in cases], **more}


@pytest.fixture
def project(tmp_path):
    (tmp_path / "k.py").write_text(KERNEL)

    def manifest(*items, gpus=("NVIDIA H200",), name="m.yaml"):
        (tmp_path / name).write_text(json.dumps({"version": 1, "gpus": list(gpus), "kernels": list(items)}))
        return tmp_path

    return manifest


def left_in(cache):
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


# the pool


@dataclass
class Work:
    """What :func:`compile_all` is given, as far as the pool looks: the compiler has no part in how work is spread."""

    do: object
    weight: float = 1.0

    def build(self):
        self.do()

    def effort(self):
        return self.weight


def test_results_are_in_order_and_the_longest_begins(tmp_path):
    log = tmp_path / "log"

    def write(name):
        with log.open("a") as file:
            file.write(f"{name} ")

    seen = []
    todo = [Work(lambda name=name: write(name), weight) for name, weight in (("a", 1), ("b", 3), ("c", 2), ("d", 3))]
    results = compile_all(todo, 1, seen.append)
    assert log.read_text().split() == ["b", "d", "c", "a"]
    assert [row.number for row in results] == [0, 1, 2, 3]
    assert [row.number for row in seen] == [1, 3, 2, 0]
    assert {row.error for row in results} == {None}
    assert len({row.worker for row in results}) == 1
    assert all(row.peak > 10 << 20 for row in results)
    assert compile_all([], 4) == []


def test_every_job_has_a_worker_and_none_waits_while_there_is_work():
    todo = [Work(lambda: time.sleep(1.0), 9), *[Work(lambda: time.sleep(0.1)) for _ in range(8)]]
    begin = time.monotonic()
    results = compile_all(todo, 2)
    assert time.monotonic() - begin < 1.7, "one sleeps 1 s, the other takes all the short ones"
    by_worker = {row.worker: [other.number for other in results if other.worker == row.worker] for row in results}
    assert sorted(map(len, by_worker.values())) == [1, 8]


def test_a_worker_that_has_grown_is_replaced():
    kept = []
    todo = [Work(lambda: kept.append(bytearray(os.urandom(1 << 20) * 60))) for _ in range(6)]
    bounded = compile_all(todo, 1, growth=100 << 20)
    assert len({row.worker for row in bounded}) == 3, "two of 60 MB are more than 100 MB"
    free = compile_all(todo, 1)
    assert len({row.worker for row in free}) == 1
    assert max(row.peak for row in free) - max(row.peak for row in bounded) > 200 << 20
    assert kept == []


def test_work_is_done_while_more_is_added(tmp_path):
    def write(name):
        (tmp_path / name).touch()

    with Pool(1) as pool:
        pool.add(Work(lambda: write("early")))
        pool.look()
        end = time.monotonic() + 10
        while not (tmp_path / "early").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert (tmp_path / "early").exists(), "before anybody waits for it"
        for name, weight in (("late", 1), ("later", 2)):
            pool.add(Work(lambda name=name: write(name), weight))
        assert pool.count == 3
        results = pool.finish()
    assert [row.number for row in results] == [0, 1, 2]
    assert {row.error for row in results} == {None}
    assert (tmp_path / "late").exists()
    assert (tmp_path / "later").exists()
    assert results[0].worker != results[1].worker, "the first worker was forked before the others were known"
    assert results[1].worker == results[2].worker


def test_workers_are_prepared_and_end_with_the_block(tmp_path):
    prepared = []

    def check():
        assert prepared == [1]

    with Pool(2, prepare=lambda: prepared.append(1)) as pool:
        for _ in range(4):
            pool.add(Work(check))
            pool.look()
        assert {row.error for row in pool.finish()} == {None}
    assert prepared == []

    def begin_and_fail():
        with Pool(2) as pool:
            pool.add(Work(lambda: time.sleep(60)))
            pool.look()
            assert len(multiprocessing.active_children()) == 1
            raise RuntimeError("resolving failed")

    with pytest.raises(RuntimeError, match="resolving failed"):
        begin_and_fail()
    assert multiprocessing.active_children() == []


def test_workers_leave_the_machine_that_is_replayed_on():
    import torch

    available = torch.cuda.is_available()

    def check():
        assert torch.overrides._get_current_function_mode_stack() == []
        assert torch.cuda.is_available() == available
        assert torch.empty(2, device="meta").device.type == "meta"
        assert driver._active is before

    from triton.runtime import driver

    before = driver._active
    with machine(catalogue()["NVIDIA H200"]), machine(catalogue()["AMD Instinct MI300X"]):
        assert torch.empty(2, device="cuda").is_cuda
        with Pool(1, prepare=leave) as pool:
            pool.add(Work(check))
            assert [row.error for row in pool.finish()] == [None]
        assert torch.empty(2, device="cuda").is_cuda
        assert torch.cuda.get_device_name() == "AMD Instinct MI300X"


def test_what_dies_hangs_or_raises_stops_nothing_else():
    def fail():
        raise ValueError("at 3:4\nthe reason")

    todo = [Work(lambda: os.kill(os.getpid(), signal.SIGKILL)), Work(lambda: time.sleep(60)), Work(fail),
            Work(lambda: os._exit(7)), *[Work(lambda: None) for _ in range(5)]]  # fmt: skip
    results = compile_all(todo, 2, timeout=1.5)
    assert [row.error for row in results[:4]] == [
        "the compiler ended the process (signal SIGKILL)",
        "the compiler hung for 2 s",
        "ValueError: the reason",
        "the compiler ended the process (exit code 7)",
    ]
    assert {row.error for row in results[4:]} == {None}


def alive_within(seconds, count):
    """Whether so many workers are left after a while: one that is let go ends by itself."""
    end = time.monotonic() + seconds
    while len(multiprocessing.active_children()) != count and time.monotonic() < end:
        time.sleep(0.02)
    return len(multiprocessing.active_children()) == count


def test_an_interrupt_ends_every_worker():
    def stop(_):
        assert alive_within(5, 1), "the other sleeps"
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_all([Work(lambda: None), Work(lambda: time.sleep(60))], 2, stop)
    assert multiprocessing.active_children() == []
    assert time.monotonic() - begin < 30


ORPHANS = r"""
import os, time
from tcache.compile import compile_all
class Work:
    def build(self):
        os.write(1, b"%d\n" % os.getpid())  # in one piece
        time.sleep(1)
    def effort(self):
        return 1
compile_all([Work() for _ in range(50)], 3)
"""


def test_workers_of_a_killed_parent_end():
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(3)]
    parent.kill()
    parent.wait()
    end = time.monotonic() + 15
    while time.monotonic() < end and any(running(pid) for pid in pids):
        time.sleep(0.1)
    parent.stdout.close()
    assert not [pid for pid in pids if running(pid)]


def running(pid):
    """Whether a process lives; a dead one may stay a zombie where nobody reaps orphans."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# the command


def test_launches_of_one_entry_share_a_compilation_and_larger_tiles_begin(project):
    root = project(item("fill", [64, 128]), item("tuned", [64]))
    cases = load_manifest(root / "m.yaml").cases()
    [one, same, small, large], missing = resolve(cases, catalogue()["NVIDIA H200"], (), "all")
    assert missing == []
    assert one.compilation is same.compilation
    assert (small.config.partition(" ")[0], large.config.partition(" ")[0]) == ("BLOCK=64", "BLOCK=128")
    assert 0 < small.compilation.effort() < large.compilation.effort()


def test_what_cannot_be_replayed_or_compiled_stops_nothing_else(project, tcache):
    wrong = {"call": "k.py:wrong", "args": {"x": {"shape": ["n"], "dtype": "float32"}, "size": "n"}}
    root = project(
        item("fill", [64]), {**wrong, "cases": [{"n": [1, 2]}]}, item("absent", [64]), item("refused", [64]),
        item("fill", [63]),
    )  # fmt: skip
    done = tcache("warmup", "m.yaml", "--json", cwd=root, check=1)
    found = json.loads(done.stdout)
    assert (found["launches"], found["compiled"], len(found["failed"])) == (3, 2, 1)
    assert found["failed"][0]["kernel"] == "k:refused"
    assert "too wide" in found["failed"][0]["error"]
    assert len(found["broken"]) == 3, "each combination of values is a case"
    assert all("RuntimeError: only sizes that are even" in reason for reason in found["broken"][:2])
    assert "k.py has no function 'absent'" in found["broken"][2]
    for reason in found["broken"]:
        assert f"error: {reason}" in done.stderr
    again = json.loads(tcache("warmup", "m.yaml", "--json", cwd=root, check=1).stdout)
    assert (again["compiled"], len(again["failed"]), len(again["broken"])) == (0, 1, 3)


def test_all_targets_in_one_run_and_no_order_matters(project, tcache, tmp_path):
    root = project(item("fill", [64, 63]), item("tuned", [64]), gpus=GPUS)
    project(item("tuned", [64]), item("fill", [63, 64]), gpus=GPUS[::-1], name="r.yaml")
    caches = [tmp_path / "a", tmp_path / "b"]
    done = tcache(
        "warmup", "m.yaml", "--untuned", "default", "--jobs", "1", "--cache-dir", caches[0], cwd=root, check=0
    )
    assert "24 launches, 24 entries: 24 compiled, 0 present before, 0 failed" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("k:")]
    targets = {row[1] for row in rows}
    assert targets == {f"cuda:{arch}:32" for arch in (80, 86, 89, 90, 100, 120)} | {"hip:gfx942:64", "hip:gfx950:64"}
    assert sum(int(row[2]) for row in rows) == 24
    assert all(0 < float(row[4]) <= float(row[3]) for row in rows), "longest, and all together, in seconds"
    done = tcache("warmup", "r.yaml", "--untuned", "default", "--jobs", "3", "--cache-dir", caches[1], "--json",
                  cwd=root, check=0)  # fmt: skip
    assert left_in(caches[0]) == left_in(caches[1]) != []
    found = json.loads(done.stdout)
    assert len({row["entry"] for row in found["kernels"]}) == found["compiled"] == 24
    assert {row["target"] for row in found["kernels"]} == targets
    assert all(row["seconds"] > 0 for row in found["kernels"])
    assert found["jobs"] == 3 <= found["workers"] <= 24
    assert 0 < found["peak_mb"]["parent"] < 600
    assert found["seconds"] >= max(found["resolving_seconds"], found["compiling_seconds"]) > 0
    assert found["seconds"] <= found["resolving_seconds"] + found["compiling_seconds"] + 0.01, "they overlap"
    again = json.loads(tcache("warmup", "m.yaml", "--untuned", "default", "--cache-dir", caches[1], "--json",
                              cwd=root, check=0).stdout)  # fmt: skip
    assert (again["compiled"], again["entries"], again["workers"], again["compiling_seconds"]) == (0, 24, 0, 0)


SLOW = """
import os, time

def slow(x, n):
    end = time.monotonic() + 60
    while not os.path.exists("go") and time.monotonic() < end:
        time.sleep(0.05)
    assert os.path.exists("go")
    fill[(1,)](x, n, BLOCK=32)
"""


def test_compiling_begins_while_the_rest_is_resolved(project, tcache, tmp_path):
    call = {"call": "k.py:slow", "args": {"x": {"shape": ["n"], "dtype": "float32"}, "n": "n"}, "cases": [{"n": 64}]}
    root = project(item("fill", [64]), call, item("refused", [64]))
    with (root / "k.py").open("a") as file:
        file.write(SLOW)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tcache", "warmup", "m.yaml", "--jobs", "2"]
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("*/__grp__fill.json")) and time.monotonic() < end:
        time.sleep(0.05)
    assert list((tmp_path / "cache").glob("*/__grp__fill.json")), "the second case is still being replayed"
    (root / "go").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "3 launches, 3 entries: 2 compiled, 0 present before, 1 failed" in out
    assert re.findall(r"^\[(\d)/\d\+?\] fill", err, re.MULTILINE)[0] == "1"
    assert err.count("too wide") == 2, "as it fails, and at the end"


def test_an_error_of_resolving_ends_what_is_being_compiled(project, tcache, tmp_path):
    root = project(item("fill", [64]), item("tuned", [64]))
    store = tmp_path / "store" / "nvidia-h200"
    done = tcache("warmup", "m.yaml", "--json", cwd=root, check=1)
    assert [row.partition(" ")[2].partition(" ")[0] for row in json.loads(done.stdout)["untuned"]] == ["k:tuned"]
    assert "has no best config on NVIDIA H200: never tuned" in done.stderr
    assert json.loads(done.stdout)["compiled"] == 1
    store.mkdir(parents=True)
    (store / "k.tuned.json").write_text("{")
    done = tcache("warmup", "m.yaml", "--store", tmp_path / "store", "--jobs", "1", cwd=root)
    assert done.returncode == 2
    assert done.stdout == ""


ASKING = """
import triton
import triton.language as tl

@triton.jit
def asking(x, BLOCK: tl.constexpr):
    value = 1.0
    if tl.target_info.is_cuda():
        value = 80.0
        if tl.target_info.cuda_capability_geq(9, 0):
            value = 90.0
        if tl.target_info.cuda_capability_geq(10, 0):
            value = 100.0
    elif tl.target_info.is_hip_cdna3():
        value = 942.0
    tl.store(x + tl.arange(0, BLOCK), value)
"""


def test_a_kernel_that_asks_for_its_target_is_compiled_for_it(project, tcache, tmp_path):
    (tmp_path / "asking.py").write_text(ASKING)
    wanted = {"cuda:80:32": 80, "cuda:90:32": 90, "cuda:100:32": 100, "hip:gfx942:64": 942}
    gpus = ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200", "AMD Instinct MI300X"]
    args = {"x": {"shape": [64], "dtype": "float32"}, "BLOCK": 64}
    root = project({"kernel": "asking.py:asking", "args": args, "grid": [1], "cases": [{}]}, gpus=gpus)
    found = json.loads(tcache("warmup", "m.yaml", "--json", cwd=root, check=0).stdout)
    values = {}
    for row in found["kernels"]:
        text = (tmp_path / "triton-cache" / row["entry"] / "asking.ttir").read_text()
        values[row["target"]] = float(re.search(r"arith\.constant dense<([0-9.e+]+)>", text)[1])
    assert values == wanted


def test_a_killed_run_is_resumed(project, tmp_path):
    sizes = [1, 16, 17]
    root = project(
        *[item("fill", sizes) | {"args": {**item("fill", [])["args"], "BLOCK": 1 << b}} for b in range(3, 12)]
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tcache", "warmup", "m.yaml", "--jobs", "1"]
    process = subprocess.Popen(command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
    lines = [process.stderr.readline() for _ in range(3)]
    process.kill()
    process.communicate()
    assert lines[-1].startswith("[3/27]")
    done = subprocess.run([*command, "--json"], cwd=root, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["entries"] == 27
    assert 15 <= found["compiled"] <= 24, "what was compiled before stays"
    assert found["failed"] == []


# --untuned tune


def test_tuning_first_needs_a_gpu_only_where_something_is_untuned(project, tcache, tmp_path):
    root = project(item("tuned", [64]))
    done = tcache("warmup", "m.yaml", "--untuned", "tune", "--store", "new", cwd=root, check=2)
    assert "error: no GPU here: tuning benchmarks kernels" in done.stderr
    assert "--untuned nearest or default" in done.stderr
    assert not (root / "new").exists()
    assert not (tmp_path / "triton-cache").exists()

    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA L4 (UUID: GPU-1234)'\n")
    (tools / "nvidia-smi").chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = tcache("warmup", "m.yaml", "--untuned", "tune", cwd=root, env=env, check=2)
    assert "1 launches have no best config on NVIDIA H200; this machine has NVIDIA L4" in done.stderr

    project(item("fill", [64]))
    found = json.loads(tcache("warmup", "m.yaml", "--untuned", "tune", "--json", cwd=root, check=0).stdout)
    assert (found["compiled"], found["tuned_cases"]) == (1, 0)


@pytest.mark.gpu
def test_tuning_first_on_a_gpu(project, tcache):
    import torch

    root = project(item("tuned", [64, 128]), gpus=[torch.cuda.get_device_name()])
    options = ["--untuned", "tune", "--store", "new", "--json"]
    found = json.loads(tcache("warmup", "m.yaml", *options, cwd=root, check=0).stdout)
    assert found["tuned_cases"] == 2
    assert (found["launches"], found["untuned"], found["failed"]) == (2, [], [])
    assert list((root / "new").glob("*/*.json"))
    found = json.loads(tcache("warmup", "m.yaml", *options, cwd=root, check=0).stdout)
    assert (found["tuned_cases"], found["compiled"], found["entries"]) == (0, 0, found["entries"])
