"""Putting a kernel where its first launch would: into ``JITFunction``'s memory and onto the current device."""

from __future__ import annotations

from typing import Any

__all__ = ["forget_kernels", "load_bound"]


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


def forget_kernels(function: Any) -> None:
    """Have the next launch of a jit function ask the cache, as the first of a process does.

    In memory Triton takes launches for one that are entries of their own: with ``True``, ``1`` or ``1.0`` as a
    constexpr, or with an argument called ``num_warps`` by position or by name. ``compute_cache_key`` in
    ``triton/runtime/jit.py`` compares values, and an entry's name has their text.
    """
    for kernels, *_ in getattr(function, "device_caches", {}).values():
        kernels.clear()
