"""The cold path: from a launch to its packed kernel without Triton's key, Gluon or ``ptxas``.

A bundle's index says for every launch what it was specialized to. A launch of the same kernel source, specialized here
by the same rules, is the same launch; so its entry is known without computing the name Triton would give it. Only
rows for which packing found both computations equal are used. Whatever does not fit goes Triton's way, through the
overlay, which finds the entry by name or says why it is missing.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from typing import TYPE_CHECKING, Any

from tcache._triton.distribution import distribution
from tcache._triton.driver import current_device, current_target
from tcache._triton.probe import key_environment
from tcache._triton.specialize import Specialized, compiled, launch, specialize, unusual
from tcache.active import Active, active
from tcache.counters import count
from tcache.environment import Rejected
from tcache.errors import BundleError
from tcache.keys.source import constants_read, source_identity

if TYPE_CHECKING:
    from tcache._triton.distribution import Distribution
    from tcache.bundle import Bundle

__all__ = ["Prebaked", "digest_of", "not_usable", "prebaked"]


def digest_of(facts: dict[str, Any], target: str) -> str:
    """Return the text a launch is looked up by: its target and specialization as canonical JSON."""
    named = {name: facts[name] for name in ("signature", "constants", "attributes", "options")}
    return json.dumps([target, named], sort_keys=True, separators=(",", ":"))


class Prebaked:
    """The packed kernels of the active bundles.

    Args:
        settings: the settings in force.
    """

    def __init__(self, settings: Active) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], dict[str, tuple[Bundle, str]]] = {}
        self._indexes: list[tuple[Bundle, dict[str, list[str]]]] | None = None
        self._kernels: dict[tuple[int, str, int, str], Any] = {}
        self._globals: dict[int, tuple[Any, list[tuple[dict[str, Any], str, Any]]]] = {}
        self._variables: dict[str, str] | None = None

    def launch(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any
    ) -> tuple[Any, dict[str, Any], list[tuple[dict[str, Any], str, Any]]] | None:
        """Launch a packed kernel.

        Args:
            function: the jit function.
            args, kwargs: what it would be run with, meta-parameters and options included.
            grid: the launch grid.

        Returns:
            The ``CompiledKernel``, its arguments by name, and the globals it depends on; None where Triton's own way
            must be taken.

        Raises:
            RuntimeError: a global that the kernel reads has changed since its first launch, as upstream raises it.
        """
        if self._indexes == [] or function.pre_run_hooks or unusual() is not None:
            return None
        made = specialize(function, args, kwargs)
        if made is None:
            return None
        kernel = self._kernel(function, made)
        if kernel is None:
            return None
        known = self._globals.get(id(function))  # gone where another thread has just emptied a full memory
        depends = constants_read(function) if known is None else known[1]
        for space, name, value in depends:
            now = space.get(name, _MISSING)
            if now is not value and now != value:
                raise RuntimeError(
                    f"Global variable {name} has changed since we compiled this kernel, from {value} to {now}"
                )
        launch(kernel, made, grid)
        return kernel, made.bound, depends

    def _kernel(self, function: Any, made: Specialized) -> Any:
        target = ":".join(map(str, current_target()))
        wanted = digest_of(made.facts(), target)
        place = (id(function), str(function.src), current_device(), wanted)
        known = self._kernels.get(place)
        if known is not None:
            return known
        found = self._find(function, source_identity(function), wanted)
        return None if found is None else self._loaded(place, function, made, *found)

    def _loaded(
        self, place: tuple[int, str, int, str], function: Any, made: Specialized, bundle: Bundle, entry: str
    ) -> Any:
        files = bundle.entry_files(entry)
        if files is None or isinstance(files, Rejected):
            return None  # the overlay says what is wrong with it
        key = base64.b32decode(entry + "=" * (-len(entry) % 8)).hex()
        try:
            kernel = compiled(function, made, {name: str(path) for name, path in files.items()}, key)
        except Exception:
            if bundle.entry_files(entry) is files:
                raise
            return None  # gone, or another, since it was looked at
        if bundle.entry_files(entry) is not files:
            return None
        with self._lock:
            if len(self._kernels) >= _LARGEST:
                self._kernels.clear()
                self._globals.clear()
            kept = self._kernels.setdefault(place, kernel)  # two threads may have met the same launch first
            self._globals.setdefault(id(function), (function, constants_read(function)))
        if kept is not kernel:
            return kept
        count("entries")
        count("prebaked")
        return kernel

    def preload(self, function: Any, facts: dict[str, Any], bundle: Bundle, entry: str) -> bool:
        """Load an entry onto the current device, for a first launch that finds it there.

        Args:
            function: the jit function below an autotuner of tcache's.
            facts: the entry's facts in the index.
            bundle: the bundle it is in.
            entry: its name.

        Returns:
            False where Triton's own way must be taken.
        """
        usable = any(one is bundle for one, _ in self._usable()) and unusual() is None
        if not usable or facts.get("direct") is not True or facts["source"] != source_identity(function):
            return False
        divisible = tuple(name for name, found in facts["attributes"].items() if "tt.divisibility=16" in found)
        made = Specialized({}, facts["signature"], facts["constants"], divisible, facts["options"])
        place = (id(function), str(function.src), current_device(), digest_of(facts, facts["target"]))
        kernel = self._kernels.get(place) or self._loaded(place, function, made, bundle, entry)
        if kernel is None:
            return False
        kernel._init_handles()
        return True

    def _find(self, function: Any, source: str, wanted: str) -> tuple[Bundle, str] | None:
        name = function.fn.__qualname__
        rows = self._rows.get((name, source))
        if rows is None:
            rows = {}
            for bundle, by_name in self._usable():
                for entry in by_name.get(name, ()):
                    row = bundle.index().fact(entry)
                    if row["source"] == source and row.get("direct") is True:
                        rows.setdefault(digest_of(row, row["target"]), (bundle, entry))
            self._rows[name, source] = rows
        if self._variables != key_environment() or distribution().problem is not None:  # set since the first launch
            return None
        return rows.get(wanted)

    def _usable(self) -> list[tuple[Bundle, dict[str, list[str]]]]:
        """Return the bundles made with this very Triton, their direct rows by kernel name."""
        with self._lock:
            if self._indexes is None:
                here = distribution()
                self._variables = key_environment()
                found = []  # other threads look at the whole without the lock
                for bundle in self._settings.bundles:
                    problem = not_usable(bundle, here)
                    if problem is None:
                        found.append((bundle, _by_name(bundle)))
                    elif bundle.environment.distribution:
                        self._settings.notice(f"tcache: {bundle.root}: first launches take Triton's way: {problem}")
                self._indexes = found
        return self._indexes


def not_usable(bundle: Bundle, here: Distribution) -> str | None:
    """Return why no launch may be answered by a bundle's index, None where its direct rows hold for this Triton."""
    packed = bundle.environment.distribution
    if here.problem is not None:
        return here.problem
    if not packed:
        return "it does not say which build of Triton it was packed with"
    return None if packed == here.digest else "packed with another build of this Triton release"


def _by_name(bundle: Bundle) -> dict[str, list[str]]:
    """Return the names of a bundle's entries by the name of their kernel."""
    try:
        index = bundle.index()
    except BundleError:
        return {}  # the overlay works without it
    found: dict[str, list[str]] = {}
    for entry, kernel in index.kernels():
        found.setdefault(kernel.rpartition(":")[2], []).append(entry)
    return found


_LARGEST = 4096
_MISSING = object()


_current: tuple[Active, Prebaked] | None = None
_making = threading.Lock()


def _after_fork() -> None:
    """Start anew in a forked child: another thread may have held a lock, and no kernel is on its GPU."""
    global _current, _making
    _current, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def prebaked() -> Prebaked | None:
    """Return the packed kernels of the settings in force; None without bundles."""
    global _current  # noqa: PLW0603 - one for each settings object
    settings = active()
    if not settings.bundles:
        return None
    known = _current
    if known is None or known[0] is not settings:
        with _making:
            known = _current
            if known is None or known[0] is not settings:
                known = _current = settings, Prebaked(settings)
    return known[1]
