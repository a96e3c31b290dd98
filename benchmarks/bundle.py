"""A bundle of 1,000 entries: opening it, finding an entry, reading its index, and comparing all digests.

The entries are those of the quickstart manifest, copied under other names until there are a thousand; a second bundle
holds few and large files. Needs no GPU. Writes ``bundle.json`` to ``benchmarks/results``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _machine
from _machine import ROOT, tcache

ENTRIES, PROCESSES = 1000, 15
LARGE, MEGABYTES = 16, 32

OPEN = """
import json, sys, time
from pathlib import Path
from tcache.bundle import Bundle
from tcache.active import activate
def ms(call):
    begin = time.perf_counter()
    found = call()
    return (time.perf_counter() - begin) * 1e3, found
opened, bundle = ms(lambda: Bundle(sys.argv[1]))
count, entries = ms(lambda: bundle.entries)
keys = sorted(entries)
first, files = ms(lambda: bundle.entry_files(keys[500]))
assert isinstance(files, dict), files
each = [ms(lambda key=key: bundle.entry_files(key))[0] for key in keys[:200]]
again = [ms(lambda key=key: bundle.entry_files(key))[0] for key in keys[:200]]
index, found = ms(bundle.index)
facts = [ms(lambda key=key: found.fact(key))[0] for key in keys[:200]]
from tcache._triton import release
activated, _ = ms(lambda: activate(bundles=[sys.argv[1]], mode="frozen"))
print(json.dumps([opened, count, first, sum(each) / 200, sum(again) / 200, index, sum(facts) / 200, activated]))
"""

VERIFY = """
import hashlib, json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tcache.bundle import Bundle
root = Path(sys.argv[1])
def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
def best(call, rounds=5):
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
bundle = Bundle(root)
paths = [root / name for name in bundle.files]
assert bundle.problems() == []
alone = best(lambda: [digest(path) for path in paths])
with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    threads = best(lambda: list(pool.map(digest, paths)))
ours = best(lambda: Bundle(root).problems())
size = sum(size for size, _ in bundle.files.values())
print(json.dumps([size / ours / 1e6, size / alone / 1e6, size / threads / 1e6, size]))
"""


def entry_name(number: int) -> tuple[str, str]:
    digest = hashlib.sha256(str(number).encode())
    return digest.hexdigest(), base64.b32encode(digest.digest()).decode().rstrip("=")


def multiply(bundle: Path) -> None:
    """Copy the entries of a bundle under other names until there are :data:`ENTRIES`."""
    entries = sorted(path for path in (bundle / "entries").iterdir() if path.is_dir())
    index = json.loads((bundle / "index.json").read_text())
    rows = {row["entry"]: row for row in index["launches"]}
    for number in range(ENTRIES - len(entries)):
        original = entries[number % len(entries)]
        own, key = entry_name(number)
        (bundle / "entries" / key).mkdir()
        for file in original.iterdir():
            data = file.read_bytes()
            if file.suffix == ".json":
                data = json.dumps({**json.loads(data), "hash": own}, separators=(",", ":")).encode()
            (bundle / "entries" / key / file.name).write_bytes(data)
        index["entries"][key] = index["entries"][original.name]
        index["launches"].append({**rows[original.name], "entry": key})
    (bundle / "index.json").write_text(json.dumps(index, sort_keys=True, separators=(",", ":")))
    sign(bundle)


def sign(bundle: Path) -> None:
    head = json.loads((bundle / "bundle.json").read_text())
    files = sorted(path for path in bundle.rglob("*") if path.is_file() and path.name != "bundle.json")
    head["files"] = {
        path.relative_to(bundle).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    (bundle / "bundle.json").write_text(json.dumps(head, sort_keys=True, indent=1) + "\n")


def large(bundle: Path) -> None:
    """Add few and large files, as of models' extra resources; what counts here is bytes, not files."""
    (bundle / "extra").mkdir()
    for number in range(LARGE):
        (bundle / "extra" / f"{number}.bin").write_bytes(os.urandom(1 << 20) * MEGABYTES)
    sign(bundle)


def probe(script: str, bundle: Path, rounds: int) -> list[list[float]]:
    rows = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", script, str(bundle)], capture_output=True, text=True, check=True, cwd=ROOT
        )
        rows.append(json.loads(done.stdout))
    return [sorted(column) for column in zip(*rows, strict=True)]


def verified(bundle: Path) -> dict[str, float]:
    ours, alone, threads, size = (row[-1] for row in probe(VERIFY, bundle, 3))
    return {
        "bytes": int(size),
        "verify_mb_per_s": round(ours),
        "hashlib_alone_mb_per_s": round(alone),
        "hashlib_in_threads_mb_per_s": round(threads),
    }


def main() -> None:
    manifest = ROOT / "shape_manifests" / "quickstart.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        cache, bundle = Path(scratch, "cache"), Path(scratch, "bundle")
        tcache("warmup", manifest, cache=cache)
        tcache("pack", manifest, "--output", bundle, cache=cache)
        begin = time.perf_counter()
        multiply(bundle)
        print(f"{ENTRIES} entries in {time.perf_counter() - begin:.1f} s")
        rows = probe(OPEN, bundle, PROCESSES)
        names = (
            "open", "list_entries", "first_entry", "further_entry", "entry_again", "index", "fact", "activate",
        )  # fmt: skip
        small = verified(bundle)
        large(bundle)
        result = {
            "entries": ENTRIES,
            "processes": PROCESSES,
            "milliseconds": {
                name: {"best": round(row[0], 4), "median": round(statistics.median(row), 4)}
                for name, row in zip(names, rows, strict=True)
            },
            "thousand_small_entries": small,
            "few_large_files": verified(bundle),
        }
    print(_machine.write("bundle", result).read_text())


if __name__ == "__main__":
    main()
