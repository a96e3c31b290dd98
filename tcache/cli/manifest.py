"""``tcache manifest``: check, schema, generalize."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.manifest_generalize import command as generalize
from tcache.cli.options import json_option, manifests, quiet_noise
from tcache.cli.output import print_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.errors import ManifestError
    from tcache.keys.gpu import GPU
    from tcache.manifest import LoadedManifest


@click.group("manifest")
def command() -> None:
    """Check shape manifests, make them from recordings, and print their JSON Schema for editors."""


command.add_command(generalize)


@command.command("schema")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), show_envvar=True,
              help="Write it to this file.  [default: standard output]")  # fmt: skip
@json_option
def schema(output: Path | None, as_json: bool) -> None:
    """Print the JSON Schema of shape manifests.

    Editors complete and check manifests with it when the first line is
    "# yaml-language-server: $schema=manifest.schema.json".
    """
    from tcache.errors import OutputError
    from tcache.manifest.schema import json_schema, schema_text

    if output is not None:
        try:
            output.write_text(schema_text(), "utf-8")
        except OSError as error:
            raise OutputError(f"{output}: cannot be written: {error.strerror}", "choose another --output") from error
    if as_json:
        print_json({"schema": json_schema(), "output": str(output) if output is not None else None})
    elif output is None:
        click.echo(schema_text(), nl=False)


@command.command("check")
@manifests()
@click.option("--imports/--no-imports", default=True, show_default=True, show_envvar=True,
              help="Import the kernels and check their names and arguments too.")  # fmt: skip
@json_option
def check(manifests: tuple[Path, ...], imports: bool, as_json: bool) -> None:
    """Check MANIFEST with all it includes, and print every problem with file, line and column. Nothing is launched or
    compiled, and no GPU is needed. Exits 1 when there is a problem.
    """
    from tcache.manifest import examine

    quiet_noise()
    rows: list[dict[str, Any]] = []
    for path in manifests:
        manifest, problems = examine(path)
        cases = 0
        if manifest is not None and not problems:
            problems, cases = _cases(manifest, imports=imports)
        rows.append(
            {"path": str(path), "cases": cases, "files": [str(file) for file in manifest.files()] if manifest else [],
             "problems": [_row(problem) for problem in problems], "notes": _notes(manifest)}
        )  # fmt: skip
    if as_json:
        print_json({"manifests": rows, "sound": not any(row["problems"] for row in rows)})
    for row in rows:
        for problem in row["problems"]:
            click.echo(f"error: {problem['where']}: {problem['problem']}", err=True)
            if problem["hint"]:
                click.echo(f"  hint: {problem['hint']}", err=True)
        for note in row["notes"]:
            click.echo(f"note: {note}", err=True)
        if not as_json:
            count = len(row["problems"])
            files = f" in {len(row['files'])} files" if len(row["files"]) > 1 else ""
            state = f"{count} problem{'s' if count != 1 else ''}" if count else f"sound, {row['cases']} cases{files}"
            click.echo(f"{row['path']}: {state}")
    if any(row["problems"] for row in rows):
        raise SystemExit(1)


def _cases(manifest: LoadedManifest, *, imports: bool) -> tuple[list[ManifestError], int]:
    """Count the cases and check each against its kernel."""
    from tcache.errors import ManifestError
    from tcache.manifest.expand import matches

    try:
        cases = list(manifest.cases())
    except ManifestError as error:  # a condition that some combinations cannot evaluate
        return [error], 0
    problems = [
        ManifestError(case.ref_where, f"no GPU that the manifest names ({', '.join(manifest.gpus)}) is one of its gpus")
        for case in cases
        if case.gpus and manifest.gpus and not any(matches(case.gpus, name) for name in manifest.gpus)
    ]
    if imports:
        from tcache.replay.check import check_cases
        from tcache.replay.machine import machine

        with contextlib.redirect_stdout(sys.stderr), machine(_gpu(manifest.gpus)):
            problems += check_cases(cases)
    return list({problem.message: problem for problem in problems}.values()), len(cases)


def _gpu(names: Iterable[str]) -> GPU:
    """Return the first GPU named that is known, else one of many."""
    from tcache.errors import UnknownGPU
    from tcache.keys.gpu import find_gpu

    for name in names:
        with contextlib.suppress(UnknownGPU):
            return find_gpu(name)
    return find_gpu("NVIDIA H200")


def _notes(manifest: LoadedManifest | None) -> list[str]:
    """GPUs that only a store, an alias or ``--target`` can make known: as often as not, slips of the pen."""
    from tcache.errors import UnknownGPU
    from tcache.keys.gpu import find_gpu

    if manifest is None:
        return []
    found = manifest.unreplayable()
    for name in manifest.gpus:
        try:
            find_gpu(name)
        except UnknownGPU as error:
            found.append(f"{manifest.gpus_where}: {error.message}")
    return found


def _row(problem: ManifestError) -> dict[str, Any]:
    return {"where": problem.where, "problem": problem.problem, "hint": problem.hint}
