"""Add to a manifest somebody wrote, and keep their comments and layout: text is inserted, none is rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tcache._fs import atomic_write
from tcache.errors import ManifestError
from tcache.manifest.reading import parse_document, read_document

if TYPE_CHECKING:
    from tcache.manifest.reading import Document

__all__ = ["HEAD", "append_cases", "append_items", "flow"]

HEAD = "version: 1\n"
"""What a manifest begins with that is made from nothing."""


def append_items(path: Path, items: list[dict[str, Any]], comment: str = "") -> None:
    """Add items at the end of a manifest's ``kernels``; make the file if there is none.

    Everything that is in the file stays as it is, to the byte. The result is parsed before it is written.

    Args:
        path: the manifest.
        items: items as plain data: dicts in the order their keys shall stand.
        comment: lines to put above the first item, without ``#``.

    Raises:
        ManifestError: the file is no manifest, or its layout leaves no place to add to.
        ValueError: an item holds what a manifest cannot.
        OSError: the file cannot be written.
    """
    document = read_document(path) if path.exists() else parse_document(path, HEAD)
    if not isinstance(document.data, dict):
        raise ManifestError(document.where(), "expected a mapping with 'version: 1' and 'kernels:'")
    if "kernels" not in document.data:
        begun = document.text if not document.text or document.text.endswith("\n") else f"{document.text}\n"
        text = begun + "kernels:\n" + _block(items, "  ", comment)
    else:
        text = _extended(document, ("kernels",), items, comment)
    _write(document, text, ("kernels",), items)


def append_cases(path: Path, item: int, cases: list[dict[str, Any]], comment: str = "") -> None:
    """Add cases at the end of one item's ``cases``, as :func:`append_items` adds items.

    Args:
        path: the manifest.
        item: number of the item, from 0.
        cases: the cases as plain data.
        comment: lines to put above the first case, without ``#``.

    Raises:
        ManifestError: there is no such item, or its layout leaves no place to add to.
        ValueError: a case holds what a manifest cannot.
        OSError: the file cannot be written.
    """
    document = read_document(path)
    at = ("kernels", item, "cases")
    if at not in document.marks or not isinstance(_data(document.data, at), list):
        raise ManifestError(document.where("kernels", item), f"item {item} has no list of cases to add to")
    _write(document, _extended(document, at, cases, comment), at, cases)


def _data(data: Any, at: tuple[Any, ...]) -> Any:
    for step in at:
        data = data[step]
    return data


def _write(document: Document, text: str, at: tuple[Any, ...], added: list[Any]) -> None:
    """Write the text if it says what was there and what was added, and nothing else."""
    before = parse_document(document.path, document.text).data  # a copy of our own
    before.setdefault("kernels", [])
    _data(before, at).extend(added)
    try:
        after = parse_document(document.path, text).data
    except ManifestError:
        after = None
    if repr(after) != repr(json.loads(json.dumps(before))):
        raise ManifestError(
            document.where(*at), "there is no place to add to in this layout", "write the list one item a line"
        )
    mode = document.path.stat().st_mode & 0o777 if document.path.exists() else 0o644
    atomic_write(document.path, text.encode("utf-8"), mode)


def _extended(document: Document, at: tuple[Any, ...], added: list[Any], comment: str) -> str:
    node = _node(document, at)
    newline = "\r\n" if "\r\n" in document.text else "\n"
    if not isinstance(node, yaml.SequenceNode):
        raise ManifestError(document.where(*at), f"{at[-1]} is no list to add to")
    if node.flow_style:
        end = node.end_mark.index - 1  # before the bracket
        inside = document.text[:end].rstrip()
        comma = ", " if node.value and not inside.endswith(",") else " " if node.value else ""
        return inside + comma + ", ".join(map(flow, added)) + document.text[end:]
    end = document.text.find("\n", _last(node))
    begun = document.text[: end + 1] if end >= 0 else document.text + newline
    text = _block(added, " " * node.start_mark.column, comment).replace("\n", newline)
    return begun + text + (document.text[end + 1 :] if end >= 0 else "")


def _node(document: Document, at: tuple[Any, ...]) -> Any:
    node: Any = document.node
    for step in at:
        pairs = dict(enumerate(node.value)) if isinstance(step, int) else {key.value: each for key, each in node.value}
        node = pairs[step]
    return node


def _last(node: yaml.Node) -> int:
    """Return where the last text of a node ends: a block's own mark lies beyond the comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last(node.value[-1])
    end: int = node.end_mark.index
    return end - 1 if getattr(node, "style", None) in ("|", ">") else end


def _block(items: list[Any], indent: str, comment: str) -> str:
    lines = [f"{indent}# {line}".rstrip() for line in comment.splitlines()]
    for item in items:
        nested = isinstance(item, dict) and {"args", "cases"} & item.keys()
        if not nested:
            lines.append(f"{indent}- {flow(item)}")
            continue
        lead = "- "
        for key, value in item.items():
            if key in ("args", "cases") and value:
                lines.append(f"{indent}{lead}{flow(key)}:")
                rows = (
                    [f"{flow(name)}: {flow(each)}" for name, each in value.items()]
                    if isinstance(value, dict)
                    else [f"- {flow(each)}" for each in value]
                )
                lines += [f"{indent}    {row}" for row in rows]
            else:
                lines.append(f"{indent}{lead}{flow(key)}: {flow(value)}")
            lead = "  "
    return "".join(f"{line}\n" for line in lines)


def flow(value: Any) -> str:
    """Return a value as one line of YAML that reads back as it was.

    Raises:
        ValueError: it is nothing a manifest can hold.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    if isinstance(value, str):
        return value if _plain(value) else _quoted(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(str(name))}: {flow(each)}" for name, each in value.items()) + "}"
    raise ValueError(f"{value!r} is nothing a manifest can hold")


def _plain(text: str) -> bool:
    """Return whether text may stand without quotes wherever a key or value may."""
    if (
        not text.isascii()
        or not text.isprintable()
        or text[:1] in ("", "?", "-", "&", "*", "!", "%", "@", "`", "|", ">")
    ):
        return False
    try:
        read = parse_document(Path("text"), f"[{text}, {{{text}: {text}}}]").data
        return bool(read == [text, {text: text}] and parse_document(Path("text"), f"a: {text}").data == {"a": text})
    except ManifestError:
        return False


def _quoted(text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in escaped)
