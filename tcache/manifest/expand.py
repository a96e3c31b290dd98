"""From cases as written to cases one by one: ranges, lists that multiply out, shape sets, conditions."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcache.manifest.expr import ExpressionError, holds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tcache.manifest.model import Case

__all__ = ["LARGEST", "Row", "ShapeSets", "TooMany", "combinations", "count", "matches", "rows_of", "values"]

LARGEST = 100_000
"""Most combinations one manifest, with what it includes, may multiply out to, before conditions drop any."""

_NUMBER = r"([-+]?[0-9][0-9_]{0,30})(?:[eE]\+?([0-9]{1,2}))?"
_RANGE = re.compile(rf"\s*{_NUMBER}\s*\.\.\s*{_NUMBER}(?:\s+by\s+(\*?)\s*([0-9]{{1,20}}))?\s*", re.ASCII)
_LIKE_A_RANGE = re.compile(r"\s*[-+]?[0-9][0-9_eE+]*\s*\.\.")


@dataclass(frozen=True)
class _Range:
    first: int
    last: int
    step: int
    factor: bool

    def size(self) -> int:
        if not self.factor:
            return max(0, (self.last - self.first) // self.step + 1)
        count, value = 0, self.first
        while value <= self.last:
            count, value = count + 1, value * self.step
        return count

    def __iter__(self) -> Iterator[int]:
        value = self.first
        while value <= self.last:
            yield value
            value = value * self.step if self.factor else value + self.step


def reads_as_a_range(value: Any) -> bool:
    """Return whether a case's value is a range to this language, or a slip of the pen in one: no text of its own."""
    return isinstance(value, str) and _LIKE_A_RANGE.match(value) is not None


def _range(text: Any) -> _Range | None:
    """Return what a range such as ``1..8``, ``0..64 by 16`` or ``16..4096 by *2`` says; None for other values.

    Raises:
        ExpressionError: it looks like a range and is none, or holds nothing.
    """
    if not reads_as_a_range(text):
        return None
    match = _RANGE.fullmatch(text)
    expected = "expected first..last, first..last by 16, or first..last by *2"
    if match is None:
        raise ExpressionError(f"{text!r} is not a range: {expected}")
    first, first_power, last, last_power, times, step = match.groups()
    found = _Range(
        int(first) * 10 ** int(first_power or 0), int(last) * 10 ** int(last_power or 0), int(step or 1), bool(times)
    )
    if found.last < found.first:
        raise ExpressionError(f"the range {text!r} holds nothing: {found.last} is less than {found.first}")
    if found.step < 1 or (found.factor and (found.step < 2 or found.first < 1)):
        raise ExpressionError(f"the range {text!r} never ends: {expected}, and by *2 starts at 1 at least")
    return found


def _parts(choice: Any) -> list[Any]:
    parts = choice if isinstance(choice, list) else [choice]
    return [part if (found := _range(part)) is None else found for part in parts]


def count(choice: Any) -> int:
    """Return how many values a name may have, without making them.

    Raises:
        ExpressionError: a range is none.
    """
    return sum(part.size() if isinstance(part, _Range) else 1 for part in _parts(choice))


def values(choice: Any) -> list[Any]:
    """Return the values a name may have. Call :func:`count` first: a range may be long."""
    return [value for part in _parts(choice) for value in (part if isinstance(part, _Range) else [part])]


@dataclass(frozen=True)
class Row:
    """One case as written, its shape sets followed.

    Attributes:
        choices: name -> value, list or range; names of shape sets come first, the case's own override them.
        conditions: each condition that a combination must meet, and where it stands.
        gpus: patterns of GPU names; one of each must match.
        where: ``file:line:column`` of the case.
        shared: names that came from a shape set.
        size: how many combinations it makes.
    """

    choices: dict[str, Any]
    conditions: tuple[tuple[str, str], ...]
    gpus: tuple[tuple[str, ...], ...]
    where: str
    shared: frozenset[str]
    size: int

    def keeping(self, used: set[str]) -> Row:
        """Return the row without shared names that are not used."""
        kept = {name: choice for name, choice in self.choices.items() if name in used or name not in self.shared}
        size = math.prod(map(count, kept.values()))
        return Row(kept, self.conditions, self.gpus, self.where, self.shared & kept.keys(), size)


class TooMany(ExpressionError):
    """More combinations than :data:`LARGEST`."""

    def __init__(self) -> None:
        super().__init__(f"the manifest multiplies out to more than {LARGEST:,} cases")


class ShapeSets:
    """The shape sets that a manifest and what it includes define.

    Args:
        cases: name -> the set's cases, each with ``file:line:column``.
    """

    def __init__(self, cases: Mapping[str, list[tuple[Case, str]]]) -> None:
        self._cases = cases
        self._rows: dict[str, list[Row]] = {}
        self._open: list[str] = []

    @property
    def names(self) -> list[str]:
        return sorted(self._cases)

    def rows(self, name: str) -> list[Row]:
        """Return a set's rows; sets may consist of sets.

        Raises:
            KeyError: there is no such set.
            ExpressionError: sets contain each other in a circle, or hold more than :data:`LARGEST` rows.
        """
        if name in self._open:
            raise ExpressionError(f"shape sets contain each other: {' -> '.join([*self._open, name])}")
        if name not in self._rows:
            self._open.append(name)
            try:
                found: list[Row] = []
                for case, where in self._cases[name]:
                    found += rows_of(case, where, self)
                    if len(found) > LARGEST:
                        raise TooMany
                self._rows[name] = found
            finally:
                self._open.pop()
        return self._rows[name]


def rows_of(case: Case, where: str, sets: ShapeSets) -> list[Row]:
    """Return the rows one case stands for: itself, or one for each row of its shape sets.

    Raises:
        KeyError: there is no shape set of that name.
        ExpressionError: a range is none, or there are too many rows.
    """
    base: list[Row] = []
    for name in case.shapes or []:
        base += sets.rows(name)
        if len(base) > LARGEST:
            raise TooMany
    if case.shapes is None:
        base = [Row({}, (), (), where, frozenset(), 1)]
    conditions = tuple((text, where) for text in case.where or [])
    gpus = (tuple(case.gpus),) if case.gpus else ()
    found = []
    for row in base:
        choices = {**row.choices, **case.choices}
        shared = frozenset(row.choices) - case.choices.keys()
        size = math.prod(map(count, choices.values()))
        found.append(Row(choices, row.conditions + conditions, row.gpus + gpus, where, shared, size))
    return found


def combinations(row: Row, conditions: tuple[tuple[str, str], ...]) -> Iterator[dict[str, Any]]:
    """Yield name -> value of every combination that meets the row's conditions and these; the last name varies fastest.

    Raises:
        ExpressionError: a condition cannot be evaluated; it carries ``where``.
    """
    for chosen in itertools.product(*map(values, row.choices.values())):
        scope = dict(zip(row.choices, chosen, strict=True))
        if all(_holds(text, where, scope) for text, where in row.conditions + conditions):
            yield scope


def _holds(text: str, where: str, scope: dict[str, Any]) -> bool:
    try:
        return holds(text, scope)
    except ExpressionError as error:
        error.where = where
        raise


def matches(gpus: tuple[tuple[str, ...], ...], name: str) -> bool:
    """Return whether a GPU's name is among those that every restriction allows."""
    return all(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for patterns in gpus)
