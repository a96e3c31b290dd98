"""Load packed kernels onto the GPU when a service starts, so that no launch waits for it.

The kernel ends up where the launch that follows looks for it. Below an autotuner of tcache's that is
:class:`tcache.prebaked.Prebaked`; for all others it is the ``JITFunction``'s own memory, under the key that Triton's
binder makes of stand-ins for the arguments.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcache._triton.driver import current_target
from tcache._triton.kernels import is_kernel, jit_of
from tcache._triton.load import load_bound
from tcache.active import active
from tcache.autotuner import Autotuner
from tcache.counters import count
from tcache.errors import BundleError, GPUMissing, KernelError, TcacheError
from tcache.overlay import install, only_packed
from tcache.prebaked import prebaked
from tcache.standin import stand_ins

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tcache.bundle import Bundle

__all__ = ["Failed", "Loaded", "Preloaded", "preload"]


@dataclass(frozen=True)
class Loaded:
    """An entry that is on the GPU now: its kernel as ``module:qualname``, its name, and how long it took."""

    kernel: str
    entry: str
    ms: float


@dataclass(frozen=True)
class Failed:
    """An entry that could not be loaded, and why."""

    kernel: str
    entry: str
    reason: str


@dataclass(frozen=True)
class Preloaded:
    """What :func:`preload` did.

    Attributes:
        target: the compile target of the current device, such as ``cuda:90:32``.
        loaded: entries on the GPU.
        failed: entries that could not be loaded.
        seconds: how long all of it took.
    """

    target: str
    loaded: tuple[Loaded, ...]
    failed: tuple[Failed, ...]
    seconds: float


def preload(kernels: str | Sequence[str] | None = None) -> Preloaded:
    """Load packed entries for the current device onto it.

    Args:
        kernels: shell patterns of kernels, ``my_package.*`` or ``*:matmul_kernel``, matched against
            ``module:qualname``; None loads every entry of the device's compile target. The kernels' modules are
            imported if they are not yet.

    Returns:
        What was loaded and how long it took, and what was not and why: a kernel whose module is absent, an entry that
        is damaged or whose source was edited, an argument of a kind that nothing stands for, as a function that was
        made inside another. Nothing is compiled.

    Raises:
        GPUMissing: there is no GPU.
    """
    begin = time.perf_counter()
    try:
        backend, arch, warp_size = current_target()
    except RuntimeError as error:
        raise GPUMissing(f"nothing can be preloaded: {next(iter(str(error).splitlines()), '')}") from error
    target = f"{backend}:{arch}:{warp_size}"
    patterns = [kernels] if isinstance(kernels, str) else kernels
    install()
    loaded: list[Loaded] = []
    failed: list[Failed] = []
    for bundle, kernel, entry, facts in _wanted(target, patterns, failed):
        started = time.perf_counter()
        try:
            _load(bundle, kernel, entry, facts)
        except TcacheError as error:
            failed.append(Failed(kernel, entry, error.message))
        except Exception as error:  # what a module does when imported, or the driver when it loads
            text = next(iter(str(error).splitlines()), "")
            failed.append(Failed(kernel, entry, f"{type(error).__name__}: {text}"))
        else:
            loaded.append(Loaded(kernel, entry, (time.perf_counter() - started) * 1e3))
    count("preloaded", len(loaded))
    return Preloaded(target, tuple(loaded), tuple(failed), time.perf_counter() - begin)


def _wanted(
    target: str, patterns: Sequence[str] | None, failed: list[Failed]
) -> Iterator[tuple[Bundle, str, str, dict[str, Any]]]:
    seen: set[str] = set()
    for bundle in active().bundles:
        try:
            index = bundle.index()
        except BundleError as error:
            failed.append(Failed("*", "*", error.message))
            continue
        for entry, kernel in sorted(index.kernels(), key=lambda row: (row[1], row[0])):
            if entry in seen or (
                patterns is not None and not any(fnmatch.fnmatchcase(kernel, pattern) for pattern in patterns)
            ):
                continue
            facts = index.fact(entry)
            if facts["target"] == target and not facts.get("captured"):  # who generated it also loads it
                seen.add(entry)
                yield bundle, kernel, entry, facts


def _load(bundle: Bundle, kernel: str, entry: str, facts: dict[str, Any]) -> None:
    function, served = _function(kernel)
    packed = prebaked() if served else None
    if packed is not None and packed.preload(function, facts, bundle, entry):
        return
    args, kwargs = stand_ins(function, facts)
    with only_packed():
        load_bound(function, args, kwargs)


def _function(kernel: str) -> tuple[Any, bool]:
    """Return a kernel's jit function, and whether an autotuner of tcache's launches it."""
    module_name, _, qualname = kernel.rpartition(":")
    module = sys.modules.get(module_name) or importlib.import_module(module_name)
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    # decorators may hide a kernel behind another name: a module then keeps it under that
    for value in (found, *vars(module).values()):
        if is_kernel(value):
            function = jit_of(value)
            if getattr(getattr(function, "fn", None), "__qualname__", None) == qualname:
                return function, _is_served(value)
    raise KernelError(f"{module_name} has no kernel {qualname!r}", "preload where the kernels are importable")


def _is_served(value: Any) -> bool:
    while value is not None and not isinstance(value, Autotuner):
        value = getattr(value, "fn", None) if is_kernel(value) else None
    return value is not None
