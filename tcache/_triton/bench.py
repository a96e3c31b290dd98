"""Timing launches on the active driver, as ``triton.testing.do_bench`` does: L2 cleared between them, CUDA events."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from triton.runtime.driver import driver as _driver
from triton.runtime.errors import OutOfResources

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache._triton.probe import Compilation

__all__ = ["Sampler", "is_faulted", "load_handles"]


class Sampler:
    """Times launches; keeps the buffer that clears the L2 cache for its life.

    Source: ``do_bench`` in ``triton/testing.py``.
    """

    def __init__(self) -> None:
        self._driver = _driver.active
        self._events = self._driver.get_device_interface()
        self._cache = self._driver.get_empty_cache_for_benchmark()

    def __call__(self, call: Callable[[], Any], reps: int) -> list[float]:
        """Launch ``reps`` times and return milliseconds for each."""
        starts = [self._events.Event(enable_timing=True) for _ in range(reps)]
        ends = [self._events.Event(enable_timing=True) for _ in range(reps)]
        for start, end in zip(starts, ends, strict=True):
            self._driver.clear_cache(self._cache)
            start.record()
            call()
            end.record()
        self._events.synchronize()
        return [float(start.elapsed_time(end)) for start, end in zip(starts, ends, strict=True)]


def load_handles(compilation: Compilation) -> None:
    """Load a compiled kernel onto the GPU and build its launcher; what does not fit says so when it is launched."""
    with contextlib.suppress(OutOfResources):
        compilation.run()._init_handles()


def is_faulted() -> bool:
    """Return whether the GPU's context is beyond use, as after an illegal memory access."""
    try:
        _driver.active.get_device_interface().synchronize()
    except Exception:
        return True
    return False
