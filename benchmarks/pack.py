"""How long packing takes: one kernel with 1,000 values of a constexpr, each compiled for real, in every form.

Compiling the 1,000 entries is not what is measured and takes minutes; ``--cache DIR`` keeps them for another run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import _machine

ENTRIES = 1000
RUNS = 3
KERNEL = """\
import triton
import triton.language as tl


@triton.jit
def fill(y_ptr, n, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, o * VALUE, mask=o < n)
"""
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - kernel: kernels.py:fill
    args: {{y_ptr: {{shape: [4096], dtype: int32}}, n: 4096, VALUE: value, BLOCK: 128}}
    grid: [cdiv(4096, BLOCK)]
    cases: [{{value: {values}}}]
"""


def packed(folder: Path, cache: Path, form: str, *options: str) -> dict[str, float]:
    """Pack in one form, several times, and return what it took."""
    whole, inside, cpu = [], [], []
    for _ in range(RUNS):
        target = folder / "out"
        begin, before = time.perf_counter(), os.times()
        command = ["pack", folder / "m.yaml", "--format", form, "-o", target, "--json", *options]
        answer = json.loads(_machine.tcache(*command, cache=cache))
        whole.append(time.perf_counter() - begin)
        after = os.times()
        cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
        inside.append(answer["seconds"])
        if answer["entries"] != ENTRIES:
            raise SystemExit(f"{answer['entries']} entries, expected {ENTRIES}")
        shutil.rmtree(target)
    seconds = statistics.median(whole)
    return {
        "seconds": round(seconds, 2),
        "seconds_without_imports": round(statistics.median(inside), 2),
        "cpu_seconds": round(statistics.median(cpu), 2),  # what another load on the machine does not change much
        "bytes": answer["bytes"],
        "mb_per_s": round(answer["bytes"] / 1e6 / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, help="directory for the compiled entries, kept")
    given = parser.parse_args().cache
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch), given or Path(scratch, "cache")
        (folder / "kernels.py").write_text(KERNEL)
        (folder / "m.yaml").write_text(MANIFEST.format(values=list(range(2, 2 + ENTRIES))))
        begin = time.perf_counter()
        compiled = json.loads(_machine.tcache("warmup", folder / "m.yaml", "--json", cache=cache))["compiled"]
        print(f"{compiled} entries compiled in {time.perf_counter() - begin:.0f} s")
        result = {
            "entries": ENTRIES,
            "made_by": "one kernel, 1,000 values of a constexpr, each compiled",
            "runs": RUNS,
            "dir": packed(folder, cache, "dir"),
            "wheel": packed(folder, cache, "wheel"),
            "oci": packed(folder, cache, "oci"),
            "native": packed(folder, cache, "native", "--mount-path", "/opt/triton/cache"),
        }
    print(_machine.write("pack", result).read_text())


if __name__ == "__main__":
    main()
