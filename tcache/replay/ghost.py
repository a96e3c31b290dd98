"""Ghost tensors: they claim to live on a GPU, need neither one nor memory, and keep shape, stride and dtype.

A ghost is a ``torch.Tensor`` subclass over a meta tensor. Functions unwrap it to plain meta tensors first, so every
torch operation that has a meta kernel works; results are ghosts again. A mode turns ``device="cuda"`` into meta for
factory functions. A meta view's ``data_ptr()`` is its storage offset in bytes, so alignment comes out right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Ghost", "GhostMode", "ghost"]

_DEVICE = torch.device("cuda", 0)


class Ghost(torch.Tensor):  # type: ignore[misc]  # untyped here
    """A tensor that answers for the GPU."""

    @property
    def device(self) -> torch.device:
        return _DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs)


class GhostMode(TorchFunctionMode):  # type: ignore[misc]
    """Inside this mode tensors made on the GPU are ghosts."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    named = dict(kwargs or {})
    if func is torch.Tensor.cuda:
        return args[0]
    if func is torch.Tensor.get_device:
        return 0
    if func is torch.Tensor.to and any(isinstance(value, str) for value in args[1:2]):
        args = (args[0], _meta(args[1]), *args[2:])
    if named.get("device") is not None:
        named["device"] = _meta(named["device"])
    with torch._C.DisableTorchFunctionSubclass():
        return _wrap(func(*map(_unwrap, args), **{name: _unwrap(value) for name, value in named.items()}))


def _meta(device: Any) -> Any:
    return "meta" if isinstance(device, int) or torch.device(device).type == "cuda" else device


def _unwrap(value: Any) -> Any:
    if isinstance(value, Ghost):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, torch.device):
        return torch.device(_meta(value))
    if type(value) in (tuple, list):
        return type(value)(map(_unwrap, value))
    return value


def _wrap(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        meta = type(value) is not Ghost and value.device.type == "meta"
        return value.as_subclass(Ghost) if meta else value
    if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
        return type(value)(list(map(_wrap, value)))
    if type(value) in (tuple, list):
        return type(value)(map(_wrap, value))
    return value


def ghost(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int) -> Ghost:
    """Make a ghost.

    Args:
        shape: sizes in elements.
        dtype: torch's name of the element type.
        stride: strides in elements.
        offset: storage offset in elements.
    """
    last = (
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else offset
    )
    storage = torch.empty(last + 1, dtype=getattr(torch, dtype), device="meta")
    made: Ghost = storage.as_strided(shape, stride, offset).as_subclass(Ghost)
    return made
