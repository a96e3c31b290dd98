"""``tcache warmup``."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option, manifests, select, selection_options, untuned_option
from tcache.cli.output import growing_progress, print_json, table
from tcache.cli.resolve import report_untuned

if TYPE_CHECKING:
    from pathlib import Path

    from tcache.errors import TcacheError
    from tcache.warmup import Outcome


@click.command("warmup")
@manifests()
@selection_options
@click.option("--jobs", "-j", type=click.IntRange(min=1), show_envvar=True,
              help="Kernels to compile at once, a process each.  [default: the cores of this machine]")  # fmt: skip
@untuned_option("tune", more_help=" tune: tune them first, on this machine's GPU.")
@json_option
def command(
    manifests: tuple[Path, ...], gpus: tuple[str, ...], target: str | None, store: Path | None, cache_dir: Path | None,
    jobs: int | None, untuned: str, as_json: bool,
) -> None:  # fmt: skip
    """Compile the winners of MANIFEST, and only them, into the Triton cache. Needs no GPU; entries that are there are
    left alone, so a second run compiles nothing and one that was killed goes on where it was.

    Compiling begins while the rest of MANIFEST is still being resolved.

    A case that cannot be replayed and a kernel that cannot be compiled do not stop the others: they are listed at the
    end, with exit code 1.
    """
    from tcache.compile import cores, peak_memory
    from tcache.warmup import WarmUp

    begin = time.perf_counter()
    tuned = tune_first(manifests, gpus, target, store, quiet=as_json) if untuned == "tune" else 0
    tuning = time.perf_counter() - begin
    selection = select(manifests, gpus, target, store, cache_dir, new_store=untuned == "tune")
    broken: list[TcacheError] = []
    jobs = jobs or cores()
    failed: list[Outcome] = []
    resolving = 0.0
    with growing_progress("compiling", quiet=as_json) as shown:

        def done(outcome: Outcome) -> None:
            launch = outcome.resolved
            shown.expect(warming.count, more=not resolving)
            if outcome.error is not None:
                failed.append(outcome)
            state = f"failed: {outcome.error}" if outcome.error else f"{outcome.seconds:.1f} s"
            shown.step(f"{launch.compilation.name} {launch.gpu.target} {launch.config or ''} {state}")

        with WarmUp(jobs, done) as warming:
            resolved, missing = selection.resolve("error" if untuned == "tune" else untuned, broken, warming.see)
            if broken and not resolved and not missing:
                raise broken[0]  # nothing is left to go on with
            resolving = time.perf_counter()
            shown.expect(warming.count)
            outcomes = warming.finish()
    end = time.perf_counter()
    entries = len({launch.entry for launch in resolved})
    reasons = list(dict.fromkeys(error.message for error in broken))
    if as_json:
        print_json(
            {
                "launches": len(resolved),
                "entries": entries,
                "compiled": len(outcomes) - len(failed),
                "failed": [_row(row) for row in failed],
                "broken": reasons,
                "untuned": [str(row) for row in missing],
                "jobs": jobs,
                "tuned_cases": tuned,
                "seconds": round(end - begin, 3),
                "tuning_seconds": round(tuning, 3),
                "resolving_seconds": round(resolving - begin - tuning, 3),
                "compiling_seconds": round(end - (warming.begun or end), 3),
                "workers": len({row.worker for row in outcomes}),
                "peak_mb": {
                    "parent": round(peak_memory() / 2**20),
                    "worker": max((row.peak for row in outcomes), default=0) >> 20,
                },
                "kernels": [_row(row) for row in outcomes],
            }
        )
    else:
        _print_kernels(outcomes)
        click.echo(
            f"{len(resolved)} launches, {entries} entries: {len(outcomes) - len(failed)} compiled, "
            f"{entries - len(outcomes)} present before, {len(failed)} failed, {end - begin:.1f} s with {jobs} at once"
        )
        for notice in sorted({launch.notice for launch in resolved if launch.notice}):
            click.echo(f"note: {sum(launch.notice == notice for launch in resolved)} launches {notice}")
    for row in failed:
        click.echo(f"error: {row.resolved.where}: {row.resolved.kernel} [{row.resolved.config}]: {row.error}", err=True)
    for reason in reasons:
        click.echo(f"error: {reason}", err=True)
    report_untuned(missing)
    if failed or broken:
        raise SystemExit(1)


def tune_first(
    manifests: tuple[Path, ...], gpus: tuple[str, ...], target: str | None, store: Path | None, *, quiet: bool
) -> int:
    """Tune what has no best config on this machine's GPU, and return how many cases that took.

    Raises:
        UsageError: something has none, and there is no GPU here, or it is none of those asked for.
    """
    from tcache.cli.tune import run_tuning
    from tcache.errors import UsageError
    from tcache.supervise import gpu_names, visible_gpus

    selection = select(manifests, gpus, target, store, None, new_store=True)
    _, missing = selection.resolve("error", [])
    if not missing:
        return 0
    if not selection.stores:
        raise UsageError("this user has no home directory to keep a store in", "give one with --store")
    alias = os.environ.get("TCACHE_GPU_NAME")
    here = {alias} if alias else gpu_names()
    here = {selection.aliases.get(name, name) for name in here}
    wanted = sorted({row.gpu.name for row in missing})
    hint = "run `tcache tune` on the GPU the best configs are for, or pass --untuned nearest or default"
    if here and not here & set(wanted):
        raise UsageError(
            f"{len(missing)} launches have no best config on {', '.join(wanted)}; this machine has "
            f"{', '.join(sorted(here))}",
            hint,
        )
    lines = {row.where for row in missing if not here or row.gpu.name in here}
    cases = selection.cases()
    chosen = [number for number, case in enumerate(cases) if case.where in lines]
    paths = [manifest.path for manifest in selection.manifests]
    try:
        results, _ = run_tuning(paths, cases, chosen, selection.stores[0].root, visible_gpus()[:1], quiet=quiet)
    except UsageError as error:
        raise UsageError(error.message, hint) from error
    for result in results:
        if result.error:
            click.echo(f"error: {cases[result.case].where}: {cases[result.case]}: {result.error}", err=True)
    return len(chosen)


def _row(outcome: Outcome) -> dict[str, Any]:
    launch = outcome.resolved
    return {
        "entry": launch.entry, "kernel": launch.kernel, "target": str(launch.gpu.target), "config": launch.config,
        "seconds": round(outcome.seconds, 3), "error": outcome.error,
    }  # fmt: skip


def _print_kernels(outcomes: list[Outcome]) -> None:
    """Print what each kernel took, the longest first."""
    kernels: dict[tuple[str, str], list[float]] = {}
    for row in outcomes:
        kernels.setdefault((row.resolved.kernel, str(row.resolved.gpu.target)), []).append(row.seconds)
    if len(outcomes) > 1:
        rows = [
            [kernel, target, str(len(seconds)), f"{sum(seconds):.2f}", f"{max(seconds):.2f}"]
            for (kernel, target), seconds in sorted(kernels.items(), key=lambda row: -sum(row[1]))
        ]
        table("", ["kernel", "target", "entries", "seconds", "longest"], rows)
