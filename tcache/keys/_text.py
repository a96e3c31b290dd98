"""Canonical text for named values, which parses back: the one grammar behind shape keys and config keys.

``name=value name=value | name=value``: groups separated by ``|``, fields by a space. A value is JSON without
spaces, or a bare word for things JSON has no word for: ``torch.bfloat16``, ``tl.float32``, ``@module.name``.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import operator
import re
from dataclasses import dataclass
from typing import Any

from tcache.errors import UnsupportedValue

__all__ = ["Word", "decode_groups", "encode_groups", "encode_value", "normalise"]

_NAME = re.compile(r"[^\W\d]\w*")
_WORD = re.compile(r"(?:@|(?:torch|tl)\.)[\w.<>]+")
_JSON = json.JSONDecoder()
_TEXT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Word:
    """A value written as a bare word: a dtype, or a function or class by its qualified name."""

    text: str

    def __str__(self) -> str:
        return self.text


def normalise(value: Any) -> Any:
    """Return ``value`` as what :func:`decode_groups` would give back: scalars, tuples and :class:`Word`.

    Raises:
        UnsupportedValue: there is no canonical text for such a value.
    """
    if value is None or isinstance(value, (bool, str, Word)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (tuple, list)):
        return tuple(normalise(item) for item in value)
    kind = type(value)
    if kind.__name__ == "constexpr" and hasattr(value, "value"):
        return normalise(value.value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return normalise(value.item())
    word = _word(value, kind)
    if word is not None:
        return Word(word)
    if hasattr(kind, "__index__") and not hasattr(value, "data_ptr"):
        with contextlib.suppress(TypeError):  # an array has it, and refuses
            return operator.index(value)
    raise UnsupportedValue(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be part of a persistent key",
        "use integers, floats, booleans, strings, None, dtypes or tuples of them",
    )


def _word(value: Any, kind: Any) -> str | None:
    """Return the bare word for a dtype, an enum's member, or a function or class; None for anything else."""
    if kind.__name__ in ("dtype", "MockDType", "layout", "memory_format") and str(value).startswith("torch."):
        return str(value)
    if kind.__module__.startswith("triton.language") and hasattr(value, "name"):
        return f"tl.{value.name}"
    if isinstance(value, enum.Enum):
        return f"@{kind.__module__}.{kind.__qualname__}.{value.name}"
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if name and module and "<lambda>" not in name and not hasattr(value, "data_ptr"):  # lambdas share a name
        return f"@{module}.{name}"
    return None


def encode_value(value: Any) -> str:
    """Return the canonical text of one value."""
    if type(value) is int:  # nearly all of them: a config has six, and a launch is resolved against every config
        return str(value)
    value = normalise(value)
    if isinstance(value, Word):
        return value.text
    if isinstance(value, tuple):
        return "[" + ",".join(encode_value(item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return _TEXT.encode(value)


def encode_groups(groups: list[list[tuple[str, Any]]]) -> str:
    """Return ``a=1 b=2 | c=3`` for ``[[("a", 1), ("b", 2)], [("c", 3)]]``."""
    return " | ".join(" ".join(f"{name}={encode_value(value)}" for name, value in group) for group in groups).strip(" ")


def _decode_value(text: str, at: int) -> tuple[Any, int]:
    if match := _WORD.match(text, at):
        return Word(match[0]), match.end()
    if text[at : at + 1] == "[":
        items: list[Any] = []
        at += 1
        while text[at : at + 1] != "]":
            if items:
                if text[at : at + 1] != ",":
                    raise ValueError(f"expected ',' or ']' at character {at + 1} of {text!r}")
                at += 1
            item, at = _decode_value(text, at)
            items.append(item)
        return tuple(items), at + 1
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a value at character {at + 1} of {text!r}") from error


def decode_groups(text: str) -> list[list[tuple[str, Any]]]:
    """Parse what :func:`encode_groups` wrote.

    Raises:
        ValueError: the text does not follow the grammar; the message says where.
    """
    groups: list[list[tuple[str, Any]]] = [[]]
    at = 0
    while at < len(text):
        if text[at] == " ":
            at += 1
        elif text[at] == "|":
            groups.append([])
            at += 1
        else:
            match = _NAME.match(text, at)
            if not match or text[match.end() : match.end() + 1] != "=":
                raise ValueError(f"expected name=value at character {at + 1} of {text!r}")
            value, at = _decode_value(text, match.end() + 1)
            if at < len(text) and text[at] != " ":
                raise ValueError(f"expected a space at character {at + 1} of {text!r}")
            groups[-1].append((match[0], value))
    return groups
