"""Reading YAML with the position of every node, and without what manifests have no use for.

The dialect is YAML 1.2's core schema, the one editors check against: ``on`` and ``no`` are text, ``1e-5`` is a number,
``1:30`` and ``2024-01-01`` are text. Aliases, tags and keys that stand twice are refused, and so is what is too large.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tcache.errors import ManifestError

__all__ = ["KEY", "Document", "parse_document", "read_document"]

LARGEST_FILE = 1_000_000
"""Bytes a manifest may have."""
DEEPEST = 32
"""How deep a manifest may nest."""

At = tuple[Any, ...]
KEY = object()
"""Last step of the path of a key itself, as against its value."""


class Document:
    """What a manifest's file says, and where.

    Args:
        path: the file.
        data: its content; None when it is empty.
        marks: line and column, from 1, of every node by its path of keys and indices.
        text: the file as it was read.
        node: the root of PyYAML's tree, for tools that edit.
    """

    def __init__(
        self, path: Path, data: Any, marks: dict[At, tuple[int, int]], text: str, node: yaml.Node | None = None
    ) -> None:
        self.path = path
        self.data = data
        self.marks = marks
        self.text = text
        self.node = node

    def where(self, *at: Any) -> str:
        """Return ``file:line:column`` of the node at a path, or of the closest node around it.

        Items of lists of expressions are counted as the model counts them.
        """
        at = self._as_written(at)
        while at not in self.marks and at:
            at = at[:-1]
        line, column = self.marks.get(at, (1, 1))
        return f"{self.path}:{line}:{column}"

    def _as_written(self, at: At) -> At:
        found: list[Any] = []
        data = self.data
        for step in at:
            here = step
            if isinstance(step, int) and found and found[-1] in EXPRESSIONS and isinstance(data, list):
                begun = starts(data)
                here = begun[step] if step < len(begun) else step
            found.append(here)
            try:
                data = data[here]
            except (KeyError, IndexError, TypeError):
                data = None
        return tuple(found)


EXPRESSIONS = frozenset({"block", "grid", "shape", "stride", "where"})
"""Keys of lists of expressions, which may be written without quotes although they have commas."""


def starts(items: list[Any]) -> list[int]:
    """Return where expressions begin in what YAML made of ``[cdiv(n, BLOCK), 1]``: where the parentheses balance."""
    found, open_ = [], 0
    for index, item in enumerate(items):
        if open_ <= 0:
            found.append(index)
            open_ = 0
        if isinstance(item, str):
            open_ += item.count("(") - item.count(")")
    return found


def read_document(path: Path) -> Document:
    """Read a file.

    Raises:
        ManifestError: it cannot be read, is too large, or is no YAML; the message has line and column.
    """
    return parse_document(path, _text(path))


def parse_document(path: Path, text: str) -> Document:
    """Parse the text of a file; ``path`` serves for messages.

    Raises:
        ManifestError: it is no YAML; the message has line and column.
    """
    marks: dict[At, tuple[int, int]] = {}
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # characters that YAML does not allow
        found = text[getattr(error, "position", 0) :][:1]
        place = _place(text[: getattr(error, "position", 0)])
        raise ManifestError(f"{path}:{place}", f"not YAML: the character {found!r} is not allowed") from error
    loader.path = path
    try:
        node = loader.get_single_node()
        if node is not None:
            _mark(path, node, (), marks)
        return Document(path, loader.construct_document(node) if node is not None else None, marks, text, node)
    except yaml.YAMLError as error:
        raise _not_yaml(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path}:1:1", f"not YAML: {error}") from error
    finally:
        loader.dispose()


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        reason = "a path cannot hold a NUL character" if "\0" in str(path) else reason
        raise ManifestError(str(path), f"cannot be read: {reason}", "give the path of a shape manifest") from error
    if len(data) > LARGEST_FILE:
        raise ManifestError(
            f"{path}:1:1",
            f"the file is larger than {LARGEST_FILE:,} bytes, which is the most a manifest may have",
            "split it up and include the parts",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = _place(data[: error.start].decode("utf-8"))
        found = f"found the byte 0x{data[error.start]:02x}"
        raise ManifestError(f"{path}:{place}", f"cannot be read: expected UTF-8 text, {found}") from error


def _place(before: str) -> str:
    return f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def _not_yaml(path: Path, error: yaml.YAMLError) -> ManifestError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else f"{path}:1:1"
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    context, begin = getattr(error, "context", None), getattr(error, "context_mark", None)
    begins = f" ({context}, from line {begin.line + 1})" if context and begin is not None else ""
    hint = "indent with blanks, not with tabs" if "'\\t'" in problem else None
    return ManifestError(where, f"not YAML: {problem}{begins}", hint)


class _Loader(yaml.SafeLoader):
    """Core schema scalars, no aliases, no tags, bounded depth."""

    path: Path
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's registry, of this class alone

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"{self.path}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ManifestError(
                where,
                f"aliases (*{event.anchor}) are not supported",
                "write the value out, or share cases between kernels with 'shapes:'",
            )
        if getattr(event, "tag", None) is not None:
            raise ManifestError(where, f"not YAML: tags ({event.tag}) are not supported: expected a plain value")
        self._depth += 1
        if self._depth > DEEPEST:
            raise ManifestError(where, f"nested too deeply: at most {DEEPEST} levels are allowed")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _integer(loader: _Loader, node: Any) -> int:
    text = node.value.replace("_", "")
    if len(text) > 100:
        mark = node.start_mark
        raise ManifestError(
            f"{loader.path}:{mark.line + 1}:{mark.column + 1}", f"integer of {len(text)} digits: at most 64 bits"
        )
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base)


def _float(_loader: _Loader, node: Any) -> float:
    text = node.value.lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_DIGITS = list("-+0123456789.")
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", _DIGITS),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", _DIGITS),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", _DIGITS),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def _mark(path: Path, node: yaml.Node, at: At, marks: dict[At, tuple[int, int]]) -> None:
    """Note the position of every node; refuse keys that stand twice, which YAML would accept silently."""
    marks[at] = (node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (key.start_mark.line + 1, key.start_mark.column + 1)
            where = f"{path}:{place[0]}:{place[1]}"
            if not isinstance(key, yaml.ScalarNode):
                raise ManifestError(where, "a key must be a plain name, found a collection")
            if key.tag != "tag:yaml.org,2002:str":
                kind = key.tag.rpartition(":")[2]
                raise ManifestError(
                    where, f"a key must be a plain name, found {key.value!r}, which YAML reads as {kind}"
                )
            if (*at, key.value) in marks:
                first = marks[(*at, key.value, KEY)][0]
                raise ManifestError(where, f"key {key.value!r} stands twice: it was given in line {first}")
            _mark(path, value, (*at, key.value), marks)
            marks[(*at, key.value, KEY)] = place
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _mark(path, value, (*at, index), marks)
