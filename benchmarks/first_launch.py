"""How long a fresh process takes to its first matmul launch, on a GPU: stock Triton against a prebaked bundle.

Counted from when torch, Triton, the CUDA context and the kernel's module are there until the launch has finished.
The alternatives alternate in one run. Writes ``first_launch.json`` to ``--output`` (default: ``benchmarks/results``).

    python benchmarks/first_launch.py --bundle BUNDLE
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
import json, os, sys, time
import torch, triton, tcache
if os.environ["KIND"] == "stock":
    tcache.autotune = triton.autotune
from pathlib import Path
from tcache.replay import KernelRef, load
compiled, hits = [], []
triton.knobs.compilation.listener = lambda **event: (hits if event["cache_hit"] else compiled).append(1)
matmul = load(KernelRef.parse("kernels/matmul.py:matmul"), Path(os.environ["ROOT"]))
a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()
begin = time.perf_counter()
c = matmul(a, b)
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
wanted = a.float() @ b.float()
error = ((c.float() - wanted).norm() / wanted.norm()).item()
assert error < 1e-2, error
print(json.dumps({"ms": seconds * 1e3, "compiled": len(compiled), "hits": len(hits)}))
"""


def process(kind: str, cache: Path, bundle: Path) -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {"KIND": kind, "ROOT": str(ROOT), "TRITON_CACHE_DIR": str(cache), "HOME": str(cache)}
    if kind == "bundle":
        environment |= {"TCACHE_BUNDLES": str(bundle), "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--cold", type=int, default=3, help="processes that start without any cache")
    parser.add_argument("--rounds", type=int, default=11, help="processes of each other kind")
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    rows: dict[str, list[dict]] = {"stock, no cache": [], "stock, warm compile cache": [], "bundle, frozen": []}
    with tempfile.TemporaryDirectory() as scratch:
        warm = Path(scratch, "warm")
        for number in range(arguments.rounds):
            if number < arguments.cold:
                cold = warm if number == 0 else Path(scratch, f"cold-{number}")
                rows["stock, no cache"].append(process("stock", cold, arguments.bundle))
            rows["stock, warm compile cache"].append(process("stock", warm, arguments.bundle))
            empty = Path(scratch, "empty")
            empty.mkdir(exist_ok=True)
            rows["bundle, frozen"].append(process("bundle", empty, arguments.bundle))
            # .nv is the CUDA driver's own cache
            assert {path.name for path in empty.iterdir()} <= {".nv"}, "a frozen process wrote something"
    result = {
        "kernel": "matmul bf16, M=N=K=4096, 24 configs",
        "first_launch": {
            name: {
                "processes": len(found),
                "median_ms": round(statistics.median(row["ms"] for row in found), 1),
                "min_ms": round(min(row["ms"] for row in found), 1),
                "max_ms": round(max(row["ms"] for row in found), 1),
                "compiled": found[0]["compiled"],
            }
            for name, found in rows.items()
        },
    }
    medians = {name: row["median_ms"] for name, row in result["first_launch"].items()}
    result["times_faster_than"] = {
        name: round(median / medians["bundle, frozen"], 1) for name, median in medians.items() if "stock" in name
    }
    _machine.RESULTS = arguments.output
    print(_machine.write("first_launch", result).read_text())


if __name__ == "__main__":
    main()
