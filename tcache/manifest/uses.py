"""Where a manifest item has expressions, and which names they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcache.manifest.arguments import DTYPES, Constexpr, Descriptor, DType, ListArgument, Tensor, TupleArgument
from tcache.manifest.expr import ExpressionError, names
from tcache.manifest.model import KernelItem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tcache.manifest.model import CallItem
    from tcache.manifest.reading import At

__all__ = ["Slot", "names_of", "slots"]

Slot = tuple["At", str, Any]
"""Path below the item, kind (``value``, ``size``, ``dtype``, ``grid``) and text of an expression."""


def slots(item: CallItem | KernelItem) -> Iterator[Slot]:
    """Yield every place of an item that may read the case's names, conditions apart."""
    for name, argument in item.args.items():
        yield from _argument(("args", name), argument)
    if isinstance(item, KernelItem):
        for index, size in enumerate(item.grid):
            yield ("grid", index), "grid", size


def _argument(at: At, argument: Any) -> Iterator[Slot]:
    if isinstance(argument, Tensor):
        for index, size in enumerate(argument.shape):
            yield (*at, "shape", index), "size", size
        for index, step in enumerate(argument.stride or []):
            yield (*at, "stride", index), "size", step
        yield (*at, "offset"), "size", argument.offset
        yield (*at, "dtype"), "dtype", argument.dtype
    elif isinstance(argument, DType):
        yield (*at, "dtype"), "dtype", argument.dtype
    elif isinstance(argument, (TupleArgument, ListArgument)):
        key = "tuple" if isinstance(argument, TupleArgument) else "list"
        for index, member in enumerate(argument.items):
            yield from _argument((*at, key, index), member)
    elif isinstance(argument, Constexpr):
        yield from _argument((*at, "constexpr"), argument.constexpr)
    elif isinstance(argument, Descriptor):
        yield from _argument((*at, "descriptor"), argument.descriptor)
        for index, size in enumerate(argument.block):
            yield (*at, "block", index), "size", size
    elif isinstance(argument, (str, int, float)):
        yield at, "value", argument


def names_of(*things: Any) -> set[str]:
    """Return the names that items and conditions read; a dtype that is no element type is one of them.

    What is no expression reads none: it is reported elsewhere.
    """
    found: set[str] = set()
    for thing in things:
        if isinstance(thing, (str, tuple)):
            texts = [thing if isinstance(thing, str) else thing[0]]
        else:
            texts = [text for _, kind, text in slots(thing) if kind != "dtype" or text not in DTYPES]
            texts += thing.where or []
        for text in texts:
            try:
                found |= names(text)
            except ExpressionError:
                continue
    return found
