"""What a launch returns in a replay, which compiles nothing: a handle to be launched again, and nothing to be read."""

from __future__ import annotations

from typing import Any

from tcache.replay.values import ValueUnknown

__all__ = ["Compiled", "CompiledUnknown"]


class CompiledUnknown(ValueUnknown, AttributeError):
    """Code asked a compiled kernel for what only compiling or loading tells: registers, shared memory, assembly."""

    def __init__(self, name: str) -> None:
        super().__init__(f"compiled_kernel.{name}", "is known once a kernel is compiled, and a replay compiles nothing")


class Compiled:
    """Stands for Triton's ``CompiledKernel``, as ``kernel[grid](…)`` and ``kernel.warmup(…)`` return it."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_args, **_kwargs: None

    def _init_handles(self) -> None:
        """Nothing is loaded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CompiledUnknown(name)
