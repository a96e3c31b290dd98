"""What a launch costs on the host, seen before: tcache against what a user would pick instead, in one process.

- ``jit``: ``kernel[grid](...)`` with a config picked by hand.
- ``stock``: ``triton.autotune``, its winner known.
- ``persistent``: an autotuner that keeps winners in a JSON file, as FlexGEMM's does (see ``_persistent.py``).
- ``tcache``: ``tcache.autotune``, its winner known.
- ``compiled``: ``CompiledKernel[grid](...)``, no arguments looked at.
- ``launcher``: the C launcher called with everything at hand: the floor.

Kernels have 3, 12 and 30 arguments besides their block size. Every kind runs in turn, several rounds; the median of the
rounds counts. ``--null`` runs on a driver that compiles and launches nothing, without a GPU; then the C launcher costs
nothing either, and what is left is dispatch. The second part launches 100,000 different sizes through one kernel.
Writes ``launch.json`` (``launch_null.json``) to ``--output`` (default: ``benchmarks/results``).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import _machine
from _machine import ROOT

ARGUMENTS = (3, 12, 30)
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def kernel({parameters}, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p1 + offsets, tl.load(p0 + offsets, mask=offsets < n) + {sum}, mask=offsets < n)
"""


def make(folder: Path, count: int) -> object:
    """Return a kernel of ``count`` arguments: two fifths pointers, the size ``n``, integers, a float."""
    pointers = max(2, count * 2 // 5)
    rest = [f"i{number}" for number in range(count - pointers - 1)]
    names = [f"p{number}" for number in range(pointers)] + ["n", *rest]
    path = folder / f"kernel_{count}.py"
    path.write_text(KERNEL.format(parameters=", ".join(names), sum=" + ".join(rest) or "0"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.kernel, pointers, len(rest)


def per_launch(call: object, launches: int, drain: object) -> float:
    """Return microseconds of host time per launch; the GPU's queue is emptied before and after, outside the time."""
    drain()
    begin = time.perf_counter()
    for _ in range(launches):
        call()
    seconds = time.perf_counter() - begin
    drain()
    return seconds / launches * 1e6


def _bench(call: object, quantiles: list[float]) -> list[float]:
    call()
    return [1.0 for _ in quantiles]


def dispatch(count: int, folder: Path, device: str, rounds: int, launches: int, drain: object) -> dict:
    import torch
    import triton
    from _persistent import persistent_autotune

    import tcache

    kernel, pointers, integers = make(folder, count)
    x = torch.zeros(4096, device=device)
    args = (*[x] * pointers, 1000, *[16 * number + 3 for number in range(integers)])
    configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (256, 512)]
    grid = (4,)

    options = {"configs": configs, "key": ["n"], "do_bench": _bench}
    stock, ours = triton.autotune(**options)(kernel), tcache.autotune(**options)(kernel)
    persistent = persistent_autotune(folder / "winners.json", **options)(kernel)
    compiled = kernel[grid](*args, BLOCK=256, num_warps=4)
    everything = (*args, 256)
    drv = triton.runtime.driver.active
    stream = drv.get_current_stream(drv.get_current_device())
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    kinds = {
        "jit": lambda: kernel[grid](*args, BLOCK=256, num_warps=4),
        "stock": lambda: stock[grid](*args),
        "persistent": lambda: persistent[grid](*args),
        "tcache": lambda: ours[grid](*args),
        "compiled": lambda: compiled[(4, 1, 1)](*everything),
        "launcher": lambda: run(4, 1, 1, stream, function, packed, None, None, None, *everything),
    }
    for call in kinds.values():
        for _ in range(50):
            call()
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, call in kinds.items():
            found[name].append(per_launch(call, launches, drain))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "us": {name: round(value, 2) for name, value in medians.items()},
        "of_jit": round(medians["tcache"] / medians["jit"], 3),
        "of_stock": round(medians["tcache"] / medians["stock"], 3),
        "of_persistent": round(medians["tcache"] / medians["persistent"], 3),
    }


class _Everything(dict):
    """A winner for every shape: what stock's table is after it tuned them all, without the memory."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> object:
        return self.config


def many(folder: Path, device: str, sizes: int, drain: object) -> dict:
    """Launch ``sizes`` different sizes once each: bucketed, from the nearest tuned shape, and stock with all tuned."""
    import torch
    import triton

    import tcache

    kernel, pointers, _ = make(folder, 3)
    x = torch.zeros(1 << 21, device=device)
    configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (256, 512)]
    options = {"configs": configs, "key": ["n"], "do_bench": _bench}
    stock = triton.autotune(**options)(kernel)
    stock.cache = _Everything(configs[0])
    bucketed = tcache.autotune(**options, buckets={"n": "pow2"})(kernel)
    nearest = tcache.autotune(**options, on_untuned="nearest")(kernel)
    tcache.activate(mode="tune")
    for power in range(21):
        bucketed[(1,)](*[x] * pointers, 1 << power)
    tcache.autotune(**options)(kernel)[(1,)](*[x] * pointers, 4096)  # one shape for the search of the nearest
    result: dict[str, object] = {"sizes": sizes}
    for name, tuned in (("stock", stock), ("bucketed", bucketed), ("nearest", nearest)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        slices = []
        tenth = sizes // (100 if name == "nearest" else 10)  # every size is looked up: a tenth of them is enough
        for start in range(0, tenth * 10, tenth):
            drain()
            begin = time.perf_counter()
            for n in range(start + 1, start + tenth + 1):
                tuned[(1,)](*[x] * pointers, n)
            slices.append((time.perf_counter() - begin) / tenth * 1e6)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        result[name] = {
            "sizes": tenth * 10,
            "us_median": round(statistics.median(slices), 2),
            "us_worst_tenth": round(max(slices), 2),
            "grown_mib": round(grown, 1),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--null", action="store_true", help="no GPU: a driver that launches nothing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launches", type=int, default=2000)
    parser.add_argument("--sizes", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(TCACHE_STORE=f"{scratch}/store", TRITON_CACHE_DIR=f"{scratch}/cache")
        device, drain = "cuda", None
        if arguments.null:
            os.environ["TCACHE_GPU_NAME"] = "NVIDIA H200"
            sys.path.insert(0, str(ROOT / "tests" / "contract"))
            import null_driver

            null = null_driver.activate()
            null.launcher_cls = lambda *_: lambda *_: None
            device, drain = "cpu", lambda: None
        else:
            import torch

            drain = torch.cuda.synchronize
        folder = Path(scratch)
        result = {
            "driver": "null: what is launched costs nothing" if arguments.null else "cuda",
            "rounds": arguments.rounds,
            "launches_a_round": arguments.launches,
            "arguments": {
                str(count): dispatch(count, folder, device, arguments.rounds, arguments.launches, drain)
                for count in ARGUMENTS
            },
            "many_sizes": many(folder, device, arguments.sizes, drain),
        }
    _machine.RESULTS = arguments.output
    print(_machine.write("launch_null" if arguments.null else "launch", result).read_text(), flush=True)
    os._exit(0)  # a null driver may go before its kernels


if __name__ == "__main__":
    main()
