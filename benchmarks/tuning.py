"""Tuning the 24-config bf16 matmul at 4096^3 from nothing: ``triton.autotune`` against ``tcache.autotune``, on a GPU.

Fresh processes with empty caches, alternating, counted from when torch, Triton and the CUDA context are there until the
first launch has finished. Every winner is compared with an exhaustive benchmark of all configs, 0.3 seconds each.
Writes ``tuning.json`` to ``--output`` (default: ``benchmarks/results``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _machine
from _machine import ROOT

HEAD = """
import json, os, sys, time
import torch, triton, tcache
from pathlib import Path
from tcache.keys.config import config_key
from tcache.replay import KernelRef, load
if os.environ["KIND"] == "stock":
    tcache.autotune = triton.autotune
module = sys.modules[load(KernelRef.parse("kernels/matmul.py:matmul"), Path(os.environ["ROOT"])).__module__]
a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()
"""
TUNE = (
    HEAD
    + """
begin = time.perf_counter()
module.matmul(a, b)
torch.cuda.synchronize()
print(json.dumps({"seconds": time.perf_counter() - begin, "winner": config_key(module.matmul_kernel.best_config)}))
"""
)
EXHAUSTIVE = (
    HEAD
    + """
from triton.testing import do_bench
kernel, found = module.matmul_kernel, {}
for config in kernel.configs:
    kernel.configs = [config]
    try:
        found[config_key(config)] = do_bench(lambda: module.matmul(a, b), warmup=100, rep=300, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        found[config_key(config)] = None
print(json.dumps(found))
"""
)


def process(code: str, kind: str, scratch: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {"KIND": kind, "ROOT": str(ROOT), "TRITON_CACHE_DIR": f"{scratch}/cache"}
    environment |= {"TCACHE_STORE": f"{scratch}/store", "TCACHE_MODE": "tune"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    rows: dict[str, list[dict]] = {"stock": [], "tcache": []}
    for _ in range(arguments.rounds):
        for kind, found in rows.items():
            with tempfile.TemporaryDirectory() as scratch:
                found.append(process(TUNE, kind, scratch))
    with tempfile.TemporaryDirectory() as scratch:
        exhaustive = process(EXHAUSTIVE, "stock", scratch)
    best = min(value for value in exhaustive.values() if value is not None)
    result = {
        "kernel": "matmul bf16, M=N=K=4096, 24 configs",
        "rounds": arguments.rounds,
        "seconds": {kind: [round(row["seconds"], 2) for row in found] for kind, found in rows.items()},
        "median_seconds": {
            kind: round(statistics.median(row["seconds"] for row in found), 2) for kind, found in rows.items()
        },
        "winner_of_best": {
            kind: [round(exhaustive[row["winner"]] / best, 4) for row in found] for kind, found in rows.items()
        },
        "winners": {kind: sorted({row["winner"] for row in found}) for kind, found in rows.items()},
        "exhaustive_ms": {key: value and round(value, 5) for key, value in exhaustive.items()},
    }
    result["times_faster"] = round(result["median_seconds"]["stock"] / result["median_seconds"]["tcache"], 2)
    _machine.RESULTS = arguments.output
    print(_machine.write("tuning", result).read_text())


if __name__ == "__main__":
    main()
