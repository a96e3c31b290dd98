"""``tcache gpus``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from tcache.cli.options import json_option
from tcache.cli.output import print_json, table


@click.command("gpus")
@click.option("--sources", is_flag=True, show_envvar=True, help="Print where each row's figures come from.")
@json_option
def command(sources: bool, as_json: bool) -> None:
    """Print the GPUs known by name: what a replay answers when code asks about the GPU. ``-`` is not known. For a GPU
    outside this list pass --target to the other commands.
    """
    from tcache.keys.gpu import catalogue

    known = sorted(catalogue().values(), key=lambda gpu: gpu.name)
    rows: list[dict[str, Any]] = [
        {**gpu.identity(), "target": str(gpu.target), "max_shared_mem": gpu.max_shared_mem, **asdict(gpu.hardware)}
        for gpu in known
    ]
    if as_json:
        print_json({"gpus": rows})
        return
    shown = [
        [
            row["name"],
            row["target"],
            str(row["multiprocessors"] or "-"),
            _binary(row["max_shared_mem"], 1 << 10, "KiB"),
            _binary(row["l2_cache"], 1 << 20, "MiB"),
            _binary(row["memory"], 1 << 30, "GiB"),
            f"{row['bandwidth']:,} GB/s" if row["bandwidth"] else "-",
            str(len(row["sources"])),
        ]
        for row in rows
    ]
    table("", ["name", "target", "SMs", "shared memory", "L2", "memory", "bandwidth", "sources"], shown)
    if sources:
        for row in rows:
            click.echo(f"{row['name']}:")
            for source in row["sources"]:
                click.echo(f"  {source}")


def _binary(count: int | None, unit: int, name: str) -> str:
    return f"{count / unit:.4g} {name}" if count else "-"
