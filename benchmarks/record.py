"""What recording adds to a launch: host time on a driver that launches nothing, so that only Python is measured.

Three fresh processes a round (not recording, recording, recording with counts), alternating; the median over rounds of
each process's best of many batches. Writes ``benchmarks/results/record.json``. Needs no GPU.

    python benchmarks/record.py
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

PROCESS = """
import contextlib, json, os, sys, time
sys.path[:0] = [os.environ["ROOT"], os.path.join(os.environ["ROOT"], "tests", "contract")]
import torch, triton, triton.language as tl
import null_driver, recorded_kernels as k
import tcache

null_driver.activate()
tuner = k.tuned_over
tuner._do_bench = lambda call, quantiles: [(call(), 1.0)[1]] * 3
x = torch.zeros(64, 64)
kind = os.environ["KIND"]
path = os.environ["OUTPUT"]
recording = contextlib.nullcontext() if kind == "off" else tcache.record(path, counts=kind == "counts")
BATCH, BATCHES = 2000, int(os.environ["BATCHES"])

def best(launch):
    launch()
    found = []
    for _ in range(BATCHES):
        begin = time.perf_counter_ns()
        for _ in range(BATCH):
            launch()
        found.append((time.perf_counter_ns() - begin) / BATCH / 1e3)
    return min(found)

with recording:
    print(json.dumps({
        "jit kernel": best(lambda: k.add[(1,)](x, x, 4096, 1.5, True, None, "plain")),
        "autotuned kernel": best(lambda: tuner[(1,)](x, 64, 64)),
    }))
"""


def process(kind: str, scratch: str, batches: int) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {"KIND": kind, "ROOT": str(ROOT), "OUTPUT": f"{scratch}/{kind}.launches.json", "HOME": scratch,
                    "TRITON_CACHE_DIR": f"{scratch}/cache", "TCACHE_GPU_NAME": "NVIDIA H200",
                    "BATCHES": str(batches)}  # fmt: skip
    command = [sys.executable, "-c", PROCESS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind")
    parser.add_argument("--batches", type=int, default=20, help="batches of 2000 launches in each process")
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"off": [], "recording": [], "counts": []}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(arguments.rounds):
            for kind, found in rows.items():
                found.append(process(kind, scratch, arguments.batches))
    launches = {}
    for name in rows["off"][0]:
        median = {kind: statistics.median(row[name] for row in found) for kind, found in rows.items()}
        launches[name] = {
            "us_per_launch": {kind: round(value, 3) for kind, value in median.items()},
            "added_us": {kind: round(value - median["off"], 3) for kind, value in median.items() if kind != "off"},
            "ratio": {kind: round(value / median["off"], 4) for kind, value in median.items() if kind != "off"},
        }
    _machine.RESULTS = arguments.output
    print(_machine.write("record", {"driver": "null: binds, looks up, launches nothing", **launches}).read_text())


if __name__ == "__main__":
    main()
