"""What holds without a GPU: start-up of the command, cost of the import, warm-up in parallel, size of a bundle.

Writes ``benchmarks/results/cpu.json``; ``benchmarks/readme.py`` puts the figures into the README.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _machine import ROOT, tcache, write

from tcache._fs import tree_size

MANIFEST = "shape_manifests/quickstart.yaml"
ROUNDS = 21


def milliseconds(*command: str) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    return (time.perf_counter() - begin) * 1e3


def start_up() -> dict:
    """Whole processes, alternating, so that a busy moment hits all of them."""
    rows: dict[str, list[float]] = {"python": [], "import tcache": [], "tcache --help": []}
    for _ in range(ROUNDS):
        rows["python"].append(milliseconds(sys.executable, "-c", "pass"))
        rows["import tcache"].append(milliseconds(sys.executable, "-c", "import tcache"))
        rows["tcache --help"].append(milliseconds(sys.executable, "-m", "tcache", "--help"))
    median = {name: statistics.median(values) for name, values in rows.items()}
    return {
        "rounds": ROUNDS,
        "help_ms": round(median["tcache --help"], 1),
        "import_adds_ms": round(median["import tcache"] - median["python"], 1),
        "python_ms": round(median["python"], 1),
    }


def warm_up(scratch: Path) -> dict:
    """Compile every config of the manifest one at a time and two at a time, alternating, in fresh caches."""
    rows: dict[int, list[float]] = {1: [], 2: []}
    whole: dict[int, list[float]] = {1: [], 2: []}
    probe = (
        "import json, sys, time; from pathlib import Path; from tcache.cli.options import select;"
        "from tcache.warmup import pending, warm;"
        "done, _ = select((Path(sys.argv[1]),), (), None, None, None).resolve(sys.argv[3]); todo = pending(done);"
        "start = time.perf_counter(); out = warm(todo, int(sys.argv[2])); end = time.perf_counter();"
        "assert not [o for o in out if o.error];"
        "print(json.dumps([len(todo), end - start]))"
    )
    entries = 0
    for number in range(3):
        for jobs in (1, 2):
            cache = scratch / f"cache-{number}-{jobs}"
            environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
            begin = time.perf_counter()
            command = [sys.executable, "-c", probe, MANIFEST, str(jobs), "all"]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
            whole[jobs].append(time.perf_counter() - begin)
            entries, compiling = json.loads(done.stdout.splitlines()[-1])
            rows[jobs].append(compiling)
    one, two = (statistics.median(rows[jobs]) for jobs in (1, 2))
    return {
        "entries": entries,
        "one_at_a_time_s": round(one, 2),
        "two_at_a_time_s": round(two, 2),
        "speedup": round(one / two, 2),
        "speedup_of_the_whole_command": round(statistics.median(whole[1]) / statistics.median(whole[2]), 2),
        "tuning_cache_bytes": tree_size(scratch / "cache-0-1"),
    }


def chain(scratch: Path) -> dict:
    """Warm up the winners, pack, verify."""
    cache, bundle = scratch / "winners", scratch / "bundle"
    warm = json.loads(tcache("warmup", MANIFEST, "--json", cache=cache))
    again = json.loads(tcache("warmup", MANIFEST, "--json", cache=cache))
    packed = json.loads(tcache("pack", MANIFEST, "-o", bundle, "--json", cache=cache))
    proof = json.loads(tcache("verify", bundle, "--json", cache=scratch / "none"))
    assert again["compiled"] == 0
    return {
        "launches": proof["launches"],
        "hits": proof["hits"],
        "entries": packed["entries"],
        "warmup_s": warm["seconds"],
        "pack_s": packed["seconds"],
        "verify_s": proof["seconds"],
        "winners_cache_bytes": tree_size(cache),
        "packed_bytes": packed["bytes"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tcache-bench-") as scratch:
        result = {"start_up": start_up(), "warmup": warm_up(Path(scratch)), "chain": chain(Path(scratch))}
    result["packed_of_tuning_cache"] = round(
        result["chain"]["packed_bytes"] / result["warmup"]["tuning_cache_bytes"], 4
    )
    path = write("cpu", result)
    print(path.read_text())


if __name__ == "__main__":
    main()
