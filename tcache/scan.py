"""A store file read entry by entry: a service asks for a few shapes of a file that may hold thousands.

A file as :meth:`tcache.entries.Record.text` lays it out is cut at the lines that begin an entry, and only the entry
asked for is parsed. A file laid out in any other way (by hand, by a formatter, with a merge conflict, cut short) is
parsed as a whole, which also finds what is wrong with it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tcache.entries import Entry, Record
from tcache.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from tcache.keys.gpu import GPU
    from tcache.keys.shape import ShapeKey

__all__ = ["Scan"]

_OPEN, _BETWEEN, _CLOSE = '  "entries": {\n', "\n    },\n", "\n    }\n  }\n}\n"


class Scan:
    """One store file.

    Args:
        text: its text.
        path: where it is, for messages.

    Raises:
        StoreError: the head is corrupt or of another schema, or the file is in another layout and corrupt anywhere.
    """

    def __init__(self, text: str, path: Path) -> None:
        self._text, self._path = text, path
        self._record: Record | None = None
        self._parts: dict[str, str] = {}
        head, parts = _cut(text)
        if parts is None:
            self._record = Record.parse(text, path)
        else:
            self._parts = parts
            self._head = Record.parse(head, path)

    @property
    def gpu(self) -> GPU:
        return (self._record or self._head).gpu

    @property
    def qualname(self) -> str:
        return (self._record or self._head).kernel.qualname

    def record(self) -> Record:
        """Return the whole record.

        Raises:
            StoreError: any entry is corrupt.
        """
        if self._record is None:
            self._record = Record.parse(self._text, self._path)
        return self._record

    def get(self, shape: ShapeKey) -> Entry | None:
        """Return one entry.

        Raises:
            StoreError: it is corrupt.
        """
        if self._record is not None:
            return self._record.entries.get(shape)
        written = json.dumps(str(shape), ensure_ascii=False)
        part = self._parts.get(written)
        if part is not None:
            try:
                return Entry.parse(str(shape), json.loads("{" + part + "}"))
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                self.record()  # names the line
                raise StoreError(f"{self._path}: corrupt entry {written}: {error}") from error
        return self.record().entries.get(shape)  # it may be written in another order or spacing


def _cut(text: str) -> tuple[str, dict[str, str] | None]:
    """Return a file's head and, by entry as written, the text between its braces; None for any other layout."""
    start = text.find(_OPEN)
    if start < 0 or not text.startswith("{\n") or not text.endswith(_CLOSE) or "\n<<<<<<<" in text:
        return "", None
    head = text[: start + len(_OPEN)] + "  }\n}\n"
    parts = {}
    for chunk in text[start + len(_OPEN) : -len(_CLOSE)].split(_BETWEEN):
        name, brace, part = chunk.partition(": {\n")
        if not brace or not name.startswith('    "') or "\n" in name:
            return "", None
        parts[name[4:]] = part
    return head, parts
