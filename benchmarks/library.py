"""The kernel library on this machine's GPU: every case of its manifests, held against what it must reach on an H200.

Runs what `tcache bench` runs, with alternatives more where the targets ask for them: torch's flash attention; the
cuBLAS calls of a grouped GEMM with the group sizes known to the host; and beside what reads weights or keys once for a
few rows a copy that moves as many bytes, which is what the memory does at that very size, launch and ramp included.
Cases that count for a target come first. Writes ``library.json`` to ``--output`` (default: ``benchmarks/results``)
after each case: what was measured before the process was cut off is kept, and ``--resume`` goes on from there. Every
row has the peaks of its own run. Exits 1 when a case failed or a target that was measured is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _machine
from _machine import ROOT
from _targets import judge, wanted

from tcache._fs import atomic_write
from tcache.active import activate
from tcache.bench.cases import Measured, Options
from tcache.bench.machine import Gpu, leave_if_faulted
from tcache.bench.plot import write_roofline
from tcache.bench.run import Run, select
from tcache.bench.timing import QUICK, Plan
from tcache.errors import TcacheError
from tcache.manifest import load_manifest
from tcache.replay.companions import call_companion
from tcache.replay.launches import load_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache.manifest import Case


def more(case: Case, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return what the targets compare with beside the wrapper's own torch function."""
    import torch

    name = case.ref.rpartition(":")[2]
    if name in ("attention", "attention_forward") and not case.scope.get("past"):
        return {"flash": lambda: _flash(**given)}
    if name == "grouped_gemm":
        x, w = given["x"], given["w"]
        bounds = given["offsets"].tolist()
        y = torch.empty((x.shape[0], w.shape[2]), device=x.device, dtype=x.dtype)
        parts = [(x[a:b], w[e], y[a:b]) for e, (a, b) in enumerate(itertools.pairwise(bounds)) if b > a]
        return {"cublas": lambda: [torch.matmul(rows, weight, out=out) for rows, weight, out in parts]}
    if name in ("matmul_decode", "decode_attention"):
        return {"copy": _copy(call_companion(case, load_target(case), "bytes", given), given)}
    return {}


def _copy(moved: int, given: dict[str, Any]) -> Callable[[], Any]:
    """Return a copy on the arguments' device that reads half of so many bytes and writes the other half."""
    import torch

    device = next(value.device for value in given.values() if isinstance(value, torch.Tensor))
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _flash(q: Any, k: Any, v: Any, causal: bool = True, scale: float | None = None) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def cases_of(arguments: argparse.Namespace, gpu: str) -> list[Case]:
    """Return the cases to measure, those that count for a target first; a case that two manifests have, once."""
    found: dict[tuple[Any, ...], Case] = {}
    for path in arguments.manifests or sorted((ROOT / "shape_manifests").glob("*.yaml")):
        try:
            for case in select(load_manifest(path).cases(), gpu, arguments.case):
                spelled = json.dumps([str(spec) for spec in case.item.args.items()])
                found.setdefault((case.ref, tuple(case.scope.items()), spelled), case)
        except TcacheError as error:
            print(f"note: {path.name} is left out: {error.message}", file=sys.stderr)
    return sorted(found.values(), key=lambda case: not wanted(case.ref.rpartition(":")[2], case.scope))


def identity(row: dict[str, Any]) -> tuple[str, str]:
    return row["case"], row["where"]


class Report:
    """The result file: rows kept from before, and those of this run.

    Args:
        path: where it is written.
        kept: rows of earlier runs.
    """

    def __init__(self, path: Path, kept: list[dict[str, Any]]) -> None:
        self.path, self.kept = path, kept

    def write(self, run: Run, left: list[Case]) -> dict[str, Any]:
        """Write everything known so far; ``left`` is what was not measured."""
        document = run.document()
        for row in document["rows"]:
            row["where"] = _inside(row["where"])
        rows = [*self.kept, *document["rows"]]
        result = {
            "gpu": document["machine"], "peaks": document["peaks"], "targets": judge(rows),
            "not_measured": [str(case) for case in left], "rows": rows,
        }  # fmt: skip
        text = json.dumps({"machine": _machine.describe(), **result}, indent=1) + "\n"
        atomic_write(self.path, text.encode())
        return result


