"""Arguments of a launch as JSON and back: what Triton's binder, heuristics and hooks may look at, and no memory.

JSON's own values stand for themselves. Everything else is an object with one telling key:

``{"float": "nan"}``, ``{"tuple": […]}``, ``{"named": ref, "items": […]}``, ``{"sequence": ref, "items": […]}`` (other
tuples and lists: ``torch.Size``), ``{"numpy": "int64", "value": …}``, ``{"dtype": "torch.bfloat16"}``,
``{"dtype": "tl.fp32"}``, ``{"constexpr": …}``, ``{"enum": ref, "name": …}`` (``"value"`` for flags that are set
together), ``{"function": ref}``,
``{"dataclass": ref, "fields": {…}}`` (tensor descriptors are dataclasses in every release), and
``{"tensor": "float32", "shape": […], "stride": […], "address": bytes modulo 16, "storage": bytes}``; the last two are
left out where they are 0 and where they do not matter (up to 2 GiB, which is where AMD's backend forks).
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import reprlib
from typing import TYPE_CHECKING, Any

from triton import language as tl
from triton.runtime.jit import JITCallable, TensorWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Indescribable", "describe", "holds_tensor", "restore"]

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
    if type(value).__module__ == "numpy" and hasattr(value, "item"):  # numpy's float64 is a float, too
        return _numpy(value)
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
        if type(value) in (list, tuple):
            return items if type(value) is list else {"tuple": items}
        return {"named" if hasattr(value, "_fields") else "sequence": ref(type(value)), "items": items}
    if isinstance(value, JITCallable) or inspect.isfunction(value):
        return {"function": ref(value)}
    return _object(value, ref)


def _scalar(value: Any, ref: Callable[[Any], str]) -> Any:
    if isinstance(value, enum.Enum):
        if value.name in type(value).__members__:
            return {"enum": ref(type(value)), "name": value.name}
        return {"enum": ref(type(value)), "value": describe(value.value, ref)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else str(value)  # subclasses are what the binder takes them for


def _numpy(value: Any) -> dict[str, Any]:
    """Describe one of numpy's numbers: as a constexpr its text is part of the kernel, and that is numpy's own."""
    if getattr(value, "shape", None) != () or type(value).__name__ not in _NUMBERS:
        raise Indescribable(f"an argument of type numpy.{type(value).__qualname__} has no description")
    item = value.item()
    return {"numpy": type(value).__name__, "value": repr(item) if isinstance(item, float) else item}


_NUMBERS = (
    "bool",
    "bool_",
    "float16",
    "float32",
    "float64",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
)


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


def holds_tensor(data: Any) -> bool:
    """Return whether a description is of a tensor, or of something with a tensor in it."""
    if isinstance(data, list):
        return any(map(holds_tensor, data))
    return isinstance(data, dict) and ("tensor" in data or any(map(holds_tensor, data.values())))


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
        ("numpy", lambda: _number(data["numpy"], data["value"])),
        ("enum", lambda: _member(_class(data["enum"], load, lambda kind: issubclass(kind, enum.Enum)), data)),
        ("function", lambda: load(data["function"])),
        ("named", lambda: _class(data["named"], load, lambda kind: issubclass(kind, tuple))(
            *(restore(item, tensor, load) for item in data["items"]))),
        ("sequence", lambda: _class(data["sequence"], load, lambda kind: issubclass(kind, (tuple, list)))(
            [restore(item, tensor, load) for item in data["items"]])),
        ("dataclass", lambda: _class(data["dataclass"], load, dataclasses.is_dataclass)(
            **{name: restore(item, tensor, load) for name, item in data["fields"].items()})),
    ]  # fmt: skip
    for name, make in kinds:
        if name in data:
            try:
                return make()
            except Indescribable:
                raise
            except _UNFIT as error:
                reason = next(iter(str(error).splitlines()), "")  # torch adds frames of C++
                raise Indescribable(f"{reprlib.repr(data)} describes no argument: {reason:.200}") from error
    raise Indescribable(f"{reprlib.repr(data)} describes no argument")


_UNFIT = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ImportError,
    ArithmeticError,
    RuntimeError,
)
"""What text that nobody recorded raises where it is made a value: numbers too large, nesting too deep among it."""


def _member(kind: Any, data: dict[str, Any]) -> Any:
    return kind[data["name"]] if "name" in data else kind(data["value"])


def _number(kind: str, value: Any) -> Any:
    import numpy as np

    if kind not in _NUMBERS:
        raise KeyError(kind)
    return getattr(np, kind)(value)


def _dtype(text: str) -> Any:
    if text.startswith("torch."):
        import torch

        found = getattr(torch, text.removeprefix("torch."))
        if not isinstance(found, torch.dtype):
            raise TypeError(f"{text} is no dtype")
        return found
    return tl.dtype(text.removeprefix("tl."))


def _class(ref: str, load: Callable[[str], Any], fits: Callable[[Any], bool]) -> Any:
    kind = load(ref)
    if not isinstance(kind, type) or not fits(kind):
        raise Indescribable(f"{ref} is not a class that describes an argument")
    return kind
