"""``tcache tune``."""

from __future__ import annotations

import datetime
import fnmatch
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option, manifests, quiet_noise
from tcache.cli.output import print_json, progress, table

if TYPE_CHECKING:
    from tcache.manifest import Case
    from tcache.store import Entry, Store
    from tcache.supervise import Result


@click.command("tune")
@manifests()
@click.option("--store", type=click.Path(path_type=Path), envvar="TCACHE_STORE", show_envvar=True,
              help="Directory to write best configs to.  [default: the project's, then ~/.tcache/store]")  # fmt: skip
@click.option("--all-gpus", is_flag=True, show_envvar=True, help="Spread the cases over all GPUs of this machine.")
@click.option("--only", metavar="PATTERN", show_envvar=True, help="Only cases matching, such as 'matmul M=16 *'.")
@click.option("--retune", type=click.Choice(["stale", "aged", "all"]), default="stale", show_default=True,
              show_envvar=True, help="stale: what an edited kernel left behind; aged: also what another Triton tuned; "
              "all: everything.")  # fmt: skip
@click.option(
    "--budget", type=float, metavar="SECONDS", show_envvar=True, help="Begin no further case after that time."
)
@click.option("--timeout", type=float, default=60.0, show_default=True, metavar="SECONDS", show_envvar=True,
              help="A config that takes longer than this to benchmark is recorded as hung.")  # fmt: skip
@json_option
def command(
    manifests: tuple[Path, ...], store: Path | None, all_gpus: bool, only: str | None, retune: str,
    budget: float | None, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Run every launch of MANIFEST on this machine's GPU and benchmark the configs that the store does not know.

    Results are kept one by one: a run that is killed goes on where it was. A config that crashes the process, faults
    the GPU or hangs is recorded as failed with its reason, and tuning goes on.
    """
    from tcache.errors import UsageError
    from tcache.manifest import load_manifest
    from tcache.project import find_project
    from tcache.store import Store, default_store
    from tcache.supervise import visible_gpus

    quiet_noise()
    loaded = [load_manifest(path) for path in manifests]
    place = store or find_project(loaded[0].path.parent).store or default_store()
    if place is None:
        raise UsageError("this user has no home directory to keep a store in", "give one with --store")
    cases = [case for manifest in loaded for case in manifest.cases()]
    chosen = [
        number for number, case in enumerate(cases) if only is None or fnmatch.fnmatchcase(f"{case} ", f"{only}*")
    ]
    if not chosen:
        raise UsageError(f"--only {only!r} matches no case", f"cases read like: {cases[0]}")
    before = _entries(Store(place))
    devices = visible_gpus()
    begin = time.perf_counter()
    paths = [manifest.path for manifest in loaded]
    results, skipped = run_tuning(
        paths, cases, chosen, place, devices if all_gpus else devices[:1],
        retune=None if retune == "stale" else retune, timeout=timeout, budget=budget, quiet=as_json,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    rows = _rows(results, Store(place), before)
    failed = [(cases[result.case], result) for result in results if result.error]
    if as_json:
        print_json(
            {"store": str(place), "cases": len(chosen), "skipped": len(skipped), "seconds": round(seconds, 3),
             "shapes": rows, "failed": [{"case": str(case), "error": row.error} for case, row in failed],
             "bad_configs": [{"config": config, "reason": reason} for row in results for config, reason in row.failed]}
        )  # fmt: skip
    else:
        _print(rows)
        spread = f" on {len(devices)} GPUs" if all_gpus and len(devices) > 1 else ""
        click.echo(f"{place}: {len(rows)} shapes from {len(results)} cases in {seconds:.1f} s{spread}")
    _report(failed, skipped, results)


def run_tuning(
    manifests: list[Path], cases: list[Case], chosen: list[int], place: Path, devices: list[str], *,
    retune: str | None = None, timeout: float = 60.0, budget: float | None = None, quiet: bool = False,
) -> tuple[list[Result], list[int]]:  # fmt: skip
    """Tune some cases of manifests in worker processes and show progress.

    Args:
        manifests: their paths.
        cases: all their cases, in order.
        chosen: numbers of the cases to tune.
        place: the store to write to.
        devices: values of ``CUDA_VISIBLE_DEVICES``, one worker each.
        retune, timeout, budget: as the options say.
        quiet: whether to show nothing.

    Returns:
        What became of the cases, and those that the budget left out.
    """
    from tcache.supervise import Task, supervise

    since = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    request = {
        "manifests": [str(path.resolve()) for path in manifests],
        "store": str(place.resolve()),
        "retune": retune,
        "since": since,
    }
    results: list[Result] = []
    begin = time.perf_counter()
    with progress("tuning", len(chosen), quiet=quiet) as step:

        def done(result: Result) -> None:
            results.append(result)
            left = (time.perf_counter() - begin) / len(results) * (len(chosen) - len(results))
            state = f"failed: {result.error}" if result.error else f"{result.seconds:.1f} s"
            step(f"{cases[result.case]} {state}, about {left:.0f} s left")

        skipped = supervise(Task(request, place, timeout), chosen, devices, done, budget)
    return results, skipped


def _report(failed: list[tuple[Case, Result]], skipped: list[int], results: list[Result]) -> None:
    for result in results:
        for config, reason in result.failed:
            click.echo(f"note: config [{config}] {reason}", err=True)
    if skipped:
        click.echo(f"note: the budget is spent, {len(skipped)} cases were not begun: run the command again", err=True)
    for case, result in failed:
        click.echo(f"error: {case.where}: {case}: {result.error}", err=True)
    if failed:
        raise SystemExit(1)


def _entries(store: Store) -> dict[tuple[str, str, str], Entry]:
    return {
        (record.gpu.name, record.kernel.ref, str(entry.shape)): entry
        for _, record in store.records()
        for entry in record.entries.values()
    }


def _rows(results: list[Result], store: Store, before: dict[tuple[str, str, str], Entry]) -> list[dict[str, Any]]:
    now = _entries(store)
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for launch in (launch for result in results for launch in result.launches):
        key = (launch["gpu"], launch["kernel"], launch["shape"])
        entry, old = now.get(key), before.get(key)
        if entry is None:
            continue
        median = entry.timings[entry.config].median if entry.config in entry.timings else None
        default = entry.timings.get(launch["default"])
        previous = entry.timings.get(old.config or "") if old is not None else None
        rows[key] = {
            "gpu": key[0], "kernel": key[1], "shape": key[2], "config": entry.config, "median_ms": median,
            "default_ms": default.median if default is not None else None,
            "previous": old.config if old is not None else None,
            "previous_ms": previous.median if previous is not None else None,
            "tied": len(entry.tied), "new": old is None or old.tuned != entry.tuned,
        }  # fmt: skip
    return list(rows.values())


def _print(rows: list[dict[str, Any]]) -> None:
    def against(other: float | None, median: float | None) -> str:
        return f"{other / median:.2f}x" if other and median else "-"

    shown = []
    for row in rows:
        if not row["new"]:
            continue
        alike = f" (of {row['tied']} alike)" if row["tied"] else ""
        same = row["previous"] == row["config"]
        shown.append(
            [
                row["kernel"].rpartition(":")[2],
                row["shape"].split(" | ")[0],
                f"{row['config']}{alike}",
                f"{row['median_ms']:.4g}" if row["median_ms"] else "-",
                against(row["default_ms"], row["median_ms"]),
                "-" if row["previous"] is None else ("same" if same else against(row["previous_ms"], row["median_ms"])),
            ]
        )
    if shown:
        table("", ["kernel", "shape", "winner", "ms", "against first", "against previous"], shown)
