"""The machine a replay believes it runs on: Triton's driver, ``torch.cuda`` and ghost tensors for one GPU."""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from tcache._triton.driver import current_properties, current_target, stub
from tcache.keys.gpu import GPU
from tcache.replay.ref import forget_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["leave", "machine", "with_torch"]


class _Machine:
    def __init__(self, gpu: GPU, stack: contextlib.ExitStack) -> None:
        self.gpu = gpu
        self.stack = stack
        self.has_torch = False

    def need_torch(self) -> None:
        if not self.has_torch:
            self.has_torch = True  # before anything below imports torch, which would ask again
            with _uncollected():
                from tcache.replay.autocast import autocast_for_ghosts
                from tcache.replay.cuda import torch_cuda_for
                from tcache.replay.dynamo import as_written
                from tcache.replay.ghost import GhostMode, hooks_in_mode, inside_mode
                from tcache.replay.operators import operators_for_ghosts

            self.stack.enter_context(as_written())
            self.stack.enter_context(torch_cuda_for(self.gpu))
            if not any(outer.has_torch for outer in _machines if outer is not self):
                self.stack.enter_context(autocast_for_ghosts())
                self.stack.enter_context(operators_for_ghosts(inside_mode))
                self.stack.enter_context(hooks_in_mode())
                self.stack.enter_context(GhostMode())


class _WhenTorchIsImported(importlib.abc.MetaPathFinder):
    """Lets torch believe in the machine as soon as a module imports it: many ask for a GPU while they are imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        self.remove()
        found = importlib.util.find_spec(fullname)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then()

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Import inside the block what makes a million objects and next to no garbage: looking for it is a tenth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_machines: list[_Machine] = []
_FIXED = ("tcache", "torch", "triton")
_imported: set[str] = set()
_last: list[GPU] = []


@contextlib.contextmanager
def machine(gpu: GPU, *, launches: bool = False) -> Iterator[None]:
    """Believe, inside the block, that this machine has one ``gpu``; with ``launches`` one that launches nothing.

    Modules that replays imported are imported anew for another GPU: many keep what they learnt of the first one, in
    constants (``torch.cuda.get_device_capability()[0] >= 9``, ``torch.version.hip``) or behind ``functools.cache``.
    """
    if _last and _last[0] != gpu:
        forget_modules(_imported)
        _imported.clear()
    _last[:] = [gpu]
    before = set(sys.modules)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stub(gpu.backend, gpu.arch, gpu.warp_size, gpu.properties(), launches=launches))
        here = _Machine(gpu, stack)
        _machines.append(here)
        finder = _WhenTorchIsImported(here.need_torch)
        try:
            if "torch" in sys.modules:
                here.need_torch()
            else:
                sys.meta_path.insert(0, finder)
            yield
        finally:
            finder.remove()
            _machines.pop()
            new = set(sys.modules) - before
            _imported.update(name for name in new if name.partition(".")[0] not in _FIXED)


def leave() -> None:
    """In a process forked inside :func:`machine`: be on the machine that is really there, until the process ends."""
    for finder in [one for one in sys.meta_path if isinstance(one, _WhenTorchIsImported)]:
        finder.remove()
    while _machines:
        _machines.pop().stack.close()


@contextlib.contextmanager
def with_torch(*, needed: bool) -> Iterator[None]:
    """Let torch, if it is needed or imported already, believe in the machine of the enclosing block.

    Outside :func:`machine` the active driver's target is believed, inside this block only.
    """
    if not needed and "torch" not in sys.modules:
        yield
    elif _machines:
        _machines[-1].need_torch()
        yield
    else:
        with contextlib.ExitStack() as stack:
            _Machine(_of_the_driver(), stack).need_torch()
            yield


def _of_the_driver() -> GPU:
    backend, arch, warp_size = current_target()
    facts = current_properties()
    count, shared = facts.get("multiprocessor_count", 0), facts.get("max_shared_mem", 0)
    return GPU(f"a GPU of target {backend}:{arch}", backend, arch, warp_size, count, shared)
