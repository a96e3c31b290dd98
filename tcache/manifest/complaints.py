"""From pydantic's complaints to lines that say where, what was found and what was expected."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from tcache.errors import ManifestError
from tcache.manifest.arguments import DTYPES, TAGS, Descriptor, Tensor
from tcache.manifest.model import CallItem, KernelItem, LaunchesItem, Manifest
from tcache.manifest.reading import KEY

if TYPE_CHECKING:
    from pydantic import ValidationError

    from tcache.manifest.reading import At, Document

__all__ = ["complaints", "cut_hint", "shown", "unknown_dtype"]

_NOUNS = {
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "none_required": "null",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_MOST = 500
"""Complaints of pydantic that are looked at; a wrong value in a union gives several."""
_MODELS = {**TAGS, "<call>": CallItem, "<kernel>": KernelItem, "<launches>": LaunchesItem}
_CALLED = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
           "fp64": "float64", "double": "float64", "long": "int64", "int": "int32", "fp8": "float8_e4m3fn",
           "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2", "fp8e4b8": "float8_e4m3fnuz",
           "fp8e5b16": "float8_e5m2fnuz", "i1": "bool"}  # fmt: skip


def shown(value: Any) -> str:
    """Return how a message shows a value of the document."""
    if isinstance(value, dict):
        return f"a mapping of {', '.join(map(str, value))[:40]}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def complaints(document: Document, error: ValidationError) -> list[ManifestError]:
    """Return one line for every place pydantic complains about, in the order of the file."""
    groups: dict[At, list[Any]] = {}
    for row in error.errors()[:_MOST]:
        at: At = ()
        for step in row["loc"]:  # pydantic adds the names of union members, which are no part of the document
            if (*at, step) in document.marks:
                at = (*at, step)
        groups.setdefault(at, []).append(row)
    found = []
    for at, rows in groups.items():
        if all(row["type"] in _NOUNS for row in rows):
            if not any(len(other) > len(at) and other[: len(at)] == at for other in groups):
                found.append((at, _wrong_type(document, at, rows)))
            continue  # else the branch of the union that fits says more
        # a misspelt key is both unknown and missing: the first says more
        unknown = any(row["type"] == "extra_forbidden" for other in _around(groups, at) for row in groups[other])
        told = [row for row in rows if row["type"] not in {*_NOUNS, *(["missing"] if unknown else [])}]
        found += [(at, _one(document, at, row)) for row in told]
    return [problem for _, problem in sorted(found, key=lambda pair: document.marks.get(pair[0], (1, 1)))]


def _around(groups: dict[At, list[Any]], at: At) -> list[At]:
    return [other for other in groups if other[: len(at)] == at and len(other) <= len(at) + 1]


def _path(at: At) -> str:
    return ".".join(map(str, at)) or "the manifest"


def _wrong_type(document: Document, at: At, rows: list[Any]) -> ManifestError:
    nouns = list(dict.fromkeys(_NOUNS[row["type"]] for row in rows))
    if nouns == ["a list"]:  # where one may stand for a list of one
        one = "a mapping" if at[:-1] == ("shapes",) else "text" if at[-1] in ("include", "shapes", "where") else None
        nouns = [*([one] if one else []), "a list"]
    expected = nouns[0] if len(nouns) == 1 else f"{', '.join(nouns[:-1])} or {nouns[-1]}"
    return ManifestError(document.where(*at), f"{_path(at)}: expected {expected}, found {shown(rows[0]['input'])}")


def _one(document: Document, at: At, row: Any) -> ManifestError:
    kind, context, last = row["type"], row.get("ctx", {}), (row["loc"] or (None,))[-1]
    value = shown(row.get("input"))
    hint = None
    if kind == "extra_forbidden":
        allowed = _allowed(row["loc"])
        close = difflib.get_close_matches(str(last), allowed, n=1)
        problem = f"unknown key {last!r}: expected one of {', '.join(allowed)}"
        hint = f"did you mean {close[0]!r}?" if close else cut_hint(str(last))
        at = (*at, KEY) if (*at, KEY) in document.marks else at
    elif kind == "missing":
        keys = f", found only {', '.join(map(str, row['input']))}" if isinstance(row["input"], dict) else ""
        problem = f"key {last!r} is missing{keys}"
    elif kind == "no_kernels":
        problem = "key 'kernels' is missing: expected it, or one of 'include' and 'shapes'"
    elif kind == "too_short":
        problem = f"{_path(at[-1:])} is empty: expected at least {context['min_length']} item"
    elif kind == "too_long":
        problem = f"{_path(at)}: expected at most {context['max_length']} items, found {context['actual_length']}"
    elif kind in ("string_too_short", "string_too_long"):
        limits = {"string_too_short": "some text", "string_too_long": f"at most {context.get('max_length')} characters"}
        problem = f"{_path(at)}: expected {limits[kind]}, found {value}"
    elif kind == "string_pattern_mismatch":
        problem = f"{_path(at)}: expected a name of letters, digits and _, found {value}"
    elif kind == "literal_error":
        problem, hint = _literal(at, context["expected"], row["input"])
    else:
        message = row["msg"][0].lower() + row["msg"][1:]
        problem = f"{_path(at)}: {message}, found {value}"
        if kind == "item" and isinstance(row["input"], dict):
            close = [
                m
                for key in row["input"]
                for m in difflib.get_close_matches(str(key), ("call", "kernel", "launches"), n=1)
            ]
            hint = f"did you mean {close[0]!r}?" if close and len(close) == 1 else None
    return ManifestError(document.where(*at), problem, hint)


def _literal(at: At, expected: str, value: Any) -> tuple[str, str | None]:
    if at == ("version",):
        newer = isinstance(value, int) and not isinstance(value, bool) and value > 1
        problem = f"version: expected 1, found {shown(value)}"
        return problem, "this manifest is for a newer tcache: pip install --upgrade triton-tcache" if newer else None
    close = difflib.get_close_matches(
        str(value), [word.strip("' ") for word in expected.replace(" or ", ",").split(",")], n=1
    )
    return f"{_path(at)}: expected {expected}, found {shown(value)}", f"did you mean {close[0]!r}?" if close else None


def _allowed(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Manifest
    for step in loc[:-1]:
        model = Tensor if model is Descriptor and step == "descriptor" else _MODELS.get(step, model)
    return sorted(field.alias or name for name, field in model.model_fields.items())


def cut_hint(name: str) -> str | None:
    """Return what to do about a key that is the rest of an expression: between braces a comma ends a value."""
    return 'quote an expression that has a comma, between braces: "cdiv(n, 2)"' if ")" in name or "]" in name else None


def unknown_dtype(where: str, dtype: Any) -> ManifestError:
    """Return the refusal of an element type that no kernel can be given."""
    close = [_CALLED[str(dtype)]] if str(dtype) in _CALLED else difflib.get_close_matches(str(dtype), DTYPES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else None
    return ManifestError(where, f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}", hint)
