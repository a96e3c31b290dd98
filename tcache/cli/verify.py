"""``tcache verify``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from tcache.cli.options import json_option
from tcache.cli.output import print_json


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("manifests", nargs=-1, type=click.Path(path_type=Path), metavar="[MANIFEST]...")
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path(), show_envvar=True,
              help="What packed manifests are relative to.  [default: this directory, or its project]")  # fmt: skip
@json_option
def command(bundle: Path, manifests: tuple[Path, ...], root: Path, as_json: bool) -> None:
    """Replay the manifests of a bundle (a directory, a wheel, an image layout or an archive of one), or MANIFEST, in a
    fresh process, frozen, with the bundle moved to another directory and no other cache. Needs no GPU. Exits 1 on any
    miss.
    """
    from tcache.verify import verify

    begin = time.perf_counter()
    report = verify(bundle, list(manifests), root)
    seconds = time.perf_counter() - begin
    if as_json:
        print_json({**asdict(report), "proven": report.proven, "seconds": round(seconds, 3)})
    else:
        for problem in report.problems:
            click.echo(f"damaged: {problem}", err=True)
        for difference in report.differences:
            click.echo(f"differs: {difference}", err=True)
        for miss in report.misses:
            first, *rest = miss["why"].splitlines()
            click.echo(f"miss: {miss['where']}: {miss['launch']}: {first}", err=True)
            for line in rest:
                click.echo(f"  {line}", err=True)
        for note in report.notes:
            click.echo(f"note: {note}", err=True)
        click.echo(
            f"{'proven' if report.proven else 'NOT proven'}: {report.launches} launches, {report.hits} hits, "
            f"{len(report.misses)} misses, {report.entries} entries ({report.direct} proven by the index too), "
            f"{len(report.problems)} damaged files, {len(report.differences)} differences, {seconds:.1f} s"
        )
    if not report.proven:
        raise SystemExit(1)
