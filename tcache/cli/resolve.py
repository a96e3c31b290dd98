"""``tcache resolve``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option, manifests, select, selection_options, untuned_option
from tcache.cli.output import print_json, table

if TYPE_CHECKING:
    from pathlib import Path


@click.command("resolve")
@manifests()
@selection_options
@untuned_option()
@json_option
def command(
    manifests: tuple[Path, ...], gpus: tuple[str, ...], target: str | None, store: Path | None, cache_dir: Path | None,
    untuned: str, as_json: bool,
) -> None:  # fmt: skip
    """Print kernel, shape key, config, specialization and entry of every launch of MANIFEST, and whether the entry is
    in the Triton cache. Compiles nothing and needs no GPU.
    """
    from tcache.compile import entry_present

    resolved, missing = select(manifests, gpus, target, store, cache_dir).resolve(untuned)
    rows: list[dict[str, Any]] = [
        {
            "gpu": launch.gpu.name,
            "kernel": launch.kernel,
            "shape": launch.shape,
            "config": launch.config,
            "specialization": launch.compilation.specialization(),
            "entry": launch.entry,
            "present": entry_present(launch.entry, launch.compilation.name),
            "notice": launch.notice,
            "where": launch.where,
        }
        for launch in resolved
    ]
    if as_json:
        untuned_rows = [
            {"gpu": row.gpu.name, "kernel": row.kernel, "shape": row.shape, "reason": row.reason, "where": row.where}
            for row in missing
        ]
        print_json({"launches": rows, "untuned": untuned_rows})
    else:
        shown = [
            [
                row["kernel"].rpartition(":")[2],
                row["shape"] or "-",
                row["config"] or "-",
                brief(row["specialization"]),
                row["entry"],
                "yes" if row["present"] else "no",
            ]
            for row in rows
        ]
        table("", ["kernel", "shape key", "config", "specialization", "entry", "present"], shown)
        entries = {row["entry"] for row in rows}
        present = {row["entry"] for row in rows if row["present"]}
        click.echo(f"{len(rows)} launches, {len(entries)} entries, {len(present)} present")
        for notice in sorted({row["notice"] for row in rows if row["notice"]}):
            click.echo(f"note: {sum(row['notice'] == notice for row in rows)} launches {notice}")
    report_untuned(missing)


def brief(specialization: dict[str, Any]) -> str:
    """Return what forks a specialization: types, what is aligned (``/16``), what became a constant."""
    parts = []
    for name, kind in specialization["signature"].items():
        if kind == "constexpr":
            continue
        aligned = any("divisibility" in item for item in specialization["attributes"].get(name, []))
        parts.append(f"{name}:{kind}{'/16' if aligned else ''}")
    ones = [name for name, value in specialization["constants"].items() if value == 1 and value is not True]
    return " ".join(parts + [f"{name}=1" for name in ones])


_UNTUNED = "run `tcache tune` on the GPU, or pass --untuned nearest or default"


def report_untuned(missing: list[Any], hint: str = _UNTUNED) -> None:
    """List launches without a best config and exit 1; nothing to do when there are none."""
    if not missing:
        return
    for row in missing[:5]:
        click.echo(f"error: {row}", err=True)
    if len(missing) > 5:
        click.echo(f"error: … and {len(missing) - 5} more", err=True)
    click.echo(f"hint: {hint}", err=True)
    raise SystemExit(1)
