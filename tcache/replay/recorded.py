"""From a recorded launch to one that can be resolved: ghosts with the recorded types, alignment and values."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import is_kernel
from tcache._triton.mock import MockTensor
from tcache._triton.values import Indescribable, restore
from tcache.errors import KernelError, ManifestError
from tcache.replay.ref import KernelRef, load

if TYPE_CHECKING:
    from pathlib import Path

    from tcache.manifest.launches import RecordedLaunch

__all__ = ["recorded_launch"]


def recorded_launch(row: RecordedLaunch, folder: Path, where: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return kernel object, arguments and keyword arguments of a recorded launch.

    Args:
        row: the launch.
        folder: the recording's directory.
        where: ``file:line:column`` of the row.

    Raises:
        ManifestError: the kernel or something an argument names is not there any more, or the text is no description.
    """

    def named(ref: str) -> Any:
        return load(KernelRef.parse(ref), folder)

    try:
        kernel = named(row.kernel)
        args = tuple(restore(value, _tensor, named) for value in row.args)
        kwargs = {name: restore(value, _tensor, named) for name, value in row.kwargs.items()}
    except KernelError as error:
        raise ManifestError(where, error.message, error.hint or "record again: the program has changed") from error
    except Indescribable as error:
        raise ManifestError(where, str(error), "record again with this release of tcache") from error
    if not is_kernel(kernel):
        raise ManifestError(where, f"{row.kernel} is a {type(kernel).__name__}, not a Triton kernel", "record again")
    return kernel, args, kwargs


def _tensor(data: dict[str, Any]) -> Any:
    """Make a ghost; without torch, or at an address that no ghost can have, a mock."""
    dtype, shape, stride = str(data["tensor"]), tuple(data["shape"]), tuple(data["stride"])
    address, storage = int(data.get("address", 0)), int(data.get("storage", 0))
    if not all(type(size) is int and size >= 0 for size in (*shape, *stride)) or len(stride) != len(shape):
        raise Indescribable(f"{data!r:.80} describes no tensor")
    kind = getattr(sys.modules.get("torch"), dtype, None)
    if kind is None or address % kind.itemsize:
        return MockTensor(dtype, shape, stride, address, storage)
    from tcache.replay.ghost import ghost

    offset = address // kind.itemsize
    if not storage:
        return ghost(shape, dtype, stride, offset)
    return ghost((storage // kind.itemsize,), dtype, (1,), 0).as_strided(shape, stride, offset)
