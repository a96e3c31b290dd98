"""``index.json``: which launches a bundle was packed for, and what each entry's name depends on.

    schema     1
    options    compile options that all entries share, said once
    entries    entry name -> facts, see :func:`tcache.explain.facts_of`, with the options that are not shared;
               ``direct``: whether launches are answered from here (:mod:`tcache.prebaked`); ``launch``: one of them,
               where types do not say enough to preload (:func:`tcache.standin.described_launch`)
    launches   rows of gpu (its name), ref (the manifest's), shape (key as text, null without autotuner),
               config (key as text, null without autotuner) and entry

One parse of the text makes two tables; nothing more is done before somebody asks. The file is only read when an
entry is not found, to preload, and to compare: finding an entry by Triton's name needs ``bundle.json`` alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SCHEMA", "Index", "parse_json"]

SCHEMA = 1
_FACTS = {"kernel": str, "target": str, "source": str,
          "signature": dict, "constants": dict, "attributes": dict, "options": dict}  # fmt: skip
_FACT_TYPES = tuple(_FACTS.values())
_LAUNCH = ("gpu", "ref", "entry", "shape", "config")
_LAUNCH_TYPES = {(str, str, str, shape, config) for shape in (str, type(None)) for config in (str, type(None))}


def parse_json(data: bytes) -> Any:
    """Parse JSON of which all can be written as UTF-8: into messages, as names of files.

    Raises:
        ValueError: it is no JSON, no UTF-8, or has half of a surrogate pair, which JSON can escape.
        RecursionError: it is nested too deeply.
    """
    found = json.loads(data.decode())
    if b"\\" in data and (b"\\ud" in data or b"\\uD" in data):  # one byte is found at a tenth of the time
        json.dumps(found, ensure_ascii=False).encode()
    return found


class Index:
    """What a bundle holds.

    Args:
        data: bytes of ``index.json``, intact.

    Attributes:
        launches: rows of ``gpu``, ``ref``, ``shape``, ``config`` and ``entry``.

    Raises:
        ValueError: it is no JSON, of another schema, or does not hold together.
    """

    def __init__(self, data: bytes) -> None:
        try:
            found = parse_json(data)
            if found["schema"] != SCHEMA:
                raise ValueError(f"index schema {found['schema']!r}, expected {SCHEMA}")
            self._shared: dict[str, Any] = {**found["options"]}
            self._entries: dict[str, dict[str, Any]] = {**found["entries"]}
            self.launches: list[dict[str, Any]] = [*found["launches"]]
            self._check()
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"corrupt: {error!r}") from error
        self._facts: dict[str, dict[str, Any]] | None = None
        self._refs: dict[str, str] | None = None

    def _check(self) -> None:
        """Refuse rows that lack what launches, preloading and comparing read, or have it of another type."""
        for entry, row in self._entries.items():
            if tuple(map(type, map(row.get, _FACTS))) != _FACT_TYPES:
                wrong = next(name for name, kind in _FACTS.items() if type(row.get(name)) is not kind)
                raise TypeError(f"entry {entry}: {wrong} is {row.get(wrong)!r}"[:200])
        for row in self.launches:
            if tuple(map(type, map(row.__getitem__, _LAUNCH))) not in _LAUNCH_TYPES:
                raise TypeError(f"launches: {row!r}"[:200])

    def __contains__(self, entry: str) -> bool:
        return entry in self._entries

    def fact(self, entry: str) -> dict[str, Any]:
        """Return one entry's facts, shared options included.

        Raises:
            KeyError: there is no such entry.
        """
        row = self._entries[entry]
        return {**row, "options": {**self._shared, **row["options"]}}

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """Entry name -> facts, shared options included."""
        if self._facts is None:
            self._facts = {entry: self.fact(entry) for entry in self._entries}
        return self._facts

    def kernels(self) -> Iterator[tuple[str, str]]:
        """Yield every entry with its kernel, ``module:qualname``."""
        for entry, row in self._entries.items():
            yield entry, row["kernel"]

    def ref(self, entry: str) -> str | None:
        """Return the manifest's ref of a launch that reads this entry."""
        if self._refs is None:
            self._refs = {row["entry"]: row["ref"] for row in reversed(self.launches)}
        return self._refs.get(entry)

    def gpus(self, entry: str) -> set[str]:
        """Return the names of the GPUs an entry was packed for."""
        return {row["gpu"] for row in self.launches if row["entry"] == entry}
