"""Processes that miss one shape at once, and processes that are killed while they tune. On a GPU.

32 processes launch one cold shape together, 20 times: one must tune and all must end with its config. Then processes
that tune are killed at random: every store file must parse and no timing that was finished may be lost.
Writes ``races.json`` to ``--output`` (default: ``benchmarks/results``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import _machine
from _machine import ROOT

from tcache.journal import Journal
from tcache.store import Store

RACER = """
import json, os, sys
import torch, triton, tcache
from pathlib import Path
from tcache.keys.config import config_key
from tcache.replay import KernelRef, load
sys.stdout.reconfigure(line_buffering=True)
axpy = load(KernelRef.parse("kernels/vector_add.py:axpy"), Path(os.environ["ROOT"]))
kernel = sys.modules[axpy.__module__].axpy_kernel
torch.zeros(1, device="cuda")
print("ready")
for line in sys.stdin:
    n = int(line)
    x, y = torch.randn(2, n, device="cuda")
    before = tcache.stats()
    got = axpy(2.0, x, y)
    right = torch.allclose(got, 2 * x + y, rtol=1e-5, atol=1e-6)
    after = tcache.stats()
    print(json.dumps({"config": config_key(kernel.best_config), "right": right,
                      "tuned": after["tuned"] - before["tuned"],
                      "waited": after["waited"] - before["waited"], "hits": after["hits"] - before["hits"]}))
"""
VICTIM = """
import json, os, sys
import torch, triton, tcache
from pathlib import Path
from tcache.journal import Journal
from tcache.replay import KernelRef, load
sys.stdout.reconfigure(line_buffering=True)
result = Journal.result
def telling(self, config, timing):
    result(self, config, timing)
    print(json.dumps({"config": config, "n": n}))
Journal.result = telling
axpy = load(KernelRef.parse("kernels/vector_add.py:axpy"), Path(os.environ["ROOT"]))
torch.zeros(1, device="cuda")
print("ready")
n = int(os.environ["FIRST"])
while True:
    x, y = torch.randn(2, n, device="cuda")
    axpy(2.0, x, y)
    n += 1
"""


def start(code: str, scratch: Path, **more: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {
        "ROOT": str(ROOT),
        "TRITON_CACHE_DIR": str(scratch / "cache"),
        "TCACHE_STORE": str(scratch / "store"),
    }
    environment |= {"TCACHE_MODE": "tune", "TCACHE_TUNE_JOBS": "2", "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def race(scratch: Path, processes: int, repetitions: int) -> dict:
    racers = [start(RACER, scratch) for _ in range(processes)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    rows = []
    for repetition in range(repetitions):
        n = 100_000 + 16 * repetition
        begin = time.perf_counter()
        for racer in racers:
            racer.stdin.write(f"{n}\n")
            racer.stdin.flush()
        answers = [json.loads(racer.stdout.readline()) for racer in racers]
        rows.append(
            {
                "seconds": round(time.perf_counter() - begin, 2),
                "tuned": sum(row["tuned"] for row in answers),
                "waited": sum(row["waited"] for row in answers),
                "found": sum(row["hits"] for row in answers),
                "configs": len({row["config"] for row in answers}),
                "right": sum(row["right"] for row in answers),
            }
        )
    for racer in racers:
        racer.stdin.close()
        racer.wait()
    return {
        "processes": processes,
        "repetitions": repetitions,
        "tuned_exactly_once": sum(row["tuned"] == 1 for row in rows),
        "one_config": sum(row["configs"] == 1 for row in rows),
        "all_right": sum(row["right"] == processes for row in rows),
        "rows": rows,
    }


def kill(scratch: Path, kills: int, at_once: int) -> dict:
    told: list[tuple[int, str]] = []
    lock = threading.Lock()
    rng = random.Random(0)
    delays = [rng.uniform(0.05, 2.5) for _ in range(kills)]

    def victim(number: int) -> None:
        process = start(VICTIM, scratch, FIRST=str(1_000_000 + 1000 * number))
        assert process.stdout.readline() == "ready\n"
        threading.Timer(delays[number], process.send_signal, [signal.SIGKILL]).start()
        for line in process.stdout:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut by the kill
            with lock:
                told.append((row["n"], row["config"]))
        process.wait()

    numbers = list(range(kills))
    while numbers:
        batch = [threading.Thread(target=victim, args=(number,)) for number in numbers[:at_once]]
        numbers = numbers[at_once:]
        for thread in batch:
            thread.start()
        for thread in batch:
            thread.join()
    store = Store(scratch / "store")
    records = list(store.records())  # raises for a file that does not parse
    kept = set()
    for _, record in records:
        for entry in record.entries.values():
            n = dict(entry.shape.values)["n"]
            kept |= {(n, config) for config in entry.timings}
            journal = Journal(store.journal(record.gpu, record.kernel, str(entry.shape)), entry.source)
            kept |= {(n, config) for config in journal.timings}
    # a shape that was cut before its first store has its journal only: the next run of that shape reads it
    left = {config for path in (scratch / "store").glob("*/.tuning/*.jsonl") for config in _configs(path)}
    lost = [row for row in told if row not in kept and row not in left]
    return {"kills": kills, "files": len(records), "timings_finished": len(told), "timings_lost": len(lost)}


def _configs(path: Path) -> list[tuple[int, str]]:
    found = []
    n = None
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        n = row.get("n", n)
        if "timing" in row:
            found.append((_size_of(path), row["config"]))
    return found


_sizes: dict[str, int] = {}


def _size_of(path: Path) -> int:
    """Return the n whose shape key a journal is named after."""
    if not _sizes:
        from tcache._fs import sha256_bytes

        for n in range(1_000_000, 1_200_000):
            text = f"n={n} | x_ptr=torch.float32 y_ptr=torch.float32 z_ptr=torch.float32"
            _sizes[sha256_bytes(text.encode())[:12]] = n
    return _sizes.get(path.stem.rpartition("-")[2], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=20)
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        result = {
            "kernel": "axpy float32, 12 configs",
            "kill": kill(Path(two), arguments.kills, arguments.at_once),
            "race": race(Path(one), arguments.processes, arguments.repetitions),
        }
    _machine.RESULTS = arguments.output
    print(_machine.write("races", result).read_text())


if __name__ == "__main__":
    main()
