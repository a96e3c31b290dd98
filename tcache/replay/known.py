"""Operations on known values: what a program states about small tensors is carried along."""

from __future__ import annotations

import math
from typing import Any

import torch

from tcache.replay.place import FIRST, flat
from tcache.replay.values import LIMIT, keep, known

__all__ = ["LIKE", "as_ghosts", "keep_all", "sizes_known", "values_of"]


def values_of(func: Any, args: Any, kwargs: Any, inputs: list[Any], wanted: Any) -> Any:
    """Run an operation on the values of small tensors as well, where all of them are known; else return None."""
    if not inputs and (func not in _STATED or wanted is None or wanted.type != "cuda"):
        return None
    if func in LIKE:
        if not inputs[0].is_meta or inputs[0].numel() > LIMIT or wanted not in (None, FIRST):
            return None
        args = (torch.empty(inputs[0].shape, dtype=inputs[0].dtype), *args[1:])
    elif inputs and not any(hasattr(value, "_tcache_value") for value in inputs):
        return None
    name = getattr(func, "__name__", "")
    if "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or any(part in name for part in _RANDOM):
        return None
    if name in ("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__"):
        return None
    if func in _STATED and _count(func, args) > LIMIT:
        return None
    try:
        with torch.no_grad():
            return func(*_real(args), **{**_real(kwargs), **({"device": "cpu"} if "device" in kwargs else {})})
    except (_Unknown, RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


class _Unknown(Exception):
    pass


def as_ghosts(values: Any) -> Any:
    """Return the result of an operation that needs values, done on known ones, with its tensors on the GPU."""
    if isinstance(values, torch.Tensor):
        made = values.to("meta")
        keep(made, values)
        return made
    return type(values)(map(as_ghosts, values)) if isinstance(values, (tuple, list)) else values


def sizes_known(value: Any) -> Any:
    """Return arguments with numbers for what ghosts without dimensions hold, where that is known: sizes, mostly."""
    if isinstance(value, torch.Tensor):
        found = known(value) if value.is_meta and value.ndim == 0 and not value.is_floating_point() else None
        return value if found is None else found.item()
    if type(value) in (tuple, list, torch.Size):
        return tuple(map(sizes_known, value)) if type(value) is not list else list(map(sizes_known, value))
    return value


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        found = known(value) if value.is_meta else value
        if found is None or found.numel() > LIMIT:
            raise _Unknown
        return found
    if type(value) in (tuple, list):
        return type(value)(map(_real, value))
    if type(value) is dict:
        return {name: _real(item) for name, item in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _count(func: Any, args: Any) -> int:
    """Return about how many elements a factory would make."""
    if func is torch.full:
        args = args[:1]  # the sizes, and not what it is filled with
    numbers = [value for value in flat(args) if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if func is torch.arange:
        return int(max(map(abs, numbers), default=0))
    return len(numbers) if func in (torch.tensor, torch.as_tensor) else math.prod(int(abs(n)) for n in numbers)


def keep_all(result: Any, values: Any) -> None:
    """Keep the values of every ghost among an operation's results."""
    for made, value in zip(flat(result), flat(values), strict=False):
        both = isinstance(made, torch.Tensor) and isinstance(value, torch.Tensor)
        if both and made.is_meta and made.shape == value.shape:
            keep(made, value)


_STATED = {
    torch.tensor, torch.as_tensor, torch.asarray, torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace,
}  # fmt: skip
LIKE = {torch.zeros_like, torch.ones_like, torch.full_like}
_RANDOM = ("rand", "empty", "dropout", "bernoulli", "multinomial", "normal", "exponential", "resize")
