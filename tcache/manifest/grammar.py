"""The grammar of manifest expressions: text to a tree of tuples, with stated limits.

Written out rather than borrowed from :mod:`ast`: Python's own parser knows far more than manifests need, warns about
what it reads, and differs from release to release. A tree's first element names its kind; see :class:`_Parser`.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEEPEST", "LONGEST", "WORDS", "ExpressionError", "Node", "parse"]

LONGEST = 1000
"""Characters an expression may have."""
DEEPEST = 20
"""How deep an expression may nest."""

Node = tuple[Any, ...]

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?(?![\w.]))
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<text>'[^'\\\n]*'|"[^"\\\n]*")
    | (?P<sign>//|<=|>=|==|!=|[-+*/%()\[\],<>])
    )""",
    re.VERBOSE,
)
_WORDS = {"and", "or", "not", "in"}
_LITERALS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
WORDS = frozenset({*_WORDS, *_LITERALS})
"""Words of the language, which no case can bind."""
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=", "in", "not in")
LANGUAGE = (
    "numbers, 'text', names, + - * / // %, comparisons, and, or, not, in [a, b], parentheses, "
    "cdiv(a, b), min, max, next_power_of_2(n)"
)


class ExpressionError(ValueError):
    """An expression that does not follow the language, or a name that is not bound.

    Attributes:
        where: ``file:line:column`` of the expression, where whoever evaluates it knows.
    """

    where: str | None = None


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Node:
    """Return the tree of an expression.

    Raises:
        ExpressionError: it leaves the language or exceeds a limit.
    """
    if len(text) > LONGEST:
        raise ExpressionError(f"expression of {len(text)} characters, at most {LONGEST} are allowed")
    return _Parser(text).whole()


class _Parser:
    """Recursive descent, one method a level of precedence; every method returns a tree.

    Trees: ``(constant, value)``, ``(name, n)``, ``(list, *items)``, ``(unary, sign, operand)``,
    ``(chain, first, sign, second, …)``, ``(compare, first, sign, second, …)``, ``(not, operand)``,
    ``(and, *operands)``, ``(or, *operands)``, ``(call, name, *arguments)``. Operators of one level make one flat node,
    so that only parentheses make a tree deep.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._scan(text)
        self._at = 0
        self._depth = 0

    def _scan(self, text: str) -> list[tuple[str, str, int]]:
        tokens, place, end = [], 0, len(text.rstrip())
        while place < end:
            match = _TOKEN.match(text, place)
            if match is None or match.lastgroup is None:
                place += len(text[place:]) - len(text[place:].lstrip())
                raise self._refused(f"found {text[place]!r}", place)
            word = match[match.lastgroup]
            kind = "sign" if word in _WORDS else match.lastgroup
            tokens.append((kind, word, match.start(match.lastgroup)))
            place = match.end()
        return tokens

    def _refused(self, found: str, place: int) -> ExpressionError:
        return ExpressionError(
            f"{self._text!r} is not an expression: {found} at character {place + 1}; expected {LANGUAGE}"
        )

    def _unexpected(self) -> ExpressionError:
        if self._at >= len(self._tokens):
            return self._refused("it ends too early", len(self._text.rstrip()))
        _, word, place = self._tokens[self._at]
        return self._refused(f"found {word!r}", place)

    def _next(self) -> str:
        """Return the sign that comes next, empty for anything else."""
        kind, word, _ = self._tokens[self._at] if self._at < len(self._tokens) else ("", "", 0)
        return word if kind == "sign" else ""

    def _take(self, *signs: str) -> str:
        """Consume and return the next token if it is one of these signs, else return nothing."""
        word = self._next()
        if word == "not" and "not in" in signs:
            following = self._tokens[self._at + 1 : self._at + 2]
            if following and following[0][:2] == ("sign", "in"):
                self._at += 2
                return "not in"
            return ""
        if word and word in signs:
            self._at += 1
            return word
        return ""

    def whole(self) -> Node:
        tree = self._or()
        if self._at < len(self._tokens):
            raise self._unexpected()
        return tree

    def _or(self) -> Node:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ExpressionError(f"{self._text[:40]!r}… is nested too deeply: at most {DEEPEST} levels are allowed")
        tree = self._several("or", self._and)
        self._depth -= 1
        return tree

    def _and(self) -> Node:
        return self._several("and", self._not)

    def _several(self, word: str, operand: Callable[[], Node]) -> Node:
        found = [operand()]
        while self._take(word):
            found.append(operand())
        return (word, *found) if len(found) > 1 else found[0]

    def _not(self) -> Node:
        count = 0
        while self._take("not"):
            count += 1
        tree = self._compare()
        for _ in range(min(count, 2 - count % 2)):  # a pair of them is a test for a condition and nothing else
            tree = ("not", tree)
        return tree

    def _compare(self) -> Node:
        return self._chain("compare", _COMPARISONS, self._sum)

    def _sum(self) -> Node:
        return self._chain("chain", ("+", "-"), self._product)

    def _product(self) -> Node:
        return self._chain("chain", ("*", "/", "//", "%"), self._unary)

    def _chain(self, kind: str, signs: tuple[str, ...], operand: Callable[[], Node]) -> Node:
        parts: list[Any] = [operand()]
        while sign := self._take(*signs):
            parts += [sign, operand()]
        return (kind, *parts) if len(parts) > 1 else tuple(parts[0])

    def _unary(self) -> Node:
        negative, signed = False, False
        while sign := self._take("-", "+"):
            negative, signed = negative != (sign == "-"), True
        tree = self._atom()
        return ("unary", "-" if negative else "+", tree) if signed else tree

    def _atom(self) -> Node:
        if self._take("("):
            tree = self._or()
            if not self._take(")"):
                raise self._unexpected()
            return tree
        if self._take("["):
            return ("list", *self._items("]"))
        if self._at >= len(self._tokens) or self._next():
            raise self._unexpected()
        kind, word, _ = self._tokens[self._at]
        self._at += 1
        if kind == "number":
            return ("constant", int(word) if word.isdigit() else float(word))
        if kind == "text":
            return ("constant", word[1:-1])
        if self._take("("):
            return ("call", word, *self._items(")"))
        return ("constant", _LITERALS[word]) if word in _LITERALS else ("name", word)

    def _items(self, end: str) -> list[Node]:
        items: list[Node] = []
        while not self._take(end):
            items.append(self._or())
            if not self._take(",") and self._next() != end:
                raise self._unexpected()
        return items
