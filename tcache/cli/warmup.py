"""``tcache warmup``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from tcache.cli.options import json_option, manifests, select, selection_options, untuned_option
from tcache.cli.output import print_json, progress
from tcache.cli.resolve import report_untuned

if TYPE_CHECKING:
    from pathlib import Path

    from tcache.warmup import Outcome


@click.command("warmup")
@manifests()
@selection_options
@click.option("--jobs", "-j", type=click.IntRange(min=1), show_envvar=True,
              help="Kernels to compile at once.  [default: the cores of this machine]")  # fmt: skip
@untuned_option
@json_option
def command(
    manifests: tuple[Path, ...], gpus: tuple[str, ...], target: str | None, store: Path | None, cache_dir: Path | None,
    jobs: int | None, untuned: str, as_json: bool,
) -> None:  # fmt: skip
    """Compile the winners of MANIFEST, and only them, into the Triton cache. Needs no GPU; entries that are there are
    left alone, so a second run compiles nothing.
    """
    from tcache.compile import cores
    from tcache.warmup import pending, warm

    begin = time.perf_counter()
    resolved, missing = select(manifests, gpus, target, store, cache_dir).resolve(untuned)
    todo = pending(resolved)
    jobs = jobs or cores()
    failed: list[Outcome] = []
    with progress("compiling", len(todo), quiet=as_json) as step:

        def done(outcome: Outcome) -> None:
            launch = outcome.resolved
            if outcome.error is not None:
                failed.append(outcome)
            state = f"failed: {outcome.error}" if outcome.error else f"{outcome.seconds:.1f} s"
            step(f"{launch.compilation.name} {launch.gpu.target} {launch.config or ''} {state}")

        outcomes = warm(todo, jobs, done)
    seconds = time.perf_counter() - begin
    entries = {launch.entry for launch in resolved}
    if as_json:
        print_json(
            {
                "launches": len(resolved),
                "entries": len(entries),
                "compiled": len(outcomes) - len(failed),
                "failed": [
                    {"entry": row.resolved.entry, "kernel": row.resolved.kernel, "error": row.error} for row in failed
                ],
                "untuned": [str(row) for row in missing],
                "seconds": round(seconds, 3),
                "kernels": [
                    {"entry": row.resolved.entry, "kernel": row.resolved.kernel, "config": row.resolved.config,
                     "seconds": round(row.seconds, 3)} for row in outcomes
                ],
            }
        )  # fmt: skip
    else:
        click.echo(
            f"{len(resolved)} launches, {len(entries)} entries: {len(outcomes) - len(failed)} compiled, "
            f"{len(entries) - len(outcomes)} present before, {len(failed)} failed, {seconds:.1f} s with {jobs} at once"
        )
        for notice in sorted({launch.notice for launch in resolved if launch.notice}):
            click.echo(f"note: {sum(launch.notice == notice for launch in resolved)} launches {notice}")
    for row in failed:
        click.echo(f"error: {row.resolved.where}: {row.resolved.kernel} [{row.resolved.config}]: {row.error}", err=True)
    report_untuned(missing)
    if failed:
        raise SystemExit(1)
