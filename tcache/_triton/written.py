"""Which arguments a kernel may write to, read off its source: a replay keeps what it knows of the others."""

from __future__ import annotations

import ast
import functools
import textwrap
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import jit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["written_arguments"]

_WRITES = ("store", "scatter", "reduce")


def written_arguments(kernel: Any) -> frozenset[str]:
    """Return the names of the arguments that a kernel may write to: rather too many than too few.

    An argument counts when a pointer made from it reaches a store or an atomic operation, or another function.
    What is only loaded from, or compared, does not. A kernel whose source cannot be read writes to every argument.
    """
    function = jit_of(kernel)
    try:
        return _written(function.raw_src if isinstance(function.raw_src, str) else "".join(function.raw_src))
    except (AttributeError, SyntaxError, TypeError, StopIteration):
        return frozenset(getattr(kernel, "arg_names", ()))


@functools.cache
def _written(source: str) -> frozenset[str]:
    tree = ast.parse(textwrap.dedent(source))
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    arguments = {argument.arg for argument in (*function.args.posonlyargs, *function.args.args)}
    found: set[str] = set()
    flows: list[tuple[set[str], set[str]]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            found |= _targets(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            places = node.targets if isinstance(node, ast.Assign) else [node.target]
            flows.append(({name for place in places for name in _pointers(place)}, set(_pointers(node.value))))
        elif isinstance(node, ast.For):
            flows.append((set(_pointers(node.target)), set(_pointers(node.iter))))
    while True:
        more = {name for to, come_from in flows if to & found for name in come_from} - found
        if not more:
            return frozenset(found & arguments)
        found |= more


def _targets(call: ast.Call) -> set[str]:
    """Return the names whose pointers a call may write through."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    everything = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name.startswith("atomic_") or any(name.endswith(word) for word in _WRITES):
        owner = [function.value] if isinstance(function, ast.Attribute) else []
        return {found for part in (*owner, *everything) for found in _pointers(part)}
    of_triton = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    if of_triton or name in _BUILTIN:
        return set()
    return {found for part in everything for found in _pointers(part)}


_BUILTIN = ("range", "len", "min", "max", "float", "int", "bool", "isinstance", "print")


def _pointers(node: ast.AST) -> Iterator[str]:
    """Yield the names whose value may be part of an expression's pointers: not what is loaded through them."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
        return
    else:
        for child in ast.iter_child_nodes(node):
            yield from _pointers(child)
