"""Where a tensor says it is: on the first GPU, unless its storage carries a mark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CPU", "FIRST", "below", "default_device", "flat", "mark", "place_of", "resolve", "unwrapped"]

CPU = torch.device("cpu")
FIRST = torch.device("cuda", 0)


def flat(value: Any) -> Iterator[Any]:
    """Yield what nested tuples, lists and dictionaries hold."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat(item)
    else:
        yield value


def default_device() -> torch.device:
    """Return where a factory makes its tensor: ``with torch.device("cuda")`` and ``set_default_device`` count."""
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return CPU


def resolve(device: Any) -> torch.device:
    """Return the device that the user means, with an index for a GPU."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    return found


def below(device: torch.device) -> torch.device:
    """Return where torch really makes what shall be on ``device``."""
    return torch.device("meta") if device.type == "cuda" else device


def place_of(tensor: Any) -> torch.device:
    """Return the device that a tensor claims."""
    if not tensor.is_meta:
        return tensor.device
    if tensor.layout != torch.strided:
        return FIRST
    return getattr(unwrapped(tensor).untyped_storage(), "_tcache_device", FIRST)


def unwrapped(tensor: Any) -> Any:
    """Return the tensor below those of ``torch.func`` (vmap, grad), which have no storage."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def mark(result: Any, device: torch.device) -> None:
    """Mark where tensors are: on their storage, which views, parameters and detached tensors share."""
    for value in flat(result):
        if isinstance(value, torch.Tensor) and value.is_meta and value.layout == torch.strided:
            storage = unwrapped(value).untyped_storage()
            if device != FIRST:
                storage._tcache_device = device
            elif hasattr(storage, "_tcache_device"):
                del storage._tcache_device
