"""Source identity: whether the kernel that was tuned has changed since.

Covers the kernel's syntax tree, that of every jit function it reaches, and the globals, closure values and defaults
they read. Leaves out what cannot change the kernel: line numbers, file paths, formatting, comments, docstrings and
decorators. Triton's own key is of no use here: it changes when a line is added above the kernel.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import types
from typing import Any

from tcache._fs import sha256_bytes
from tcache._triton.kernels import JITCallable
from tcache.errors import UnsupportedValue
from tcache.keys._text import encode_value
from tcache.keys.bucket import bucket_text

__all__ = ["source_identity"]

SCHEMA = 1


def source_identity(function: Any, buckets: dict[str, Any] | None = None) -> str:
    """Return the identity of a jit function's source and of everything it reads.

    Args:
        function: a ``JITFunction`` (not an autotuner around one).
        buckets: how an autotuner buckets its key arguments, since that gives its shape keys their meaning.
    """
    found: dict[str, Any] = {}
    _visit(function, found)
    fields: dict[str, Any] = {"schema": SCHEMA, "functions": found}
    if buckets:
        fields["buckets"] = {name: bucket_text(spec) for name, spec in buckets.items()}
    payload = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return "sha256:" + sha256_bytes(payload.encode())[:32]


def _visit(function: Any, found: dict[str, Any]) -> str:
    """Describe ``function`` and what it reaches in ``found``; return the label it has there."""
    tree = ast.parse(str(function.src))  # `src` is what Triton compiles: from `def` on, dedented, without decorators
    body = _canonical(tree)
    digest = sha256_bytes(json.dumps(body, separators=(",", ":")).encode())
    label = f"{function.fn.__qualname__}#{digest[:12]}"
    if label in found:
        return label
    found[label] = description = {
        "body": digest,
        "noinline": bool(getattr(function, "noinline", False)),
        "unspecialized": sorted(map(str, getattr(function, "do_not_specialize", None) or [])),
        "unaligned": sorted(map(str, getattr(function, "do_not_specialize_on_alignment", None) or [])),
    }
    python = function.fn
    reads: dict[str, Any] = {}
    for name, parameter in inspect.signature(python).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            reads[f"default {name}"] = _describe(parameter.default, found)
    scope = {**vars(builtins), **python.__globals__, **inspect.getclosurevars(python).nonlocals}
    for path in _loaded_names(tree):
        value = _resolve(path, scope)
        if value is not _NOTHING:
            reads[".".join(path)] = _describe(value, found)
    description["reads"] = reads
    return label


def _canonical(node: Any) -> Any:
    """Return a syntax tree as nested lists that are the same on every Python that parses it the same.

    ``ast.dump`` is no such form: it shows fields that newer versions add, empty or not.
    """
    if isinstance(node, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(node) if name not in _SILENT}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = fields["body"][1:]
        shown = [[name, _canonical(value)] for name, value in sorted(fields.items()) if value not in (None, [])]
        if isinstance(node, ast.Constant):
            shown = [["value", [type(node.value).__name__, str(node.value)]]]
        return [type(node).__name__, *shown]
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    return node


_SILENT = ("ctx", "type_comment", "decorator_list", "kind")
_NOTHING = object()


def _loaded_names(tree: ast.AST) -> list[tuple[str, ...]]:
    """Return the names and dotted names a function reads, longest dotted form only, except its own locals."""
    local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    paths: set[tuple[str, ...]] = set()

    def visit(node: ast.AST) -> None:
        path: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            path.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and (path or isinstance(inner.ctx, ast.Load)):
            if inner.id not in local:
                paths.add((inner.id, *reversed(path)))
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return sorted(paths)


def _resolve(path: tuple[str, ...], scope: dict[str, Any]) -> Any:
    """Follow a dotted name; stop at the first value that is no module, since a constant's attributes are in it."""
    if path[0] not in scope:
        return _NOTHING
    value = scope[path[0]]
    for attribute in path[1:]:
        if not isinstance(value, (types.ModuleType, type)) or _is_upstream(value):
            break
        value = getattr(value, attribute, _NOTHING)
        if value is _NOTHING:
            return _NOTHING
    return value


def _is_upstream(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return name == "triton" or name.startswith("triton.")


def _describe(value: Any, found: dict[str, Any]) -> Any:
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if _is_upstream(value) and hasattr(value, "__qualname__"):
        return f"triton {value.__module__}.{value.__qualname__}"  # belongs to the release, not to the kernel
    if isinstance(value, JITCallable):
        return {"calls": _visit(value, found)}
    if getattr(value, "__triton_aggregate__", False):
        return {"aggregate": [_describe(item, found) for item in getattr(value, "hash_attrs", [])]}
    if isinstance(value, dict):
        return {"dict": sorted([str(_describe(key, found)), _describe(item, found)] for key, item in value.items())}
    if isinstance(value, (tuple, list)):
        return [_describe(item, found) for item in value]
    try:
        return {"value": encode_value(value)}
    except UnsupportedValue:
        return f"object of {type(value).__module__}.{type(value).__qualname__}"
