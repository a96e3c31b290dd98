"""Tables, progress and JSON: the only module of tcache that draws."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["print_json", "progress", "size", "table"]


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON document with its format's version."""
    click.echo(json.dumps({"version": 1, **data}, indent=1, ensure_ascii=False))


def size(count: int) -> str:
    """Return bytes for people: ``121.5 kB``."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table: drawn on a terminal, tab-free aligned text elsewhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False, emoji=False)
    drawn = Table(
        title=title or None, title_justify="left", box=box.SIMPLE if console.is_terminal else None, pad_edge=False
    )
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=not console.is_terminal)
    for row in rows:
        drawn.add_row(*row)
    if not console.is_terminal:
        console.width = 10_000
    console.print(drawn)


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error: a bar on a terminal, a plain line for each step otherwise.

    Yields:
        A function to call after each step with what was done.
    """
    if quiet or not total:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        count = 0

        def plain(text: str) -> None:
            nonlocal count
            count += 1
            click.echo(f"[{count}/{total}] {text}", err=True)

        yield plain
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    # refreshed by hand: a refreshing thread must not be alive when a worker is forked
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        bar.refresh()

        def step(text: str) -> None:
            bar.update(task, advance=1, description=f"{what} {text.split(' ', maxsplit=1)[0]}")
            bar.refresh()

        yield step
