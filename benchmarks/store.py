"""A store of 100,000 entries over 200 kernels: a kernel's first lookup in a process, and later ones.

Needs no GPU. Writes ``store.json`` to ``benchmarks/results``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _machine
from _machine import ROOT

from tcache.keys import ShapeKey, find_gpu, space_identity
from tcache.store import Entry, Kernel, Record, Store, Timing

KERNELS, ENTRIES, CONFIGS = 200, 500, 8
PROBE = """
import json, sys, time
from tcache.keys import ShapeKey, find_gpu
from tcache.store import Kernel, Store
store, gpu = Store(sys.argv[1]), find_gpu("NVIDIA H200")
kernel = Kernel("library.ops", f"kernel_{sys.argv[2]}", ("M", "N"))
shapes = [ShapeKey((("M", 16 * m), ("N", 4096)), (("x", "bfloat16"),)) for m in range(1, 401)]
begin = time.perf_counter()
assert store.get(gpu, kernel, shapes[0], "sha256:s") is not None
first = time.perf_counter() - begin
def each():
    begin = time.perf_counter()
    for shape in shapes:
        store.get(gpu, kernel, shape, "sha256:s")
    return (time.perf_counter() - begin) / len(shapes) * 1e6
print(json.dumps([first * 1e3, each(), min(each() for _ in range(5))]))
"""


def fill(root: Path) -> None:
    gpu = find_gpu("NVIDIA H200")
    configs = [f"BLOCK={2**number} | num_warps=4 num_stages=3 num_ctas=1" for number in range(4, 4 + CONFIGS)]
    timings = {key: Timing(0.01 * number, 0.009, 0.011, 100) for number, key in enumerate(configs, 1)}
    for number in range(KERNELS):
        entries = {}
        for m in range(1, ENTRIES + 1):
            shape = ShapeKey((("M", 16 * m), ("N", 4096)), (("x", "bfloat16"),))
            entries[shape] = Entry(
                shape, configs[0], timings, "sha256:s", space_identity(configs), "3.7.1", "2026-01-01T00:00:00Z"
            )
        kernel = Kernel("library.ops", f"kernel_{number}", ("M", "N"))
        path = Store(root).path(gpu, kernel)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Record(gpu, kernel, entries).text())


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "store")
        begin = time.perf_counter()
        fill(root)
        print(f"filled in {time.perf_counter() - begin:.1f} s")
        rows = []
        for number in range(21):
            command = [sys.executable, "-c", PROBE, str(root), str(number * 9)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
            rows.append(json.loads(done.stdout))
        size = sum(path.stat().st_size for path in root.rglob("*.json"))
    result = {
        "kernels": KERNELS,
        "entries": KERNELS * ENTRIES,
        "configs_per_entry": CONFIGS,
        "bytes": size,
        "processes": len(rows),
        "first_lookup_ms": round(statistics.median(row[0] for row in rows), 2),
        "first_lookup_of_a_further_shape_us": round(statistics.median(row[1] for row in rows), 2),
        "later_lookup_us": round(statistics.median(row[2] for row in rows), 2),
    }
    print(_machine.write("store", result).read_text())


if __name__ == "__main__":
    main()
