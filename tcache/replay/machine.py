"""The machine a replay believes it runs on: Triton's driver, ``torch.cuda`` and ghost tensors for one GPU."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

from tcache._triton.driver import current_properties, current_target, stub
from tcache.keys.gpu import GPU
from tcache.replay.ref import forget_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["leave", "machine", "with_torch"]


class _Machine:
    def __init__(self, gpu: GPU, stack: contextlib.ExitStack) -> None:
        self.gpu = gpu
        self.stack = stack
        self.has_torch = False

    def need_torch(self) -> None:
        if not self.has_torch:
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
            self.has_torch = True


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
        try:
            if "torch" in sys.modules:
                here.need_torch()
            yield
        finally:
            _machines.pop()
            new = set(sys.modules) - before
            _imported.update(name for name in new if name.partition(".")[0] not in _FIXED)


def leave() -> None:
    """In a process forked inside :func:`machine`: be on the machine that is really there, until the process ends."""
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
