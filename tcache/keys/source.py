"""Source identity: whether the kernel that was tuned has changed since.

Covers the kernel's syntax tree, that of every jit function it reaches, and the globals, closure values and defaults
they read. Leaves out what cannot change the kernel: line numbers, file paths, formatting, comments, docstrings and
decorators. Triton's own key is of no use here: it changes when a line is added above the kernel.
"""

from __future__ import annotations

import ast
import builtins
import copy
import enum
import functools
import inspect
import json
import textwrap
import types
import weakref
from dataclasses import dataclass
from typing import Any

from tcache._fs import sha256_bytes
from tcache._triton.kernels import JITCallable
from tcache.errors import UnsupportedValue
from tcache.keys._text import encode_value
from tcache.keys.bucket import bucket_text

__all__ = ["constants_read", "source_identity"]

SCHEMA = 1


def source_identity(function: Any, buckets: dict[str, Any] | None = None) -> str:
    """Return the identity of a jit function's source and of everything it reads.

    Args:
        function: a ``JITFunction`` (not an autotuner around one).
        buckets: how an autotuner buckets its key arguments, since that gives its shape keys their meaning.
    """
    seen: dict[int, str] = {}
    found: dict[str, Any] = {}
    _visit(function, seen, found)
    fields: dict[str, Any] = {"schema": SCHEMA, "functions": found}
    if buckets:
        fields["buckets"] = {name: bucket_text(spec) for name, spec in buckets.items()}
    payload = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return "sha256:" + sha256_bytes(payload.encode())[:32]


def constants_read(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the plain global values that a jit function and the jit functions it calls read.

    Returns:
        ``(namespace, name, value)`` for each: whether the value is still so decides whether the kernel is. Functions,
        modules and classes are left out, as upstream leaves them out (``DependenciesFinder`` in
        ``triton/runtime/jit.py``).
    """
    found: list[tuple[dict[str, Any], str, Any]] = []
    seen: set[int] = set()

    def visit(callable_: Any) -> None:
        if id(callable_) in seen:
            return
        seen.add(id(callable_))
        python = callable_.fn
        text = _text(callable_, python)
        for path in text.names if text is not None else ():
            value = _resolve(path, python.__globals__)
            if isinstance(value, JITCallable):
                visit(value)
            elif len(path) == 1 and path[0] in python.__globals__ and _is_plain(value):
                found.append((python.__globals__, path[0], _copied(value)))

    visit(function)
    return found


def _is_plain(value: Any) -> bool:
    """Return whether upstream would watch a global of this value."""
    if type(value).__name__ == "constexpr" and hasattr(value, "value"):
        return True
    return value is not None and not isinstance(value, types.ModuleType) and not callable(value)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied is compared with itself
        return value


def _visit(function: Any, seen: dict[int, str], found: dict[str, Any]) -> str:
    """Describe ``function`` and what it reaches in ``found``; return the label it has there.

    Labels count functions in the order they are reached, which the sorted names of what is read determine: two
    functions of one text that read different values are two.
    """
    if id(function) in seen:
        return seen[id(function)]
    python = function.fn if isinstance(function, JITCallable) else function
    label = seen[id(function)] = f"{len(seen)} {python.__qualname__}"
    text = _text(function, python)
    if text is None:
        plain = [value for value in python.__code__.co_consts if isinstance(value, (bool, int, float, str))]
        found[label] = {"code": python.__code__.co_code.hex(), "constants": plain}
        return label
    found[label] = description = {
        "body": text.body,
        "noinline": bool(getattr(function, "noinline", False)),
        "unspecialized": sorted(map(str, getattr(function, "do_not_specialize", None) or [])),
        "unaligned": sorted(map(str, getattr(function, "do_not_specialize_on_alignment", None) or [])),
    }
    reads: dict[str, Any] = {}
    for name, parameter in inspect.signature(python).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            reads[f"default {name}"] = _describe(parameter.default, seen, found, ())
    scope = {**vars(builtins), **python.__globals__, **inspect.getclosurevars(python).nonlocals}
    for path in text.names:
        value = _resolve(path, scope)
        if value is not _NOTHING:
            reads[".".join(path)] = _describe(value, seen, found, ())
    description["reads"] = reads
    return label


@dataclass(frozen=True)
class _Text:
    """What the text of a function says by itself.

    Attributes:
        version: what it was made from: the text of a jit function, the code object of a plain one.
        body: digest of its syntax tree.
        names: names and dotted names it reads.
    """

    version: Any
    body: str
    names: list[tuple[str, ...]]


_texts: weakref.WeakKeyDictionary[Any, _Text] = weakref.WeakKeyDictionary()
"""Parsing is most of the work, and a function meets a new shape more often than a new text."""


def _text(function: Any, python: Any) -> _Text | None:
    """Return a function's text; None for a plain function without readable source."""
    version = python.__code__ if function is python else str(function.src)
    known = _texts.get(python)
    if known is not None and known.version == version:
        return known
    if function is python:  # a plain function, which constexpr functions may call
        try:
            tree: ast.AST = ast.parse(textwrap.dedent(inspect.getsource(python)))
        except (OSError, TypeError, SyntaxError):
            return None
    else:
        tree = ast.parse(version)  # what Triton compiles: from `def` on, dedented, without decorators
    body = sha256_bytes(json.dumps(_canonical(tree), separators=(",", ":")).encode())
    found = _texts[python] = _Text(version, body, _loaded_names(tree))
    return found


def _canonical(node: Any) -> Any:
    """Return a syntax tree as nested lists that are the same on every Python that parses it the same.

    ``ast.dump`` is no such form: it shows fields that newer versions add, empty or not.
    """
    if isinstance(node, ast.Constant):
        return ["Constant", ["value", [type(node.value).__name__, str(node.value)]]]
    if isinstance(node, ast.AST):
        kind: Any = type(node)
        shown: list[Any] = [kind.__name__]
        for name in _fields(kind):
            value: Any = getattr(node, name, None)
            if name == "body" and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
            elif name == "values" and isinstance(node, ast.JoinedStr):  # 3.12 adds empty constants to nested formats
                value = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
            if value is not None and value != []:
                shown.append([name, _canonical(value)])
        return shown
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    return node


@functools.cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    return tuple(sorted(name for name in kind._fields if name not in _SILENT))


_SILENT = ("ctx", "type_comment", "decorator_list", "kind")
_NOTHING = object()
_DEEPEST = 4
"""How far the attributes of objects are followed."""


def _loaded_names(tree: ast.AST) -> list[tuple[str, ...]]:
    """Return the names and dotted names a function reads, longest dotted form only, except its own locals.

    In the order of evaluation, as upstream's ``DependenciesFinder`` goes through it: a name that is read before it is
    assigned is a global until then (``v = o * S; S = v``). A name that is local to a comprehension or lambda only may
    also be a global that the function reads; taking it for one costs nothing but a value too many in the identity.
    """
    local: set[str] = set()
    paths: set[tuple[str, ...]] = set()

    def visit(node: ast.AST, *, inner: bool) -> None:
        path: list[str] = []
        root = node
        while isinstance(root, ast.Attribute):
            path.append(root.attr)
            root = root.value
        if isinstance(root, ast.Name):
            if isinstance(root.ctx, ast.Store) and not path:
                if not inner:
                    local.add(root.id)
            elif root.id not in local:
                paths.add((root.id, *reversed(path)))
            return
        if isinstance(node, ast.arg) and not inner:
            local.add(node.arg)
        hidden = inner or isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda))
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id not in local:
            paths.add((node.target.id,))
        for child in _in_order(node):
            visit(child, inner=hidden)

    visit(tree, inner=False)
    return sorted(paths)


