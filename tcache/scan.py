"""A store file read entry by entry: a service asks for a few shapes of a file that may hold thousands.

A file as :meth:`tcache.entries.Record.text` lays it out is cut at the lines that begin an entry; only the entry asked
for is parsed, and only the entry that changes is written anew. A file laid out in any other way (by hand, by a
formatter, with a merge conflict, cut short) is parsed as a whole, which also finds what is wrong with it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tcache.entries import BETWEEN, CLOSE, OPEN, REPAIR, Entry, Record, join, quoted
from tcache.errors import StoreError
from tcache.keys.shape import ShapeKey

if TYPE_CHECKING:
    from pathlib import Path

    from tcache.keys.gpu import GPU

__all__ = ["Scan"]


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
        head, self._parts = _cut(text)
        self._head = Record.parse(text if self._parts is None else head, path)
        self._record = self._head if self._parts is None else None
        self._names: dict[ShapeKey, str] | None = None

    @property
    def gpu(self) -> GPU:
        return self._head.gpu

    @property
    def qualname(self) -> str:
        return self._head.kernel.qualname

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
        name = self._name(shape)
        if self._parts is None or name not in self._parts:
            return self._head.entries.get(shape)
        try:
            return Entry.parse(json.loads(name), json.loads("{" + self._parts[name] + "}"))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            self.record()  # names the line
            raise StoreError(f"{self._path}: corrupt entry {name}: {error}", REPAIR) from error

    def replacing(self, entry: Entry, extra: dict[str, Any]) -> str:
        """Return the file's text with one entry replaced or added, and the head's unknown fields.

        Raises:
            StoreError: a shape key in the file is corrupt.
        """
        head = replace(self._head, entries={}, extra=extra)
        if self._parts is None:
            return replace(head, entries={**self._head.entries, entry.shape: entry}).text()
        parts = {name: part for name, part in self._parts.items() if name != self._name(entry.shape)}
        return join(head.head(), {**parts, quoted(str(entry.shape)): entry.text()})

    def _name(self, shape: ShapeKey) -> str:
        """Return how the file writes a shape key: somebody may have edited its order or spacing.

        Raises:
            StoreError: a shape key in the file is corrupt.
        """
        name = quoted(str(shape))
        if self._parts is None or name in self._parts:
            return name
        if self._names is None:
            try:
                self._names = {_parsed(other): other for other in self._parts}
            except (TypeError, ValueError, AttributeError) as error:
                self.record()  # names the line
                raise StoreError(f"{self._path}: corrupt shape key: {error}", REPAIR) from error
        return self._names.get(shape, name)

    @property
    def extra(self) -> dict[str, Any]:
        """The head's unknown fields, kept on rewrite."""
        return self._head.extra


def _cut(text: str) -> tuple[str, dict[str, str] | None]:
    """Return a file's head and, by entry as written, the text between its braces; None for any other layout."""
    start = text.find(OPEN)
    if start < 0 or not text.startswith("{\n") or not text.endswith(CLOSE) or "\n<<<<<<<" in text:
        return "", None
    head = text[: start + len(OPEN)] + "  }\n}\n"
    parts = {}
    for chunk in text[start + len(OPEN) : -len(CLOSE)].split(BETWEEN):
        name, brace, part = chunk.partition(": {\n")
        if not brace or not name.startswith('    "') or "\n" in name:
            return "", None
        parts[name[4:]] = part
    return head, parts


@functools.lru_cache(65536)
def _parsed(name: str) -> ShapeKey:
    return ShapeKey.parse(json.loads(name))
