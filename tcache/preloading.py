"""Load packed kernels onto the GPU when a service starts, so that no launch waits for it.

The kernel ends up where the launch that follows looks for it. Below an autotuner of tcache's that is
:class:`tcache.prebaked.Prebaked`; for all others it is the ``JITFunction``'s own memory, under the key that Triton's
binder makes of stand-ins for the arguments.
"""

from __future__ import annotations

import fnmatch
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tcache._triton.driver import current_target
from tcache._triton.kernels import KernelInterface, is_kernel, jit_of
from tcache._triton.load import load_bound
from tcache.active import active
from tcache.autotuner import Autotuner
from tcache.counters import count
from tcache.errors import BundleError, GPUMissing, KernelError, TcacheError
from tcache.naming import module_named, values_in
from tcache.overlay import install, only_packed
from tcache.prebaked import prebaked
from tcache.standin import stand_ins

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    wanted = list(_wanted(target, patterns, failed))
    places = _Places(kernel for _, kernel, *_ in wanted)
    for bundle, kernel, entry, facts in wanted:
        started = time.perf_counter()
        try:
            for place in places.of(kernel):
                place.load(bundle, facts, entry)
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


class _Place(NamedTuple):
    """Where launches of a kernel look for it.

    Attributes:
        function: the jit function.
        by_index, by_name: among what the index answers, and in Triton's own memory.
    """

    function: Any
    by_index: bool
    by_name: bool

    def load(self, bundle: Bundle, facts: dict[str, Any], entry: str) -> None:
        packed = prebaked() if self.by_index else None
        if packed is not None and packed.preload(self.function, facts, bundle, entry) and not self.by_name:
            return
        args, kwargs = stand_ins(self.function, facts)
        with only_packed():
            load_bound(self.function, args, kwargs)


class _Places:
    """Imports kernels, and finds what launches them: an autotuner may be in another module than its kernel.

    Args:
        kernels: ``module:qualname`` of each.
    """

    def __init__(self, kernels: Iterable[str]) -> None:
        self._found: dict[str, list[_Place] | Exception] = {}
        exposed: dict[str, list[Any]] = {}
        for kernel in dict.fromkeys(kernels):
            try:
                exposed[kernel] = _exposed(kernel)
            except Exception as error:  # what a module does when imported
                self._found[kernel] = error
        tuners = _tuners()
        for kernel, values in exposed.items():
            functions = {id(function): function for function in map(jit_of, values)}
            bare = {id(jit_of(value)) for value in values if _tuner(value) is None}
            self._found[kernel] = [
                _Place(function, any(index for index, _ in ways), key in bare or any(name for _, name in ways))
                for key, function in functions.items()
                for ways in [[tuner.ways() for tuner in tuners.get(key, ())]]
            ]

    def of(self, kernel: str) -> list[_Place]:
        """Return the places of a kernel; raise why there is none."""
        found = self._found[kernel]
        if isinstance(found, Exception):
            raise found
        return found


def _exposed(kernel: str) -> list[Any]:
    """Return what a kernel's module has of it: the jit function, or what decorates it, under whatever names."""
    module_name, _, qualname = kernel.rpartition(":")
    module = module_named(module_name)
    named: Any = module
    for name in qualname.split("."):
        named = getattr(named, name, None)
    values = {id(value): value for value in (named, *vars(module).values()) if is_kernel(value)}
    functions = [(value, jit_of(value)) for value in values.values()]
    found = [value for value, function in functions if _qualname(function) == qualname]
    if not found:
        raise KernelError(f"{module_name} has no kernel {qualname!r}", "preload where the kernels are importable")
    return found


def _qualname(function: Any) -> str | None:
    return getattr(getattr(function, "fn", None), "__qualname__", None)


def _tuners() -> dict[int, list[Autotuner]]:
    """Return the autotuners of tcache's in the modules that are loaded, by the identity of their jit functions."""
    found: dict[int, dict[int, Autotuner]] = {}
    for module in list(sys.modules.values()):
        for value in values_in(module):
            # by type, since lazy objects in modules load when they are asked
            tuner = _tuner(value) if issubclass(type(value), KernelInterface) else None
            if tuner is not None:
                found.setdefault(id(jit_of(tuner)), {})[id(tuner)] = tuner
    return {key: list(tuners.values()) for key, tuners in found.items()}


def _tuner(value: Any) -> Autotuner | None:
    while value is not None and not isinstance(value, Autotuner):
        value = getattr(value, "fn", None) if is_kernel(value) else None
    return value
