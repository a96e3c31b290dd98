"""How long a service of 50 kernels takes to load them all, on a GPU: ``tcache.preload`` against first launches.

25 fused elementwise kernels and 25 small matmuls, each with a text of its own, are warmed up and packed here. Then
fresh processes, in turn, each alone, after torch, Triton and the CUDA context are there:

- ``preload``: ``tcache.preload()`` of the bundle, frozen; then each kernel is launched once and its output checked.
- ``first launches, bundle``: each kernel is launched once from the bundle, nothing is preloaded.
- ``first launches, stock``: plain ``triton.jit`` with a warm compile cache, each kernel launched once.

Writes ``preload.json`` to ``--output`` (default: ``benchmarks/results``). ``--null`` loads nothing, without a GPU.

    python benchmarks/preload.py [--processes 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import _machine
import _together
from _machine import tcache
from _together import finish, frozen

if TYPE_CHECKING:
    import subprocess

KERNELS = 50
HEAD = """\
import torch
import triton
import triton.language as tl

import tcache
"""
ELEMENTWISE = """

@tcache.autotune(configs=[triton.Config({{"BLOCK": 1024}}, num_warps=4)], key=["n"])
@triton.jit
def chain_{i}(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n)
    tl.store(y_ptr + o, tl.maximum(x * {i} + 1, 0.0), mask=o < n)


def launch_{i}(x):
    y = torch.empty_like(x)
    chain_{i}[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel())
    return y


def reference_{i}(x):
    return torch.relu(x * {i} + 1)
"""
MATMUL = """

@tcache.autotune(configs=[triton.Config({{"BLOCK": 64}}, num_warps=4)], key=["n"])
@triton.jit
def product_{i}(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for step in range(0, n, BLOCK):
        a = tl.load(x_ptr + row * n + step + k[None, :])
        b = tl.load(x_ptr + (step + k[:, None]) * n + column)
        total = tl.dot(a, b, total)
    tl.store(y_ptr + row * n + column, total + {i})


def launch_{i}(x):
    y = torch.empty_like(x)
    n = x.shape[0]
    product_{i}[(n // 64, n // 64)](x, y, n)
    return y


def reference_{i}(x):
    return (x.float() @ x.float() + {i}).to(x.dtype)
"""
PROCESS = """
import json, os, sys, time
import torch, triton, tcache
kind, folder, null = sys.argv[1], sys.argv[2], sys.argv[3] == "null"
sys.path[:0] = [folder, os.path.join(os.environ["ROOT"], "tests", "contract")]
if kind == "stock":
    tcache.autotune = lambda **options: (lambda kernel: triton.autotune(**options)(kernel))
if null:
    import null_driver
    null_driver.activate()
import kernels50
compiled = []
triton.knobs.compilation.listener = lambda **event: event["cache_hit"] or compiled.append(event["src"].name)
device = "cpu" if null else "cuda"
x = torch.randn(256, 256, device=device).to(torch.bfloat16)
if not null:
    torch.cuda.synchronize()
answer = {"preload_ms": None}
print("ready", flush=True)
sys.stdin.readline()
if kind == "preload":
    done = tcache.preload()
    assert len(done.loaded) == int(os.environ["KERNELS"]) and not done.failed, done
    answer["preload_ms"] = done.seconds * 1e3
begin = time.perf_counter()
results = [getattr(kernels50, f"launch_{i}")(x) for i in range(int(os.environ["KERNELS"]))]
if not null:
    torch.cuda.synchronize()
answer["launches_ms"] = (time.perf_counter() - begin) * 1e3
assert not compiled, compiled
for i, result in enumerate([] if null else results):
    torch.testing.assert_close(result, getattr(kernels50, f"reference_{i}")(x), rtol=1e-2, atol=1e-1)
print(json.dumps(answer))
"""


def project(folder: Path) -> None:
    """Write the module and its manifest."""
    texts = [(ELEMENTWISE if i % 2 else MATMUL).format(i=i) for i in range(KERNELS)]
    (folder / "kernels50.py").write_text(HEAD + "".join(texts))
    items = [
        {"call": f"kernels50.py:launch_{i}", "args": {"x": {"shape": ["n", "n"], "dtype": "bfloat16"}},
         "cases": [{"n": 256}]}
        for i in range(KERNELS)
    ]  # fmt: skip
    (folder / "m.yaml").write_text(json.dumps({"version": 1, "gpus": ["NVIDIA H200"], "kernels": items}))


def start(kind: str, folder: Path, cache: Path, null: str) -> subprocess.Popen:
    served = frozen(folder / "bundle") if kind != "stock" else {}
    return _together.start(PROCESS, kind, str(folder), null, cache=cache, KERNELS=str(KERNELS), **served)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--together", type=int, default=12, help="processes started together")
    parser.add_argument("--null", action="store_true")
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    _machine.RESULTS = arguments.output
    rows: dict[str, list[dict]] = {"preload": [], "bundle": [], "stock": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder, warm, empty = Path(scratch, "app"), Path(scratch, "warm"), Path(scratch, "empty")
        for place in (folder, empty):
            place.mkdir()
        project(folder)
        tcache("warmup", "m.yaml", cache=warm, cwd=folder)
        tcache("pack", "m.yaml", "-o", "bundle", cache=warm, cwd=folder)
        null = "null" if arguments.null else "gpu"
        finish(start("stock", folder, warm, null))  # native helpers
        todo = [(kind, warm if kind == "stock" else empty) for _ in range(arguments.processes) for kind in rows]
        for begin in range(0, len(todo), arguments.together):
            jobs = todo[begin : begin + arguments.together]
            _together.batch([(kind, start(kind, folder, place, null)) for kind, place in jobs], rows)
        left = {path.name for path in empty.iterdir()}
        assert left <= {".nv"}, f"a frozen process wrote {left}"  # .nv is the CUDA driver's own cache

    def median(kind: str, what: str) -> float:
        return round(statistics.median(row[what] for row in rows[kind]), 1)

    result = {
        "kernels": KERNELS,
        "processes": arguments.processes,
        "preload_ms": median("preload", "preload_ms"),
        "preload_min_max_ms": [round(f(row["preload_ms"] for row in rows["preload"]), 1) for f in (min, max)],
        "launches_after_preload_ms": median("preload", "launches_ms"),
        "first_launches_bundle_ms": median("bundle", "launches_ms"),
        "first_launches_stock_warm_cache_ms": median("stock", "launches_ms"),
    }
    result["stock_of_preload_and_launches"] = round(
        result["first_launches_stock_warm_cache_ms"] / (result["preload_ms"] + result["launches_after_preload_ms"]), 2
    )
    print(_machine.write("preload_null" if arguments.null else "preload", result).read_text())


if __name__ == "__main__":
    main()
