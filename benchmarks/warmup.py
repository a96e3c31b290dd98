"""Resolving, warming up and their memory, without a GPU.

Four questions: what a command spends before it can compile; how long resolving 500 launches takes; how warming up
scales with ``--jobs``; how much memory the parent takes for 5,000 cases of a 70B-parameter model. The kernels are
real: those of this repository, of fla-core and of liger-kernel (``pip install --no-deps fla-core==0.6.0
liger-kernel==0.8.5 einops``).

python benchmarks/warmup.py [--entries 192] [--jobs 1,2,4] [--only start|resolve|scaling|memory] [--no-write]

What a command does before it can compile (Python, torch and Triton are imported) does not become less with more jobs:
the whole command's efficiency depends on how much there is to compile, so state the amount (``--entries``, 24 to 864).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from _machine import ROOT, write

GPU = "NVIDIA H200"
PUBLISHED = ROOT / "shape_manifests" / "third_party"
LLAMA_70B = [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (128256, 8192)]
"""``(N, K)`` of the linear layers: query, key and value; attention output; gate and up; down; vocabulary."""


def tcache(*args, cache, cores=None):
    """Run the command line and return its answer, wall seconds, CPU seconds and its peak resident memory in MB."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tcache", *map(str, args), "--json"]

    every = os.sched_getaffinity(0)
    with tempfile.TemporaryFile() as out:
        os.sched_setaffinity(0, cores or every)  # inherited
        begin = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out)
        os.sched_setaffinity(0, every)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{text[-2000:]}")
    return json.loads(text), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def manifest(folder, name, kernels):
    path = folder / name
    path.write_text(json.dumps({"version": 1, "gpus": [GPU], "kernels": kernels}, indent=1))
    return path


def matmul(*cases):
    tensors = {"a": {"shape": ["M", "K"], "dtype": "dtype"}, "b": {"shape": ["K", "N"], "dtype": "dtype"}}
    return {"call": f"{ROOT / 'kernels/matmul.py'}:matmul", "args": tensors, "cases": list(cases)}


def published(name, calls, sizes):
    """Return items of a published manifest with more sizes."""
    items = yaml.safe_load((PUBLISHED / name).read_text())["kernels"]
    chosen = [item for item in items if item["call"] in calls]
    assert len(chosen) == len(calls), name
    found = []
    for item in chosen:
        call = item["call"].replace("passes.py", str(PUBLISHED / "passes.py"))
        found.append({**item, "call": call, "cases": [{**case, **sizes(case)} for case in item["cases"]]})
    return found


def five_hundred(folder):
    """Write a manifest of about 500 launches of at least 20 kernels."""
    calls = ["passes.py:chunk_gla", "passes.py:chunk_retention", "passes.py:chunk_delta_rule"]
    kernels = published("fla.yaml", calls, lambda _: {"T": [1024, 2047, 2048, 4096]})
    items = yaml.safe_load((PUBLISHED / "liger.yaml").read_text())["kernels"]
    for item in items:
        if item["call"] in ("passes.py:rms_norm", "passes.py:swiglu", "passes.py:layer_norm", "passes.py:rope"):
            call = item["call"].replace("passes.py", str(PUBLISHED / "passes.py"))
            kernels.append({**item, "call": call})
    kernels.append(matmul({"M": "16..4096 by *2", "N": [4096, 6144, 28672], "K": [4096, 14336],
                           "dtype": ["bfloat16", "float16", "float32"]}))  # fmt: skip
    vector = {"shape": ["n"], "dtype": "dtype"}
    kernels.append(
        {"call": f"{ROOT / 'kernels/vector_add.py'}:axpy", "args": {"a": 2.0, "x": vector, "y": vector},
         "cases": [{"n": "1..67108864 by *2", "dtype": ["float32", "bfloat16", "float16"]},
                   {"n": "1000..1129", "dtype": "float32"}]}
    )  # fmt: skip
    return manifest(folder, "resolve.yaml", kernels)


def resolving(folder):
    path = five_hundred(folder)
    runs = []
    for _ in range(3):
        answer, seconds, cpu, _ = tcache("resolve", path, "--untuned", "default", cache=folder / "none", cores=two())
        runs.append((seconds, cpu))
    rows = answer["launches"]
    seconds, cpu = min(runs)
    return {
        "what": "tcache resolve in a process of its own on 2 cores, best of 3; imports are part of it",
        "launches": len(rows),
        "kernels": len({row["kernel"] for row in rows}),
        "entries": len({row["entry"] for row in rows}),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "limit": 10,
    }


def two():
    return set(sorted(os.sched_getaffinity(0))[:2])


