"""Putting a kernel where its first launch would: into ``JITFunction``'s memory and onto the current device."""

from __future__ import annotations

from typing import Any

__all__ = ["load_bound"]


def load_bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bind a launch without making it, take its kernel from the cache, and load it onto the current device.

    Args:
        function: the ``JITFunction``.
        args, kwargs: its arguments, mock tensors for tensors; compile options as the launch states them, in order.

    Raises:
        OutOfResources: the kernel does not fit this device.
    """
    kernel = function.run(*args, grid=(1, 1, 1), warmup=True, **kwargs)
    if hasattr(kernel, "result"):  # under AsyncCompileMode
        kernel = kernel.result()
    kernel._init_handles()