def _in_order(node: ast.AST) -> list[ast.AST]:
    """Return a node's children in the order they are evaluated: what is assigned before what it is assigned to."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        return [node.value, *(child for child in children if child is not node.value)]
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.iter, node.target, *node.body, *node.orelse]
    return children


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


def _describe(value: Any, seen: dict[int, str], found: dict[str, Any], within: tuple[int, ...]) -> Any:
    if type(value).__name__ == "constexpr" and hasattr(value, "value"):
        return {"constexpr": _describe(value.value, seen, found, within)}
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if _is_upstream(value) and hasattr(value, "__qualname__"):
        return f"triton {value.__module__}.{value.__qualname__}"  # belongs to the release, not to the kernel
    if isinstance(value, JITCallable):
        return {"calls": _visit(value, seen, found)}
    if isinstance(value, enum.Enum):
        return {
            "enum": f"{type(value).__qualname__}.{value.name}",
            "value": _describe(value.value, seen, found, within),
        }
    if isinstance(value, types.FunctionType):
        return {"calls": _visit(value, seen, found)}
    if id(value) in within:
        return "itself"
    parts = _parts(value, seen, found, (*within, id(value)))
    if parts is not None:
        return parts
    try:
        return {"value": encode_value(value)}
    except UnsupportedValue:
        return f"object of {type(value).__module__}.{type(value).__qualname__}"


def _parts(value: Any, seen: dict[int, str], found: dict[str, Any], within: tuple[int, ...]) -> Any:
    """Describe what a container or an object holds; None for a value that holds nothing of its own."""

    def each(items: Any) -> list[Any]:
        return [_describe(item, seen, found, within) for item in items]

    if getattr(value, "__triton_aggregate__", False):
        kinds = getattr(value, "__annotations__", {})
        fields = [[name, getattr(kind, "__qualname__", None) or str(kind)] for name, kind in kinds.items()]
        return {"aggregate": each(getattr(value, "hash_attrs", [])), "fields": fields}
    if isinstance(value, dict):
        return {"dict": sorted((each(row) for row in value.items()), key=json.dumps)}
    if isinstance(value, (tuple, list)):
        return each(value)
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(each(value), key=json.dumps)}
    followed = hasattr(value, "__dict__") and not isinstance(value, type) and not _is_upstream(value)
    if followed and len(within) <= _DEEPEST:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"object": kind, "fields": each(sorted(vars(value).items(), key=lambda row: str(row[0])))}
    return None
