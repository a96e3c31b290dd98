"""Arguments of a launch as JSON and back: what Triton's binder, heuristics and hooks may look at, and no memory.

JSON's own values stand for themselves. Everything else is an object with one telling key:

``{"float": "nan"}``, ``{"tuple": […]}``, ``{"named": ref, "items": […]}``, ``{"dtype": "torch.bfloat16"}``,
``{"dtype": "tl.fp32"}``, ``{"constexpr": …}``, ``{"enum": ref, "name": …}``, ``{"function": ref}``,
``{"dataclass": ref, "fields": {…}}`` (tensor descriptors are dataclasses in every release), and
``{"tensor": "float32", "shape": […], "stride": […], "address": bytes modulo 16, "storage": bytes}``; the last two are
left out where they are 0 and where they do not matter (up to 2 GiB, which is where AMD's backend forks).
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
from typing import TYPE_CHECKING, Any

from triton import language as tl
from triton.runtime.jit import JITCallable, TensorWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Indescribable", "describe", "restore"]

_TWO_GIB = 2**31 - 1


class Indescribable(ValueError):
    """A value that JSON cannot stand for, or text that does not describe a value."""


def describe(value: Any, ref: Callable[[Any], str]) -> Any:
    """Return an argument as JSON.

    Args:
        value: the argument.
        ref: turns a function (jit or not) or a class into a ref.

    Raises:
        Indescribable: there is no description for such a value.
    """
    if value is None or isinstance(value, (bool, int, float, str, enum.Enum)):
        return _scalar(value, ref)
    if isinstance(value, tl.constexpr):
        return {"constexpr": describe(value.value, ref)}
    if isinstance(value, tl.dtype):
        return {"dtype": _tl_name(value)}
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return {"dtype": str(value)}
    if isinstance(value, (list, tuple)):
        items = [describe(item, ref) for item in value]
        if isinstance(value, list):
            return items
        return {"named": ref(type(value)), "items": items} if hasattr(value, "_fields") else {"tuple": items}
    if isinstance(value, JITCallable) or inspect.isfunction(value):
        return {"function": ref(value)}
    return _object(value, ref)


def _scalar(value: Any, ref: Callable[[Any], str]) -> Any:
    if isinstance(value, enum.Enum):
        return {"enum": ref(type(value)), "name": value.name}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else str(value)  # subclasses are what the binder takes them for


def _object(value: Any, ref: Callable[[Any], str]) -> dict[str, Any]:
    if isinstance(value, TensorWrapper):
        return {"reinterpret": describe(value.base, ref), "dtype": _tl_name(value.dtype)}
    if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
        return _tensor(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"dataclass": ref(type(value)), "fields": {name: describe(getattr(value, name), ref) for name in fields}}
    raise Indescribable(f"an argument of type {type(value).__module__}.{type(value).__qualname__} has no description")


def _tensor(value: Any) -> dict[str, Any]:
    dtype = str(value.dtype)
    if not dtype.startswith("torch."):
        raise Indescribable(f"a tensor of dtype {dtype} has no description")
    found: dict[str, Any] = {
        "tensor": dtype.removeprefix("torch."),
        "shape": [int(size) for size in getattr(value, "shape", ())],
        "stride": [int(step) for step in value.stride()] if hasattr(value, "stride") else [],
    }
    address = int(value.data_ptr()) % 16
    if address:
        found["address"] = address
    if hasattr(value, "untyped_storage"):
        size = int(value.untyped_storage().nbytes())
        if size > _TWO_GIB:
            found["storage"] = size
    return found


def _tl_name(value: Any) -> str:
    if type(value) is not tl.dtype:
        raise Indescribable(f"type {value} has no description")
    return f"tl.{value.name}"


def restore(data: Any, tensor: Callable[[dict[str, Any]], Any], load: Callable[[str], Any]) -> Any:
    """Return the value that :func:`describe` described.

    Args:
        data: the description.
        tensor: makes a tensor from ``{"tensor", "shape", "stride", "address", "storage"}``.
        load: imports what a ref names.

    Raises:
        Indescribable: it is no description, or names a class that does not fit.
    """
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [restore(item, tensor, load) for item in data]
    if not isinstance(data, dict):
        raise Indescribable(f"{data!r} describes no argument")
    kinds: list[tuple[str, Callable[[], Any]]] = [
        ("tensor", lambda: tensor(data)),
        ("tuple", lambda: tuple(restore(item, tensor, load) for item in data["tuple"])),
        ("constexpr", lambda: tl.constexpr(restore(data["constexpr"], tensor, load))),
        ("reinterpret", lambda: TensorWrapper(restore(data["reinterpret"], tensor, load), _dtype(data["dtype"]))),
        ("dtype", lambda: _dtype(data["dtype"])),
        ("float", lambda: float(data["float"])),
        ("enum", lambda: _class(data["enum"], load, lambda kind: issubclass(kind, enum.Enum))[data["name"]]),
        ("function", lambda: load(data["function"])),
        ("named", lambda: _class(data["named"], load, lambda kind: hasattr(kind, "_fields"))(
            *(restore(item, tensor, load) for item in data["items"]))),
        ("dataclass", lambda: _class(data["dataclass"], load, dataclasses.is_dataclass)(
            **{name: restore(item, tensor, load) for name, item in data["fields"].items()})),
    ]  # fmt: skip
    for name, make in kinds:
        if name in data:
            try:
                return make()
            except (KeyError, TypeError, AttributeError, AssertionError) as error:
                raise Indescribable(f"{data!r:.80} describes no argument: {error}") from error
    raise Indescribable(f"{data!r:.80} describes no argument")


def _dtype(text: str) -> Any:
    if text.startswith("torch."):
        import torch

        return getattr(torch, text.removeprefix("torch."))
    return tl.dtype(text.removeprefix("tl."))


def _class(ref: str, load: Callable[[str], Any], fits: Callable[[Any], bool]) -> Any:
    kind = load(ref)
    if not isinstance(kind, type) or not fits(kind):
        raise Indescribable(f"{ref} is not a class that describes an argument")
    return kind
