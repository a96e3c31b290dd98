"""What happens when a process starts with ``TCACHE_RECORD`` set, and who is told of misses. Standard library only.

Recording has to be armed before the first launch, in processes that may never import tcache by themselves: under
``tcache record`` a ``sitecustomize`` calls :func:`arm`; elsewhere ``import tcache`` does. Nothing of Triton is imported
for it: the recorder starts when the program itself has imported Triton, and never in a process that does not.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["arm", "missed", "on_miss"]

on_miss: Callable[[str], None] | None = None
"""Told the first line of every CacheMiss, from within the launch that missed."""


def missed(reason: str) -> None:
    """Report a miss to whoever records; called before the CacheMiss is raised."""
    if on_miss is not None:
        on_miss(reason)


def arm() -> None:
    """Start recording into ``TCACHE_RECORD``, where set: now if Triton is imported, else right after it is."""
    if not os.environ.get("TCACHE_RECORD") or any(isinstance(finder, _AfterTriton) for finder in sys.meta_path):
        return
    triton = sys.modules.get("triton")
    if triton is None:
        sys.meta_path.insert(0, _AfterTriton())
    elif not getattr(getattr(triton, "__spec__", None), "_initializing", False):
        _start()


def _start() -> None:
    try:
        from tcache.recording import start_from_environment

        start_from_environment()
    except Exception as error:  # a recorder that cannot start must not end the service
        print(f"tcache: launches are not recorded: {error}", file=sys.stderr)  # noqa: T201 - no logging is set up yet


class _AfterTriton(importlib.abc.MetaPathFinder):
    """Finds ``triton`` as everybody else would, and starts the recorder once the package is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "triton":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("triton")
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _start()

        loader.exec_module = exec_module
        return spec