def scaling(folder, wanted, steps):
    """Warm up one manifest with each number of jobs, from an empty cache each time."""
    # alignment, ones and dtypes fork the 24 configs: each combination is 24 entries
    combinations = [
        {"M": m, "N": n, "K": k, "dtype": dtype}
        for k in (4096, 4097)
        for dtypes in (("bfloat16", "float16"), ("float32",))
        for n in (4096, 4097)
        for m in (4096, 4097, 1)
        for dtype in dtypes
    ]
    path = manifest(folder, "scaling.yaml", [matmul(*combinations[: max(1, wanted // 24)])])
    rows = []
    for jobs in steps:
        cache = folder / f"jobs-{jobs}"
        answer, seconds, cpu, _ = tcache("warmup", path, "--untuned", "all", "--jobs", jobs, cache=cache)
        shutil.rmtree(cache)
        assert answer["compiled"] == answer["entries"]
        assert not answer["failed"]
        rows.append(
            {"jobs": jobs, "entries": answer["entries"], "seconds": round(seconds, 2),
             "resolving": answer["resolving_seconds"], "compiling": answer["compiling_seconds"],
             "before_compiling": round(seconds - answer["compiling_seconds"], 3), "workers": answer["workers"],
             "sum_of_compilations": round(sum(row["seconds"] for row in answer["kernels"]), 2),
             "longest": max(row["seconds"] for row in answer["kernels"]), "cpu_seconds": round(cpu, 2),
             "hardware": round(ceiling(jobs), 3), "peak_mb": answer["peak_mb"]}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    first = rows[0]
    for row in rows:
        times = row["jobs"] / first["jobs"]
        row["efficiency"] = round(first["seconds"] / times / row["seconds"], 3)
        row["compile_efficiency"] = round(first["compiling"] / times / row["compiling"], 3)
    return {
        "what": "tcache warmup --untuned all of kernels/matmul.py from an empty cache; efficiency: of the whole "
        "command, a process of its own; compiling: from the first worker's start to the end, resolving goes on "
        "meanwhile; before_compiling: the rest, imports first of all; hardware: what n processes that share nothing "
        "(integer loops) reach right afterwards, an idea of how free the cores are",
        "rows": rows,
        "wanted": 0.85,
    }


_LOOP = "import time\nb=time.perf_counter()\nx=0\nfor i in range(12_000_000): x+=i\nprint(time.perf_counter()-b)"


def ceiling(jobs):
    """Return the efficiency that processes without anything in common reach: 1 on free cores of constant clock."""

    def taken(count):
        processes = [subprocess.Popen([sys.executable, "-c", _LOOP], stdout=subprocess.PIPE) for _ in range(count)]
        return [float(process.communicate()[0]) for process in processes]

    alone = sum(taken(1)[0] for _ in range(3)) / 3
    return alone / max(taken(jobs))


def memory(folder):
    """Peak memory of the parent: few launches, 5,000 cases of a 70B-parameter model, each of which is real."""
    cases = [{"M": "1..1000", "N": n, "K": k, "dtype": "bfloat16"} for n, k in LLAMA_70B]
    few = manifest(folder, "few.yaml", [matmul({"M": 16, "N": 16, "K": 16, "dtype": "bfloat16"})])
    many = manifest(folder, "many.yaml", [matmul(*cases)])
    rows = []
    for path, untuned in ((few, "default"), (many, "default")):
        answer, seconds, _, _ = tcache("warmup", path, "--untuned", untuned, cache=folder / "memory")
        rows.append({"launches": answer["launches"], "entries": answer["entries"], "untuned": untuned,
                     "seconds": round(seconds, 2), "peak_mb": answer["peak_mb"]})  # fmt: skip
    # every config of every 8th case: 15,000 launches
    eighth = manifest(folder, "all.yaml", [matmul(*({**case, "M": "1..1000 by 8"} for case in cases))])
    tcache("resolve", few, "--untuned", "all", cache=folder / "memory")
    answer, seconds, _, _ = tcache("warmup", eighth, "--untuned", "all", cache=folder / "memory")
    rows.append({"launches": answer["launches"], "entries": answer["entries"], "untuned": "all",
                 "seconds": round(seconds, 2), "peak_mb": answer["peak_mb"]})  # fmt: skip
    return {"what": "peak resident memory of tcache warmup, Llama 3 70B's linear layers", "rows": rows, "limit": 600}


STARTS = {
    "python": "",
    "what tcache warmup imports, without torch": "import tcache.cli.warmup, tcache.warmup, tcache.manifest",
    "triton_key": "from triton.runtime.cache import triton_key; triton_key()",
    "torch": "import torch",
    "torch, and the process taken apart": "import torch; end = None",
    "torch._dynamo": "import torch._dynamo",
}


def start():
    """What a process spends on the parts that come before compiling, and its memory; best of 3."""
    rows = []
    for name, code in STARTS.items():
        text = f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nend = os._exit\n{code}\nif end: end(0)"
        found = []
        for _ in range(3):
            begin = time.perf_counter()
            process = subprocess.Popen([sys.executable, "-c", text])
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            found.append((seconds, usage.ru_utime, usage.ru_stime, usage.ru_maxrss))
        seconds, user, system, peak = min(found)
        rows.append({"what": name, "seconds": round(seconds, 3), "user": round(user, 3), "system": round(system, 3),
                     "peak_mb": peak >> 10})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return {"what": "processes of their own that import these, and end at once unless stated", "rows": rows}


def numbers(text):
    return [int(part) for part in text.split(",")]


def doublings():
    most = len(os.sched_getaffinity(0))
    return sorted({*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < most), most})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=192, help="entries of the manifest that shows scaling")
    parser.add_argument(
        "--jobs", type=numbers, default=doublings(), help="as in 1,16; efficiency is relative to the first"
    )
    parser.add_argument("--only", choices=["start", "resolve", "scaling", "memory"])
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    report = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if options.only in (None, "start"):
            report["start"] = start()
        if options.only in (None, "resolve"):
            report["resolve"] = resolving(folder)
        if options.only in (None, "memory"):
            report["memory"] = memory(folder)
        if options.only in (None, "scaling"):
            report["scaling"] = scaling(folder, options.entries, options.jobs)
    print(json.dumps(report, indent=1))
    if not options.no_write:
        print(write("warmup", report))


if __name__ == "__main__":
    main()
