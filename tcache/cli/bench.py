"""``tcache bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option, manifests, quiet_noise
from tcache.cli.output import print_json, progress, table

if TYPE_CHECKING:
    from tcache.bench.cases import Measured
    from tcache.manifest import Case, LoadedManifest


@click.command("bench")
@manifests()
@click.option("--case", "pattern", metavar="FILTER", show_envvar=True,
              help="Only cases that have this text or glob in them, such as softmax or 'matmul M=16 *'.")  # fmt: skip
@click.option("--store", type=click.Path(path_type=Path), envvar="TCACHE_STORE", show_envvar=True,
              help="Directory of best configs.  [default: the project's, then ~/.tcache/store]")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", show_envvar=True,
              help="Draw the roofline: intensity against rate, a roof for each dtype.")  # fmt: skip
@click.option("--no-compile", is_flag=True, show_envvar=True, help="Leave out torch.compile, which compiles each case.")
@click.option("--quick", is_flag=True, show_envvar=True, help="Fewer launches: a first impression, no figure to quote.")
@json_option
def command(
    manifests: tuple[Path, ...], pattern: str | None, store: Path | None, plot: Path | None, no_compile: bool,
    quick: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure every case of MANIFEST's `call:` items on this machine's GPU, against torch, torch.compile and what the
    GPU can do.

    Each result is compared with the wrapper's f_reference first. Then wrapper, f_torch and torch.compile(f_torch) are
    timed in turns, on several sets of random inputs. Before every launch a buffer of at least four times the L2
    cache is written and read. Launches are queued behind a kernel that spins, so that the time between the two
    CUDA events around one is the GPU's alone, without the host's; a launch of which the host was not ahead is not
    counted, and where most are not, the row says so. No CUDA graph is used: what runs is what a program runs.

    Bandwidth and rate follow from f_bytes and f_flops. Peaks are measured in the same run, at its beginning and its
    end, and the higher counts: a copy of 1 GiB (bytes read and written), and a matmul of 8192^3 of the case's dtype
    (float32: TF32), which is that of its first tensor of numbers. The bound is the longer of bytes at peak bandwidth
    and operations at peak rate. Configs are those of the store; nothing is tuned here.

    Exit code 1: a case failed or its result is wrong; the others' rows are printed all the same. 130: interrupted; the
    rows measured before are printed.
    """
    from tcache.active import activate
    from tcache.bench.cases import Options
    from tcache.bench.machine import Gpu, leave_if_faulted
    from tcache.bench.run import Run
    from tcache.bench.timing import QUICK, Plan
    from tcache.manifest import load_manifest

    quiet_noise()
    loaded = [load_manifest(path) for path in manifests]
    _need_place(plot)
    place = _store(store, loaded)
    machine = Gpu()
    activate(bundles=[], mode="lookup", store=place)
    cases = _chosen(loaded, machine.name, pattern)
    options = Options(QUICK if quick else Plan(), compiled=not no_compile)
    with progress("bench", len(cases), quiet=as_json) as step:
        run = Run(cases, machine, options)
        try:
            for case in cases:
                step(f"{case} {_outcome(run.add(case))}")
            run.finish()
        except KeyboardInterrupt:  # what was measured is printed
            run.stopped = f"interrupted after {len(run.found)} of {len(cases)} cases"
    document = run.document()
    if as_json:
        print_json(document)
    else:
        _print(document)
    drawn = _draw(plot, document)
    code = _report(document, run.stopped) or drawn
    leave_if_faulted(machine, code)
    if code:
        raise SystemExit(code)


def _need_place(plot: Path | None) -> None:
    from tcache.errors import OutputError

    if plot is not None and not plot.absolute().parent.is_dir():
        raise OutputError(f"{plot}: no such directory", "make it first, or choose another --plot")


def _store(store: Path | None, loaded: list[LoadedManifest]) -> Path | None:
    from tcache.errors import UsageError
    from tcache.project import find_project

    if store is not None and not store.is_dir():
        raise UsageError(f"{store}: no such store", "give a directory of best configs with --store")
    return store or find_project(loaded[0].path.parent).store


def _chosen(loaded: list[LoadedManifest], gpu: str, pattern: str | None) -> list[Case]:
    """Return the cases to measure; those that cannot be are told of on standard error."""
    from tcache.bench.run import left_out, select
    from tcache.errors import UsageError

    cases = [case for manifest in loaded for case in manifest.cases()]
    chosen = select(cases, gpu, pattern)
    others = left_out(cases, gpu, pattern)
    if not chosen and not others and pattern is not None and (some := select(cases, gpu)):
        raise UsageError(f"--case {pattern!r} matches no case", f"cases read like: {some[0]}")
    if not chosen:
        raise UsageError(
            f"there is nothing to bench on {gpu}: no case of a 'call:' item is for it",
            "launches spelled out with 'kernel:' or recorded have no companions to be compared with",
        )
    if others:
        click.echo(
            f"note: {others} cases of 'kernel:' or 'launches:' items are left out: bench measures calls", err=True
        )
    return chosen


