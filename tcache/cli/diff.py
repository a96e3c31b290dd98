"""``tcache diff``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option
from tcache.cli.output import print_json
from tcache.cli.resolve import brief

if TYPE_CHECKING:
    from tcache.diff import Difference


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option
def command(a: Path, b: Path, as_json: bool) -> None:
    """Show what changed from bundle A to bundle B: launches, entries, captured ones too, best configs, native helpers,
    manifests, environment. A and B are directories, wheels, image layouts or archives of them. Exits 0 when nothing
    differs, 1 when something does.
    """
    from tcache.diff import diff

    found = diff(a, b)
    if as_json:
        print_json({"equal": found.equal, **asdict(found)})
    else:
        for line in _lines(found):
            click.echo(line)
        click.echo(
            f"{'equal' if found.equal else 'different'}: {len(found.added)} launches added, {len(found.removed)} "
            f"removed, {len(found.changed)} changed, {len(found.bytes_changed)} entries compiled anew, "
            f"{len(found.captured)} captured entries, {len(found.best)} best configs, {len(found.helpers)} native "
            f"helpers, {len(found.manifests)} manifests, {len(found.environment)} fields of the environment"
        )
    if not found.equal:
        raise SystemExit(1)


def _lines(found: Difference) -> list[str]:
    lines = [f"environment {name}: {_change(pair)}" for name, pair in found.environment.items()]
    for sign, rows in (("-", found.removed), ("+", found.added)):
        lines += [
            f"{sign} {_launch(row)} {row['config'] or ''} ({brief(row['specialization'])}) {row['entry']}"
            for row in rows
        ]
    for row in found.changed:
        lines.append(f"~ {_launch(row['launch'])} {' -> '.join(row['entry'])}")
        lines += [f"    {name}: {_change(pair)}" for name, pair in row["fields"].items()]
        if not row["fields"]:
            lines.append("    every field tcache knows is equal: Triton, ptxas or the environment differs")
    lines += [f"~ entry {entry}: same name, other bytes: compiled anew" for entry in found.bytes_changed]
    for row in found.best:
        times = " -> ".join("-" if ms is None else f"{ms:g} ms" for ms in row["ms"])
        lines.append(f"best {row['kernel']} [{row['shape']}] on {row['gpu']}: {_change(row['config'])}, {times}")
    lines += [f"captured {row['kernel']} {row['entry']}: {row['state']}" for row in found.captured]
    lines += [f"native helper {row['name']} {row['source'][:12]}: {row['state']}" for row in found.helpers]
    lines += [f"manifest {row['path']}: {row['state']}" for row in found.manifests]
    lines += [f"file {name}: same name, other bytes" for name in found.files]
    return lines


def _launch(row: dict[str, Any]) -> str:
    return f"{row['ref']} [{row['shape'] or '-'}] on {row['gpu']}"


def _change(pair: Any) -> str:
    return " -> ".join("none" if value is None else _short(value) for value in pair)


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:19]}…" if len(text) >= 64 and " " not in text else text
