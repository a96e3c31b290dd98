"""Putting a kernel where its first launch would: into ``JITFunction``'s memory and onto the current device."""

from __future__ import annotations

from typing import Any

__all__ = ["load_bound"]


def load_bound(function: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Bind a launch without making it, take its kernel from the cache, and load it onto the current device.

    Args:
        function: the ``JITFunction``.
        arguments: argument -> value; mock tensors do.
        options: compile options as the launch states them.

    Raises:
        OutOfResources: the kernel does not fit this device.
    """
    kernel = function.run(grid=(1, 1, 1), warmup=True, **arguments, **options)
    if hasattr(kernel, "result"):  # under AsyncCompileMode
        kernel = kernel.result()
    kernel._init_handles()