def _draw(plot: Path | None, document: dict[str, Any]) -> int:
    """Write the picture, if one is wanted, once everything measured is printed; return the exit code."""
    from tcache.bench.plot import write_roofline
    from tcache.errors import OutputError

    if plot is None:
        return 0
    try:
        write_roofline(plot, document)
    except OutputError as error:
        click.echo(f"error: {error.message}", err=True)
        return 1
    return 0


def _outcome(found: Measured) -> str:
    own = found.times.get("tcache")
    if found.error is not None or own is None or own.ms is None:
        return f"failed: {found.error}"
    others = [
        f"{name} {timed.ms.median / own.ms.median:.2f}x"
        for name, timed in found.times.items()
        if name != "tcache" and timed.ms is not None
    ]
    return " ".join([_time(own.ms.median), *(f"({text})" for text in others)])


def _time(ms: float) -> str:
    return f"{ms * 1e3:.1f} µs" if ms < 1 else f"{ms:.3f} ms"


def _number(value: float | None, text: str, absent: str = "-") -> str:
    return absent if value is None else text.format(value)


def _microseconds(times: dict[str, Any]) -> str:
    """Return ``24.1 [23.9 24.5 25.0]``: median, and the 20th, 80th and 95th percentile."""
    if "median_ms" not in times:
        return "-"
    median, *others = (f"{times[f'{name}_ms'] * 1e3:.4g}" for name in ("median", "p20", "p80", "p95"))
    return f"{median} [{' '.join(others)}]" + ("" if times["gpu_only"] else " with host")


def _resources(kernels: list[dict[str, Any]]) -> str:
    """Return registers, spills and shared memory of the kernel that uses the most registers."""
    top: dict[str, Any] = max(kernels, key=lambda each: each["registers"] or 0, default={})
    if top.get("registers") is None:
        return "-"
    more = f" of {len(kernels)}" if len(kernels) > 1 else ""
    return f"{top['registers']}/{top['spills']}/{(top['shared'] or 0) / 1024:.0f}K{more}"


def _cells(row: dict[str, Any]) -> list[str]:
    configs = [each for each in row["launches"] if each["chosen"]]
    return [
        " ".join(f"{name}={value}" for name, value in row["shape"].items()),
        _microseconds(row["times"].get("tcache", {})),
        _number(row.get("speedup_over_torch"), "{:.2f}x"),
        _number(row.get("speedup_over_compiled"), "{:.2f}x"),
        _number(row.get("gbps"), "{:.0f}") + _number(row.get("percent_of_bandwidth"), " {:.0f}%", ""),
        _number(row.get("tflops"), "{:.3g}")
        + _number(row.get("percent_of_flops"), f" {{:.0f}}% {row.get('peak')}", ""),
        _number(row.get("intensity"), "{:.3g}"),
        _number(row.get("fraction"), "{:.2f}") + (f" {row['verdict']}" if row.get("verdict") else ""),
        _resources(row["launches"]),
        "FAILED" if row["error"] is not None else _number(row["largest_error"], "{:.2g}"),
        "; ".join(f"{(each['config'] or '-').removesuffix(' num_ctas=1')} ({each['chosen']})" for each in configs)
        or "-",
    ]


_COLUMNS = [
    "shape", "µs [p20 p80 p95]", "torch", "compile", "GB/s of copy", "TFLOP/s of matmul", "FLOP/B", "of bound",
    "regs/spills/shared", "error", "config",
]  # fmt: skip


def _print(document: dict[str, Any]) -> None:
    machine, used = document["machine"], document["peaks"]["used"]
    rates = ", ".join(f"{name} {value:.1f} TFLOP/s" for name, value in used["tflops"].items())
    ridges = ", ".join(f"{name} {value * 1e3 / used['gbps']:.0f}" for name, value in used["tflops"].items())
    for kernel in dict.fromkeys(row["kernel"] for row in document["rows"]):
        table(kernel, _COLUMNS, [_cells(row) for row in document["rows"] if row["kernel"] == kernel])
        click.echo("")
    versions = [f"{name} {machine[name]}" for name in ("driver", "torch", "cuda", "triton") if machine.get(name)]
    click.echo(", ".join([machine["gpu"], *versions]))
    click.echo(f"measured peaks: copy {used['gbps']:.0f} GB/s; matmul {rates}; ridge at {ridges} FLOP/B")
    for name, why in used["missing"].items():
        click.echo(f"note: no {name} peak, bfloat16 stands in: {why}", err=True)


def _report(document: dict[str, Any], stopped: str | None) -> int:
    """Tell on standard error what went wrong, and return the exit code."""
    rows = document["rows"]
    untuned = [row for row in rows if any(each["chosen"] in ("nearest", "first") for each in row["launches"])]
    if untuned:
        click.echo(f"note: {len(untuned)} cases ran configs not tuned for their shape: `tcache tune` first", err=True)
    if stopped is not None:
        click.echo(f"note: {stopped}", err=True)
    failed = [row for row in rows if row["error"] is not None]
    for row in failed:
        click.echo(f"error: {row['where']}: {row['case']}: {row['error']}", err=True)
    if stopped is not None and stopped.startswith("interrupted"):
        return 130
    return int(bool(failed))
