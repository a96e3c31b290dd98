"""The file that recording writes: JSON lines, one per launch, whole at any time.

Every line is one ``write`` to a file opened for appending, so any number of processes and threads may share the file,
and what a killed process had written stays. Lines are independent: each carries the schema, and a line with an ``id``
that is known adds only what is new (a GPU, a count, another copy). :func:`fold` is how they are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tcache._fs import atomic_write
from tcache.errors import OutputError

__all__ = ["SCHEMA", "Appender", "compact", "fold", "identity", "read_rows", "text_of"]

SCHEMA = 1


def text_of(row: dict[str, Any]) -> str:
    """Return the canonical text of a row, or of a part of one."""
    return json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def identity(row: dict[str, Any]) -> str:
    """Return what two launches share that need one entry on every GPU: kernel, shape key, specialization, options; and
    the entry itself where it was captured.

    A launch that missed before it was bound has no specialization and goes by its arguments.
    """
    names = ("kernel", "shape", "specialization", "options")
    if row.get("specialization") is None:
        names = ("kernel", "shape", "args", "kwargs")
    found = {name: row.get(name) for name in names}
    if "captured" in row:
        found["entry"] = row["captured"]["entry"]
    return hashlib.sha256(text_of(found).encode()).hexdigest()[:16]


class Appender:
    """Appends lines to a recording.

    Raises:
        OutputError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = path.stat().st_size
            with open(path, "rb") as file:
                file.seek(max(0, size - 1))
                torn = file.read(1) not in (b"", b"\n")
        except OSError as error:
            raise OutputError(f"{path}: cannot be recorded to: {error.strerror}", "choose another file") from error
        if torn:  # the line of a killed process: what follows starts a line of its own
            os.write(self._file, b"\n")

    def append(self, row: dict[str, Any]) -> None:
        """Append one row by one write."""
        os.write(self._file, (text_of({"schema": SCHEMA, **row}) + "\n").encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)


def read_rows(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """Return ``(line number, row)`` of every line, and the numbers of lines that are no JSON object.

    Raises:
        OSError: the file cannot be read.
    """
    rows, torn = [], []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            torn.append(number)
    return rows, torn


def fold(rows: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """Return one row per launch, with the number of its first line: GPUs united, counts added, misses noted, the last
    copy of a captured entry.
    """
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    counts: dict[str, int] = {}
    misses: dict[str, str] = {}
    for number, row in rows:
        name = str(row.get("id"))
        if isinstance(row.get("count"), int):
            counts[name] = counts.get(name, 0) + row["count"]
        if isinstance(row.get("miss"), str):
            misses.setdefault(name, row["miss"])
        if "kernel" not in row:
            continue
        if name in found:
            before = found[name][1]
            united = sorted({*before.get("gpus", []), *row.get("gpus", [])}) if _texts(before, row) else []
            before["gpus"] = united or before.get("gpus", [])
            before |= {"captured": row["captured"]} if "captured" in row else {}  # copied again: it was damaged
        else:
            found[name] = (number, {key: value for key, value in row.items() if key not in ("count", "miss")})
    for name, (_, row) in found.items():
        if name in counts:
            row["count"] = counts[name]
        if name in misses:
            row["miss"] = misses[name]
    return list(found.values())


def _texts(*rows: dict[str, Any]) -> bool:
    return all(isinstance(row.get("gpus", []), list) and all(isinstance(gpu, str) for gpu in row.get("gpus", []))
               for row in rows)  # fmt: skip


def compact(path: Path) -> int:
    """Rewrite a recording with one line per launch, sorted, and return how many there are.

    Only when no process appends any more.
    """
    rows, _ = read_rows(path)
    lines = sorted((text_of(row) for _, row in fold(rows)), key=_order)
    atomic_write(path, "".join(line + "\n" for line in lines).encode())
    return len(lines)


def _order(line: str) -> tuple[str, str]:
    return json.loads(line)["kernel"], line
