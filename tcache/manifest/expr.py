"""The expression language of manifests: arithmetic and comparisons over names. Walked, never ``eval``'d."""

from __future__ import annotations

import difflib
import operator
from typing import TYPE_CHECKING, Any

from tcache.manifest.grammar import DEEPEST, LONGEST, ExpressionError, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tcache.manifest.grammar import Node

__all__ = [
    "DEEPEST",
    "LARGEST",
    "LONGEST",
    "SMALLEST",
    "ExpressionError",
    "close_names",
    "evaluate",
    "holds",
    "listed",
    "names",
    "unbound",
]

SMALLEST, LARGEST = -(2**63), 2**64 - 1
"""The integers a kernel can be given: Triton takes ``int64`` and ``uint64``, and refuses what lies outside both."""


def _cdiv(a: Any, b: Any) -> Any:
    return -(-a // b)


def _next_power_of_2(n: Any) -> Any:
    return 1 << max(0, int(n) - 1).bit_length()


# name -> function, fewest and most arguments
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "cdiv": (_cdiv, 2, 2),
    "max": (max, 2, 99),
    "min": (min, 2, 99),
    "next_power_of_2": (_next_power_of_2, 1, 1),
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "in": lambda value, among: value in among,
    "not in": lambda value, among: value not in among,
}


def names(text: str | float | None) -> set[str]:
    """Return the names an expression reads; values that are no text read none.

    Raises:
        ExpressionError: it is not an expression of the language.
    """
    return {node[1] for node in _every(parse(text)) if node[0] == "name"} if isinstance(text, str) else set()


def _every(node: Node) -> Iterator[Node]:
    yield node
    for part in node[1:]:
        if isinstance(part, tuple):
            yield from _every(part)


def evaluate(text: Any, scope: Mapping[str, Any]) -> Any:
    """Return the value of an expression; what is no text stands for itself.

    Args:
        text: the expression.
        scope: name -> value.

    Raises:
        ExpressionError: a name is unbound, the language is left, or an integer exceeds 64 bits.
    """
    if not isinstance(text, str):
        return _checked(text, str(text)[:40])
    value = _Walk(text, scope).value(parse(text))
    if isinstance(value, list):
        raise ExpressionError(f"{text!r} is a list: lists stand only after 'in'")
    return value


def holds(text: str, scope: Mapping[str, Any]) -> bool:
    """Return whether a condition holds.

    Raises:
        ExpressionError: it cannot be evaluated, or is no condition.
    """
    value = evaluate(text, scope)
    if not isinstance(value, bool):
        raise ExpressionError(f"{text!r} is {value!r}: expected a condition, such as M < N or dtype == 'float32'")
    return value


def _checked(value: Any, shown: str) -> Any:
    if isinstance(value, int) and not SMALLEST <= value <= LARGEST:
        raise ExpressionError(f"{shown!r} is larger than 64 bits: integers from -2**63 to 2**64 - 1 are allowed")
    return value


class _Walk:
    """One evaluation."""

    def __init__(self, text: str, scope: Mapping[str, Any]) -> None:
        self._text = text
        self._scope = scope

    def value(self, node: Node) -> Any:
        return _checked(getattr(self, f"_{node[0]}")(*node[1:]), self._text)

    def _constant(self, value: Any) -> Any:
        return value

    def _name(self, name: str) -> Any:
        if name not in self._scope:
            raise ExpressionError(unbound(name, self._scope))
        return self._scope[name]

    def _list(self, *items: Node) -> list[Any]:
        return [self.value(item) for item in items]

    def _unary(self, sign: str, operand: Node) -> Any:
        value = self._number(self.value(operand))
        return -value if sign == "-" else value

    def _chain(self, first: Node, *rest: Any) -> Any:
        value = self._number(self.value(first))
        for sign, node in zip(rest[::2], rest[1::2], strict=True):
            value = _checked(self._try(_BINARY[sign], value, self._number(self.value(node))), self._text)
        return value

    def _call(self, name: str, *arguments: Node) -> Any:
        if name not in _FUNCTIONS:
            known = ", ".join(sorted(_FUNCTIONS))
            raise ExpressionError(f"unknown function {name!r} in {self._text!r}: expected one of {known}")
        function, fewest, most = _FUNCTIONS[name]
        if not fewest <= len(arguments) <= most:
            takes = str(fewest) if fewest == most else f"at least {fewest}"
            raise ExpressionError(f"{self._text!r}: {name} takes {takes} arguments, found {len(arguments)}")
        return self._try(function, *(self._number(self.value(argument)) for argument in arguments))

    def _compare(self, first: Node, *rest: Any) -> bool:
        left = self.value(first)
        for sign, node in zip(rest[::2], rest[1::2], strict=True):
            right = self.value(node)
            if not self._try(_COMPARE[sign], left, right):
                return False
            left = right
        return True

    def _not(self, operand: Node) -> bool:
        return not self._condition(operand)

    def _and(self, *operands: Node) -> bool:
        return all(self._condition(operand) for operand in operands)

    def _or(self, *operands: Node) -> bool:
        return any(self._condition(operand) for operand in operands)

    def _condition(self, node: Node) -> bool:
        value = self.value(node)
        if not isinstance(value, bool):
            raise ExpressionError(f"{self._text!r} takes {value!r} for a condition: expected a comparison")
        return value

    def _try(self, function: Callable[..., Any], *values: Any) -> Any:
        try:
            return function(*values)
        except ZeroDivisionError as error:
            raise ExpressionError(f"division by zero in {self._text!r}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise ExpressionError(f"{self._text!r}: {error}") from error

    def _number(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ExpressionError(f"{self._text!r} computes with {value!r}, which is not a number")
        return value


def unbound(name: str, scope: Mapping[str, Any]) -> str:
    """Return the message for a name that is not bound: what is, and the closest spelling."""
    close = close_names(name, scope)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"name {name!r} is not bound by the case{meant} (bound: {listed(scope)})"


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that is spelled most like this one, or nothing; capitals do not count."""
    folded = {each.lower(): each for each in known}
    return [folded[found] for found in difflib.get_close_matches(name.lower(), folded, n=1)]


def listed(names: Iterable[str]) -> str:
    """Return names as messages list them: sorted, the first twenty."""
    every = sorted(names)
    return ", ".join(every[:20]) + (f" and {len(every) - 20} more" if len(every) > 20 else "") if every else "nothing"
