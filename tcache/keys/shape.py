"""Shape keys: what a best config is looked up by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tcache.keys._text import Word, decode_groups, encode_groups, normalise

__all__ = ["ShapeKey", "ranked"]

Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ShapeKey:
    """The values of the autotune ``key`` arguments and the dtypes of tensor arguments.

    Two keys are equal when their names and values are, in whatever order the kernel names them.

    Attributes:
        values: ``(argument, value)`` in the order of the decorator's ``key``.
        dtypes: ``(argument, dtype)`` of every tensor argument, such as ``("x", "bfloat16")``.
    """

    values: Pairs
    dtypes: Pairs

    @classmethod
    def of(cls, keys: list[str], arguments: dict[str, Any]) -> ShapeKey:
        """Make the key of a launch.

        Args:
            keys: names of the autotune key arguments; names the launch does not pass are skipped, as upstream does.
            arguments: argument name -> value of the launch.

        Raises:
            UnsupportedValue: a key argument has no canonical text.
        """
        values = tuple((name, normalise(arguments[name])) for name in keys if name in arguments)
        dtypes = tuple(
            (name, str(value.dtype).removeprefix("torch."))
            for name, value in arguments.items()
            if hasattr(value, "dtype")
        )
        return cls(values, dtypes)

    @classmethod
    def parse(cls, text: str) -> ShapeKey:
        """Parse what ``str`` wrote.

        Raises:
            ValueError: the text has another form.
        """
        groups = decode_groups(text)
        if len(groups) > 2:
            raise ValueError(f"expected one '|' in shape key {text!r}")
        dtypes = groups[1] if len(groups) == 2 else []
        return cls(tuple(groups[0]), tuple((name, str(value).removeprefix("torch.")) for name, value in dtypes))

    def __str__(self) -> str:
        """``M=16 N=4096 | a=torch.bfloat16 b=torch.bfloat16``."""
        dtypes = [(name, Word(f"torch.{dtype}")) for name, dtype in self.dtypes]
        return encode_groups([list(self.values), dtypes] if dtypes else [list(self.values)])

    @cached_property
    def _canonical(self) -> tuple[Any, ...]:
        return (
            tuple(sorted((name, type(value).__name__, str(value)) for name, value in self.values)),
            tuple(sorted(self.dtypes)),
        )

    @cached_property
    def _hash(self) -> int:
        return hash(self._canonical)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ShapeKey) and self._canonical == other._canonical)

    def __hash__(self) -> int:
        return self._hash


def _distance(left: ShapeKey, right: ShapeKey) -> float | None:
    """Return how far apart two keys are: the sum of ``|log2|`` ratios over integers, None if anything else differs."""
    if dict(left.dtypes) != dict(right.dtypes):
        return None
    mine, theirs = dict(left.values), dict(right.values)
    if mine.keys() != theirs.keys():
        return None
    total = 0.0
    for name, value in mine.items():
        other = theirs[name]
        if type(value) is int and type(other) is int and value > 0 and other > 0:
            total += abs(math.log2(value / other))
        elif type(value) is not type(other) or value != other:
            return None
    return total


def ranked(wanted: ShapeKey, candidates: list[ShapeKey]) -> list[ShapeKey]:
    """Return the candidates comparable with ``wanted``, nearest first.

    Candidates must agree in every dtype and in every value that is not a positive integer; positive integers are
    compared by their logarithm, so that 4096 is as far from 2048 as from 8192. Ties go to the smaller text.
    """
    rows = [(distance, str(key), key) for key in candidates if (distance := _distance(wanted, key)) is not None]
    return [key for _, _, key in sorted(rows, key=lambda row: row[:2])]
