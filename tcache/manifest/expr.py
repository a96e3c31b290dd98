"""The expression language of manifests: integer arithmetic over names. Parsed, walked, never ``eval``'d."""

from __future__ import annotations

import ast
import difflib
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ExpressionError", "evaluate", "names"]

_LONGEST = 1000
_LARGEST = 2**63


class ExpressionError(ValueError):
    """An expression that does not follow the language, or a name that is not bound."""


def _cdiv(a: Any, b: Any) -> Any:
    return -(-a // b)


def _next_power_of_2(n: Any) -> Any:
    return 1 << max(0, int(n) - 1).bit_length()


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cdiv": _cdiv,
    "max": max,
    "min": min,
    "next_power_of_2": _next_power_of_2,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LANGUAGE = "integers, names, + - * // %, parentheses, cdiv(a, b), min, max, next_power_of_2(n)"


def _parse(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ExpressionError(f"expression of {len(text)} characters, at most {_LONGEST} are allowed")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text!r} is not an expression: expected {_LANGUAGE}") from error


def names(text: str) -> set[str]:
    """Return the names an expression reads.

    Raises:
        ExpressionError: it is not an expression of the language.
    """
    tree = _parse(text)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}


def evaluate(text: str | float, scope: Mapping[str, Any]) -> Any:
    """Return the value of an expression; numbers stand for themselves.

    Args:
        text: the expression.
        scope: name -> value.

    Raises:
        ExpressionError: a name is unbound, the language is left, or a value exceeds 64 bits.
    """
    if not isinstance(text, str):
        return text
    try:
        return _walk(_parse(text), text, scope)
    except RecursionError as error:
        raise ExpressionError(f"{text[:40]!r}… is nested too deeply") from error


def _walk(node: ast.expr, text: str, scope: Mapping[str, Any]) -> Any:
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.Name):
        if node.id not in scope:
            raise ExpressionError(unbound(node.id, scope))
        return scope[node.id]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        operand = _number(_walk(node.operand, text, scope), text)
        value = -operand if isinstance(node.op, ast.USub) else operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = (_number(_walk(side, text, scope), text) for side in (node.left, node.right))
        try:
            value = _BINARY[type(node.op)](left, right)
        except ZeroDivisionError as error:
            raise ExpressionError(f"division by zero in {text!r}") from error
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        value = _call(node.func.id, [_number(_walk(item, text, scope), text) for item in node.args], text)
    else:
        raise ExpressionError(f"{text!r} is not an expression: expected {_LANGUAGE}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ExpressionError(f"{text!r} is larger than 64 bits")
    return value


def _call(name: str, arguments: list[Any], text: str) -> Any:
    if name not in _FUNCTIONS:
        raise ExpressionError(f"unknown function {name!r} in {text!r}: expected one of {', '.join(sorted(_FUNCTIONS))}")
    try:
        return _FUNCTIONS[name](*arguments)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ExpressionError(f"{text!r}: {error}") from error


def _number(value: Any, text: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ExpressionError(f"{text!r} computes with {value!r}, which is not a number")
    return value


def unbound(name: str, scope: Mapping[str, Any]) -> str:
    """Return the message for a name that is not bound: what is, and the closest spelling."""
    close = difflib.get_close_matches(name, list(scope), n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    bound = ", ".join(sorted(scope)) or "nothing"
    return f"name {name!r} is not bound by the case{meant} (bound: {bound})"
