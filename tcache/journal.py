"""What a tuning run has found so far, one JSON line at a time, so that a killed run loses nothing.

A line is appended before a config is benchmarked and after. What is left of a killed run is read by the next one:
finished timings count, and a config that was in flight when the process died twice is taken for the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

from tcache.store import Timing

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Journal", "in_flight"]

_DEATHS = 2


class Journal:
    """The journal of tuning one shape. Only the holder of the shape's tuning lock may use it.

    Args:
        path: where it is.
        source: the kernel's source identity; lines of another are ignored.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self._torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self.timings: dict[str, Timing] = {}
        starts: dict[str, int] = {}
        for line in _lines(path):
            if line.get("source") != source:
                continue
            config = str(line["config"])
            if isinstance(line.get("timing"), dict):
                self.timings[config] = Timing.parse(line["timing"])
            else:
                starts[config] = starts.get(config, 0) + 1
        for config, count in starts.items():
            if config not in self.timings and count >= _DEATHS:
                self.timings[config] = Timing(failed="the process died twice while benchmarking it")

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps({"source": self._source, **row}, sort_keys=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:  # one write: a reader sees the line or not
            file.write(("\n" if self._torn else "") + line + "\n")
        self._torn = False

    def start(self, config: str) -> None:
        """Note that a config is about to be benchmarked."""
        self._append({"config": config, "pid": os.getpid()})

    def result(self, config: str, timing: Timing) -> None:
        """Note what benchmarking it gave."""
        self.timings[config] = timing
        self._append({"config": config, "timing": timing.plain()})

    def close(self) -> None:
        """Remove the journal: everything in it is in the store."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if isinstance(row, dict) and "config" in row:
            found.append(row)
    return found


def in_flight(path: Path) -> dict[str, Any] | None:
    """Return the row of the config a run was benchmarking when it ended, None if it was benchmarking none."""
    last: dict[str, Any] | None = None
    for row in _lines(path):
        last = None if "timing" in row else row
    return last
