"""Tables, progress and JSON: the only module of tcache that draws."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Progress", "growing_progress", "print_json", "progress", "size", "table"]


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
    with growing_progress(what, quiet=quiet) as shown:
        shown.expect(total)
        yield shown.step


@contextlib.contextmanager
def growing_progress(what: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Show progress of work that becomes more while it is done."""
    shown = Progress() if quiet else _Bar(what) if sys.stderr.isatty() else _Lines()
    try:
        yield shown
    finally:
        shown.close()


class Progress:
    """Progress that is shown nowhere; what shows it somewhere is derived from it."""

    def expect(self, total: int, *, more: bool = False) -> None:
        """State how many steps there are, so far if there will be ``more``."""

    def step(self, text: str) -> None:
        """Show that a step was done, and what it was."""

    def close(self) -> None:
        """Show nothing any more."""


class _Lines(Progress):
    def __init__(self) -> None:
        self._count, self._total = 0, ""

    def expect(self, total: int, *, more: bool = False) -> None:
        self._total = f"{total}+" if more else f"{total}"

    def step(self, text: str) -> None:
        self._count += 1
        click.echo(f"[{self._count}/{self._total}] {text}", err=True)


class _Bar(Progress):
    def __init__(self, what: str) -> None:
        self._what = what
        self._total = 0
        self._bar: Any = None
        self._task: Any = None

    def expect(self, total: int, *, more: bool = False) -> None:
        self._total = total
        if self._bar is None and total:
            self._begin()
        if self._bar is not None and not more:
            self._bar.update(self._task, total=total)
            self._bar.refresh()

    def _begin(self) -> None:
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
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        # refreshed by hand: a refreshing thread must not be alive when a worker is forked
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.refresh()

    def step(self, text: str) -> None:
        name = text.split(" ", maxsplit=1)[0]
        self._bar.update(self._task, advance=1, total=self._total, description=f"{self._what} {name}")
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
