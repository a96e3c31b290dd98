"""How long a fresh process takes to its first matmul launch, on a GPU: a prebaked bundle against the alternatives.

Counted from when torch, Triton, the CUDA context and the kernel's module are there until the launch has finished.

- ``stock, no cache``: ``triton.autotune`` in an empty home.
- ``stock, warm compile cache``: everything was compiled before; tuning is repeated.
- ``stock, warm, stored tuning``: the same with ``TRITON_CACHE_AUTOTUNING=1``: Triton's own record of the timings.
- ``jit, config by hand``: no autotuner, everything was compiled before.
- ``persistent autotuner``: winners in a JSON file, as FlexGEMM's (see ``_persistent.py``), everything compiled before.
- ``bundle, frozen``: the bundle, nothing else.
- ``stock jit, bundle``: ``jit, config by hand``, the kernel coming from the bundle: what a kernel without tcache's
  decorator gains.
- ``bundle, preloaded``: ``bundle, frozen`` after ``tcache.preload()``, whose time is given apart.

The processes of a batch start together and wait where the clock begins; then they go on one after the other, the
alternatives in turn, each alone. Writes ``first_launch.json`` to ``--output`` (default: ``benchmarks/results``).

    python benchmarks/first_launch.py --bundle BUNDLE
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import _machine
import _together
from _together import finish, frozen

if TYPE_CHECKING:
    import subprocess

PROCESS = """
import json, os, sys, time
import torch, triton, tcache
kind = os.environ["KIND"]
sys.path.insert(0, os.path.join(os.environ["ROOT"], "benchmarks"))
if kind in ("stock", "jit", "jit in bundle"):
    tcache.autotune = triton.autotune
elif kind == "persistent":
    from functools import partial
    from pathlib import Path
    from _persistent import persistent_autotune
    tcache.autotune = partial(persistent_autotune, Path(os.environ["HOME"], "winners.json"))
from pathlib import Path
from tcache.replay import KernelRef, load
compiled, hits = [], []
triton.knobs.compilation.listener = lambda **event: (hits if event["cache_hit"] else compiled).append(1)
matmul = load(KernelRef.parse("kernels/matmul.py:matmul"), Path(os.environ["ROOT"]))
kernel = sys.modules[matmul.__module__].matmul_kernel
a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
preload_ms = None
if kind.startswith("jit"):
    kernel.configs = [config for config in kernel.configs if str(config) == os.environ["CONFIG"]]
if kind == "preload":
    done = tcache.preload()
    assert done.loaded and not done.failed, done
    preload_ms = done.seconds * 1e3
begin = time.perf_counter()
c = matmul(a, b)
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
if os.environ.get("PROFILE"):
    from tcache import stats
    print(stats(), file=sys.stderr)
wanted = a.float() @ b.float()
error = ((c.float() - wanted).norm() / wanted.norm()).item()
assert error < 1e-2, error
print(json.dumps({"ms": seconds * 1e3, "compiled": len(compiled), "hits": len(hits), "preload_ms": preload_ms,
                  "config": str(kernel.best_config)}))
"""


def start(kind: str, cache: Path, bundle: Path, **more: str) -> subprocess.Popen:
    served = frozen(bundle) if kind in ("bundle", "preload", "jit in bundle") else {}
    return _together.start(PROCESS, cache=cache, KIND=kind, **served, **more)


def batch(jobs: list[tuple[str, tuple, dict]], rows: dict[str, list[dict]]) -> None:
    _together.batch([(name, start(*arguments, **more)) for name, arguments, more in jobs], rows)


KINDS = ("stock, warm compile cache", "stock, warm, stored tuning", "jit, config by hand", "persistent autotuner",
         "bundle, frozen", "bundle, preloaded", "stock jit, bundle")  # fmt: skip


def summary(rows: dict[str, list[dict]]) -> dict:
    """Return medians of what was measured so far."""
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
            if found
        },
    }
    preloads = [row["preload_ms"] for row in rows[KINDS[5]]]
    result["preload_of_the_whole_bundle_ms"] = round(statistics.median(preloads), 1) if preloads else None
    medians = {name: row["median_ms"] for name, row in result["first_launch"].items()}
    result["times_faster_than"] = {
        name: round(median / medians["bundle, frozen"], 1)
        for name, median in medians.items()
        if "bundle" not in name and "bundle, frozen" in medians
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--cold", type=int, default=2, help="processes that start without any cache")
    parser.add_argument("--others", type=int, default=5, help="processes of the other alternatives")
    parser.add_argument("--together", type=int, default=8, help="processes started together")
    parser.add_argument("--rounds", type=int, default=20, help="processes of stored tuning and of the bundle")
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    rows: dict[str, list[dict]] = {"stock, no cache": [], **{name: [] for name in KINDS}}
    todo: list[tuple[str, tuple, dict]] = []
    _machine.RESULTS = arguments.output
    with tempfile.TemporaryDirectory() as scratch:
        warm, stored, persistent, empty = (Path(scratch, name) for name in ("warm", "stored", "persistent", "empty"))
        bundle = arguments.bundle
        for number in range(arguments.cold):
            place = warm if number == 0 else Path(scratch, f"cold-{number}")
            batch([("stock, no cache", ("stock", place, bundle), {})], rows)
        for copy in (stored, persistent):
            shutil.copytree(warm, copy)
        by_hand = rows["stock, no cache"][0]["config"]
        empty.mkdir()
        packed = finish(start("bundle", empty, bundle))["config"]
        record = {"TRITON_CACHE_AUTOTUNING": "1"}
        finish(start("stock", stored, bundle, **record))  # writes Triton's record
        finish(start("persistent", persistent, bundle))  # writes the file of winners
        for number in range(arguments.rounds):
            jobs = [(KINDS[1], ("stock", stored, bundle), record), (KINDS[4], ("bundle", empty, bundle), {})]
            if number < arguments.others:
                jobs += [
                    (KINDS[0], ("stock", warm, bundle), {}),
                    (KINDS[2], ("jit", warm, bundle), {"CONFIG": by_hand}),
                    (KINDS[3], ("persistent", persistent, bundle), {}),
                    (KINDS[5], ("preload", empty, bundle), {}),
                    (KINDS[6], ("jit in bundle", empty, bundle), {"CONFIG": packed}),
                ]
            todo += jobs
            if len(todo) >= arguments.together or number + 1 == arguments.rounds:
                batch(todo, rows)
                todo = []
                _machine.write("first_launch", summary(rows))  # a run that is cut short keeps what it has
        # .nv is the CUDA driver's own cache
        assert {path.name for path in empty.iterdir()} <= {".nv"}, "a frozen process wrote something"
    print(_machine.write("first_launch", summary(rows)).read_text())


if __name__ == "__main__":
    main()
