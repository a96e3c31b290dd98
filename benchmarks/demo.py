"""``make demo``: from a shape manifest to a proven bundle, on this machine, without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _machine import ROOT

from tcache._fs import tree_size

MANIFEST = "shape_manifests/quickstart.yaml"


def step(*args: object, cache: Path) -> tuple[dict, float]:
    """Run one command with ``--json``, its progress shown, and return its answer and the seconds it took."""
    print(f"\n$ tcache {' '.join(map(str, args))}", flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    begin = time.perf_counter()
    command = [sys.executable, "-m", "tcache", *map(str, args), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout), time.perf_counter() - begin


def size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tcache-demo-") as scratch:
        cache, bundle = Path(scratch, "cache"), Path(scratch, "bundle")
        warm, warm_s = step("warmup", MANIFEST, cache=cache)
        print(f"{warm['launches']} launches need {warm['entries']} entries; {warm['compiled']} compiled")
        again, _ = step("warmup", MANIFEST, cache=cache)
        print(f"a second run compiles {again['compiled']}")
        resolved, resolve_s = step("resolve", MANIFEST, cache=cache)
        present = sum(row["present"] for row in resolved["launches"])
        print(f"{present} of {len(resolved['launches'])} launches find their entry, nothing compiled")
        winners = tree_size(cache)
        packed, pack_s = step("pack", MANIFEST, "--format", "dir", "-o", bundle, cache=cache)
        print(f"{packed['entries']} entries and {packed['native_helpers']} native helpers packed")
        shutil.rmtree(cache)  # production has none of this
        proof, verify_s = step("verify", bundle, cache=Path(scratch, "none"))
        print(f"{proof['hits']} of {proof['launches']} launches hit" + ("" if proof["proven"] else ": NOT proven"))
        print("\nand what tuning the same manifest would leave behind: every config of every shape")
        everything = Path(scratch, "everything")
        full, full_s = step("warmup", MANIFEST, "--untuned", "all", cache=everything)
        tuned = tree_size(everything)
    rows = [
        ("launches", f"{proof['launches']}"),
        ("entries packed", f"{packed['entries']} of {full['entries']} that tuning compiles"),
        ("hits in verify", f"{proof['hits']} ({proof['hits'] / proof['launches']:.0%})"),
        ("cache that tuning leaves", size(tuned)),
        ("cache with the winners only", size(winners)),
        ("packed", f"{size(packed['bytes'])} ({packed['bytes'] / tuned:.2%} of what tuning leaves)"),
        ("seconds", f"warmup {warm_s:.1f}, resolve {resolve_s:.1f}, pack {pack_s:.1f}, verify {verify_s:.1f}"),
        ("seconds for every config", f"{full_s:.1f}"),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    if not proof["proven"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
