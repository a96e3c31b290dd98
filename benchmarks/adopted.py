"""Published kernels under ``tcache.adopt``, on a GPU: tune in one process, restart, and nothing is tuned again.

Runs operators of fla-core and liger-kernel, forward and backward, each process fresh, one Triton cache for all:

- ``tune``: adopted, empty store. Every shape is tuned, and every config compiled.
- ``restart``: adopted, same store. Asserts that every shape is a hit, nothing is tuned and nothing is benchmarked.
- ``lookup``: the same with ``TCACHE_MODE=lookup``, then a shape that was never tuned: served without a benchmark.
- ``stock``: the libraries as they are, in the compile cache that ``tune`` left: what ``triton.autotune`` does in every
  process. It also writes the ``.autotune.json`` records that fla-core asks Triton for (``cache_results=True``).
- ``recorded``: the libraries as they are, once more: fla-core's kernels now find those records, liger-kernel's tune.

Seconds are counted from when the libraries are imported and the CUDA context and inputs are there until all operators
have finished, ``adopt`` included. Every output and gradient is compared with a plain PyTorch reference in float32, and
with those of the stock process. Both libraries must be importable (``pip install fla-core liger-kernel einops``).
Writes ``adopted.json`` to ``--output`` (default: ``benchmarks/results``).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _machine
import _operators
from _machine import ROOT
from _operators import OPERATORS, with_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = {"fla": ("fla.ops", "fla.modules"), "liger_kernel": ("liger_kernel.ops",)}
TOLERANCE = 0.02
"""Largest allowed root mean square of a difference, divided by that of the reference (fla-core's tests: up to 0.02)."""


def child(kind: str, place: Path) -> None:
    """Run every operator once in this process and write what was found to ``place``."""
    import torch
    import triton
    import triton.testing

    import tcache
    from tcache._triton.bench import Sampler

    for name in ("fla.ops", "fla.modules", "liger_kernel.ops", "liger_kernel.ops.mlp", "liger_kernel.ops.fused_moe"):
        __import__(name)
    benchmarks = _count(Sampler, "__call__"), _count(triton.testing, "do_bench")
    shapes: set[str] = set()
    if kind in ("tune", "restart", "lookup"):
        tcache.activate(on_select=lambda gpu, kernel, shape, *_: shapes.add(f"{kernel.ref} [{shape}] {gpu}"))
    made = {operator.__name__: operator() for operators in OPERATORS.values() for operator in operators}
    late = _operators.dyt(2048) if kind == "lookup" else None
    synchronize = torch.cuda.synchronize if _operators.DEVICE == "cuda" else lambda: None
    synchronize()
    upstream = _upstream()
    adopted, outputs, each = [], {}, {}
    begin = time.perf_counter()
    if kind in ("tune", "restart", "lookup"):
        adopted = sorted({name for parts in LIBRARIES.values() for part in parts for name in tcache.adopt(part)})
    adopting = time.perf_counter() - begin
    for name, (inputs, launch, _) in made.items():
        start = time.perf_counter()
        outputs[name] = with_gradients(launch, inputs)
        synchronize()
        each[name] = round(time.perf_counter() - start, 3)
        print(f"  {kind}: {name} {each[name]:.2f} s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - begin
    found = {
        "seconds": seconds,
        "adopt_seconds": adopting,
        "each": each,
        "adopted": adopted,
        "shapes": sorted(shapes),
        "stats": tcache.stats(),
        "benchmarks": sum(calls[0] for calls in benchmarks),
        "upstream_untouched": _untouched(upstream),
    }
    if late is not None:
        found["never_tuned_shape"] = {
            "error": max(_errors(with_gradients(late[1], late[0]), _reference(*late)).values()),
            "nearest": tcache.stats()["nearest"],
            "tuned": tcache.stats()["tuned"],
            "benchmarks": sum(calls[0] for calls in benchmarks),
        }
    found["reference_error"] = {
        name: max(_errors(outputs[name], _reference(*parts)).values()) for name, parts in made.items()
    }
    torch.save({name: {k: v.cpu() for k, v in row.items()} for name, row in outputs.items()}, place / f"{kind}.pt")
    (place / f"{kind}.json").write_text(json.dumps(found))


def _reference(inputs: list[Any], _launch: Callable[..., Any], reference: Callable[..., Any]) -> dict[str, Any]:
    return with_gradients(reference, [value.detach().float().requires_grad_() for value in inputs])


def _errors(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Return the root mean square of each difference, divided by that of ``theirs``; NaN becomes infinite."""
    found = {}
    for name, value in mine.items():
        left, right = value.float(), theirs[name].float()
        error = float((left - right).square().mean().sqrt() / right.square().mean().sqrt().clamp_min(1e-12))
        found[name] = error if error == error else float("inf")  # noqa: PLR0124 - NaN
    return found


def _count(owner: Any, name: str) -> list[int]:
    """Count the calls of a function in the first item of the list returned."""
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def _upstream() -> dict[str, Any]:
    """Return Triton's own objects: the decorator, the class and everything in it."""
    import triton

    found = {"triton.autotune": triton.autotune, "Autotuner": triton.runtime.autotuner.Autotuner}
    found |= {"module autotune": triton.runtime.autotuner.autotune, "triton.heuristics": triton.heuristics}
    for owner in (
        triton.runtime.autotuner.Autotuner,
        triton.runtime.jit.JITFunction,
        triton.runtime.jit.KernelInterface,
    ):
        found |= {f"{owner.__name__}.{name}": value for name, value in vars(owner).items()}
    return found


def _untouched(before: dict[str, Any]) -> bool:
    """Return whether they are the same objects still, and whether a kernel decorated now is plain upstream."""
    import triton
    from _stock import kernel

    after = _upstream()
    same = before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    return same and type(kernel) is triton.runtime.autotuner.Autotuner


def process(kind: str, scratch: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {"TRITON_CACHE_DIR": str(scratch / "cache"), "TCACHE_STORE": str(scratch / "store")}
    environment["TCACHE_MODE"] = "lookup" if kind == "lookup" else "tune"
    environment["FLA_CACHE_RESULTS"] = "1"  # fla-core's default
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    print(f"{kind} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--child", kind, str(scratch)]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"process {kind!r} ended with {done.returncode}")
    found: dict[str, Any] = json.loads((scratch / f"{kind}.json").read_text())
    print(f"{kind}: {found['seconds']:.2f} s, {found['benchmarks']} benchmarks", file=sys.stderr, flush=True)
    return found


def compare(scratch: Path, mine: str, theirs: str) -> dict[str, dict[str, Any]]:
    """Compare the outputs that two processes wrote."""
    import torch

    left, right = (torch.load(scratch / f"{kind}.pt", weights_only=True) for kind in (mine, theirs))
    return {
        name: {
            "error": round(max(_errors(left[name], right[name]).values()), 6),
            "identical": all(bool(torch.equal(left[name][part], right[name][part])) for part in left[name]),
        }
        for name in left
    }


def check(rows: dict[str, list[dict[str, Any]]], differences: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Assert everything that this benchmark is there to prove."""
    first = rows["tune"][0]
    count = len(first["shapes"])
    for library in LIBRARIES:
        kernels = {shape.split(" ")[0] for shape in first["shapes"] if shape.startswith(library)}
        assert len(kernels) >= 4, (library, sorted(kernels))
    assert first["stats"]["tuned"] == count, (first["stats"], count)
    for kind in ("restart", "lookup"):
        for row in rows[kind]:
            assert row["shapes"] == first["shapes"], set(row["shapes"]) ^ set(first["shapes"])
            others = {name: value for name, value in row["stats"].items() if value and name != "hits"}
            assert row["stats"]["hits"] == count, (kind, row["stats"], count)
            assert not others, (kind, others)
            assert row["benchmarks"] == 0, (kind, row["benchmarks"])
    late = rows["lookup"][0]["never_tuned_shape"]
    assert late["nearest"] > 0, late
    assert late["tuned"] == late["benchmarks"] == 0, late
    assert late["error"] < TOLERANCE, late
    for kind, found in rows.items():
        for row in found:
            assert row["upstream_untouched"], kind
            assert max(row["reference_error"].values()) < TOLERANCE, (kind, row["reference_error"])
    for pair, found in differences.items():
        assert max(row["error"] for row in found.values()) < TOLERANCE, (pair, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="restarts, at least 2")
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], Path(arguments.child[1]))
        return
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        rows: dict[str, list[dict[str, Any]]] = {"tune": [process("tune", scratch)], "restart": []}
        for kind in ("restart", "stock", "restart", "recorded", *["restart"] * (arguments.rounds - 2), "lookup"):
            rows.setdefault(kind, []).append(process(kind, scratch))
        pairs = (("restart", "tune"), ("restart", "stock"), ("lookup", "restart"))
        differences = {f"{mine} against {theirs}": compare(scratch, mine, theirs) for mine, theirs in pairs}
    result = summary(rows, differences)
    print(json.dumps(result), file=sys.stderr, flush=True)  # also of a run that does not pass
    check(rows, differences)
    _machine.RESULTS = arguments.output
    print(_machine.write("adopted", result).read_text())


def summary(rows: dict[str, list[dict[str, Any]]], differences: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    first, last = rows["tune"][0], rows["restart"][-1]
    median = {kind: round(statistics.median(row["seconds"] for row in found), 3) for kind, found in rows.items()}
    return {
        "libraries": {name: importlib.metadata.version(name) for name in ("fla-core", "liger-kernel")},
        "operators": {library: [one.__name__ for one in operators] for library, operators in OPERATORS.items()},
        "processes": {kind: len(found) for kind, found in rows.items()},
        "kernels_adopted": len(first["adopted"]),
        "kernels_launched": sorted({shape.split(" ")[0] for shape in first["shapes"]}),
        "shapes": len(first["shapes"]),
        "stats": {kind: found[-1]["stats"] for kind, found in rows.items()},
        "benchmarks": {kind: found[-1]["benchmarks"] for kind, found in rows.items()},
        "seconds": {kind: [round(row["seconds"], 3) for row in found] for kind, found in rows.items()},
        "median_seconds": median,
        "stock_over_restart": round(median["stock"] / median["restart"], 2),
        "recorded_over_restart": round(median["recorded"] / median["restart"], 2),
        "adopt_seconds": round(statistics.median(row["adopt_seconds"] for row in rows["restart"]), 4),
        "seconds_each": {kind: found[-1]["each"] for kind, found in rows.items()},
        "never_tuned_shape_in_lookup_mode": rows["lookup"][0]["never_tuned_shape"],
        "tolerance": TOLERANCE,
        "reference_error": {name: round(error, 5) for name, error in last["reference_error"].items()},
        "differences": differences,
        "upstream_untouched": all(row["upstream_untouched"] for found in rows.values() for row in found),
    }


if __name__ == "__main__":
    main()
