"""``tcache tune``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tcache.cli.options import json_option, manifests, quiet_noise
from tcache.cli.output import print_json, progress


@click.command("tune")
@manifests()
@click.option("--store", type=click.Path(path_type=Path), envvar="TCACHE_STORE", show_envvar=True,
              help="Directory to write best configs to.  [default: the project's, then ~/.tcache/store]")  # fmt: skip
@json_option
def command(manifests: tuple[Path, ...], store: Path | None, as_json: bool) -> None:
    """Run every launch of MANIFEST on this machine's GPU and benchmark the configs that the store does not know.
    Results are stored one by one: a run that is killed goes on where it was.
    """
    from tcache.active import activate
    from tcache.errors import UsageError
    from tcache.manifest import load_manifest
    from tcache.project import find_project
    from tcache.replay import run_case
    from tcache.store import default_store

    quiet_noise()
    loaded = [load_manifest(path) for path in manifests]
    place = store or find_project(loaded[0].path.parent).store or default_store()
    if place is None:
        raise UsageError("this user has no home directory to keep a store in", "give one with --store")
    _need_gpu()
    activate(mode="tune", store=place)
    begin = time.perf_counter()
    cases = [case for manifest in loaded for case in manifest.cases()]
    with progress("tuning", len(cases), quiet=as_json) as step:
        for case in cases:
            start = time.perf_counter()
            run_case(case)
            step(f"{case} {time.perf_counter() - start:.1f} s")
    seconds = time.perf_counter() - begin
    if as_json:
        print_json({"store": str(place), "cases": len(cases), "seconds": round(seconds, 3)})
    else:
        click.echo(f"{place}: {len(cases)} cases in {seconds:.1f} s")


def _need_gpu() -> None:
    from tcache.errors import UsageError

    try:
        import torch

        found = torch.cuda.is_available()
    except ImportError as error:
        raise UsageError(f"tuning runs kernels through torch, which cannot be imported: {error}") from error
    if not found:
        raise UsageError("no GPU here: tuning benchmarks kernels", "run it on the GPU the best configs are for")