def _inside(where: str) -> str:
    """Return a place in a manifest relative to the repository: no result names a machine's directories."""
    return where.removeprefix(f"{ROOT}/")


def outcome(found: Measured) -> str:
    own = found.times.get("tcache")
    if own is None or own.ms is None:
        return f"failed: {found.error}"
    others = [f"{n} {t.ms.median / own.ms.median:.2f}x" for n, t in found.times.items() if n != "tcache" and t.ms]
    return f"{own.ms.median * 1e3:.1f} us {' '.join(others)}" + (f" {found.error}" if found.error else "")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifests", nargs="*", type=Path, help="default: all of shape_manifests")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds: begin no case after that time")
    parser.add_argument("--case", help="only cases that have this text or glob in them")
    parser.add_argument("--store", type=Path, default=ROOT / "best_configs")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--quick", action="store_true", help="fewer launches")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result file has")
    parser.add_argument("--plot", type=Path, help="write the roofline there")
    parser.add_argument(
        "--join", nargs="+", type=Path, metavar="FILE", help="measure nothing: join results of one machine's GPUs"
    )
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    return parser.parse_args()


def join(arguments: argparse.Namespace) -> int:
    """Write one result from several: rows keep the peaks of their own runs, peaks and roofs are the highest of all."""
    found = [json.loads(path.read_text()) for path in arguments.join]
    rows = [row for document in found for row in document["rows"]]
    used = [document["peaks"]["used"] for document in found]
    rates = {name: max(one["tflops"].get(name, 0.0) for one in used) for one in used for name in one["tflops"]}
    peaks = {"runs": [document["peaks"] for document in found],
             "used": {"gbps": max(one["gbps"] for one in used), "tflops": rates, "missing": {}}}  # fmt: skip
    result = {
        "machine": found[0]["machine"], "gpu": found[0]["gpu"], "peaks": peaks, "targets": judge(rows),
        "not_measured": [case for document in found for case in document["not_measured"]], "rows": rows,
    }  # fmt: skip
    atomic_write(arguments.output / "library.json", (json.dumps(result, indent=1) + "\n").encode())
    if arguments.plot:
        write_roofline(arguments.plot, {"machine": result["gpu"], "peaks": peaks, "rows": rows})
    return tell(result["targets"])


def tell(targets: list[dict[str, Any]]) -> int:
    """Print each target and its figure; return 1 when one is missed."""
    for row in targets:
        verdict = {True: "holds", False: "MISSED", None: "not measured"}[row["passed"]]
        worst = f" ({row['shapes'][0]['kernel']} {row['shapes'][0]['shape']})" if row["shapes"] else ""
        print(f"{row['target']}: {row['figure']} of {row['least']}: {verdict}{worst}")
    return int(any(row["passed"] is False for row in targets))


def main() -> int:
    begin = time.monotonic()
    arguments = parsed()
    if arguments.join:
        return join(arguments)
    machine = Gpu()
    activate(bundles=[], mode="lookup", store=arguments.store)
    path = arguments.output / "library.json"
    kept = json.loads(path.read_text())["rows"] if arguments.resume and path.is_file() else []
    kept = [row for row in kept if row["error"] is None]
    known = {identity(row) for row in kept}
    cases = [case for case in cases_of(arguments, machine.name) if (str(case), _inside(case.where)) not in known]
    plan = QUICK if arguments.quick else Plan()
    run = Run(cases, machine, Options(plan, compiled=not arguments.no_compile, more=more))
    report = Report(path, kept)
    left = list(cases)
    while left and run.stopped is None and time.monotonic() - begin < arguments.budget:
        case = left.pop(0)
        found = run.add(case)
        report.write(run, left)
        print(f"[{len(cases) - len(left)}/{len(cases)}] {case}: {outcome(found)}", flush=True)
    run.finish()
    result = report.write(run, left)
    if arguments.plot:
        write_roofline(arguments.plot, {**run.document(), "rows": result["rows"]})
    missed = tell(result["targets"])
    if run.stopped:
        print(f"note: {run.stopped}", file=sys.stderr)
    if left:
        print(f"note: {len(left)} cases were not measured: run it again with --resume", file=sys.stderr)
    failed = [row["case"] for row in result["rows"] if row["error"] is not None]
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    code = int(bool(failed) or missed)
    leave_if_faulted(machine, code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
