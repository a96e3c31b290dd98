"""Triton's cache manager over read-only bundles, with one writable layer above them.

Used through ``TRITON_CACHE_MANAGER=tcache.overlay:OverlayCacheManager`` (no code change) or
:func:`tcache.activate`. Bundles are asked first; what they lack comes from Triton's own cache directory, except in
frozen mode, where it is a :class:`~tcache.errors.CacheMiss`. A frozen process writes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache._triton import cache as _cache
from tcache._triton import release
from tcache._triton.distribution import distribution
from tcache._triton.probe import compile_in_progress
from tcache._triton.spared import believable, spare
from tcache.active import active
from tcache.counters import count, count_miss
from tcache.environment import Rejected
from tcache.errors import CacheMiss
from tcache.explain import explain_entry, explain_helper
from tcache.startup import missed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tcache.bundle import Bundle

__all__ = ["OverlayCacheManager", "install", "only_packed"]

_log = logging.getLogger("tcache")
_strict = threading.local()


@contextlib.contextmanager
def only_packed() -> Iterator[None]:
    """Inside the block, in this thread, what no bundle has is a :class:`~tcache.errors.CacheMiss` in every mode."""
    before, _strict.on = getattr(_strict, "on", False), True
    try:
        yield
    finally:
        _strict.on = before


class _Packed(dict[str, str]):
    """An entry's files as Triton is given them: name -> path.

    Attributes:
        bundle: the bundle they are in.
        files: what it answered, the same object for as long as the files are those whose digests were compared.
    """

    def __init__(self, bundle: Bundle, files: dict[str, Path]) -> None:
        super().__init__({name: str(path) for name, path in files.items()})
        self.bundle, self.files = bundle, files

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # torch's compile workers send kernels to their parent, which reads nothing any more


class OverlayCacheManager(_cache.CacheManager):  # type: ignore[misc]  # upstream is untyped
    """What Triton instantiates for every entry: ``OverlayCacheManager(key)``."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.key = key
        self._kind = (override, dump)
        self._layer: Any = None
        _answer_for_helpers()

    def _below(self) -> Any:
        """Return Triton's own manager for this key; it creates directories, so only when it is needed."""
        if self._layer is None:
            override, dump = self._kind
            self._layer = _cache.FileCacheManager(self.key, override=override, dump=dump)
        return self._layer

    def _frozen(self) -> bool:
        return not any(self._kind) and _refusing()

    def get_file(self, filename: str) -> str | None:
        """Return the path of one file: Triton asks so for native helpers and dumped IR."""
        for bundle in active().bundles:
            found = _loadable(bundle.helper(key=self.key, name=filename))
            if isinstance(found, Path):
                return str(found)
            if found is not None:
                count("refused")
                _log.warning("tcache: %s", found.reason)
        # A frozen process has no layer above. Triton goes on to `knobs.build.impl`, which refuses with a reason.
        return None if self._frozen() else self._below().get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of an entry by name.

        Raises:
            CacheMiss: frozen, and no bundle has the entry intact.
        """
        refused = []
        for bundle in active().bundles:
            found = bundle.entry_files(self.key)
            if isinstance(found, Rejected):
                refused.append(found.reason)
            elif found is not None:
                count("entries")
                return _Packed(bundle, found)
        _refused(self.key, refused)
        if self._frozen():
            raise _missed(self.key, refused)
        count("compiled")
        return self._below().get_group(filename)  # type: ignore[no-any-return]

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write to the writable layer; a frozen process answers with the bundle's copy of the same bytes."""
        if self._frozen():
            packed = _same_bytes(data, filename, active().bundles)
            if packed is not None:
                return packed
            raise _unwritten(filename)
        return str(self._below().put(data, filename, binary=binary))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Write the list of an entry's files to the writable layer."""
        if self._frozen():
            raise _unwritten(filename)
        return str(self._below().put_group(filename, group))


def _refused(key: str, reasons: list[str]) -> None:
    count("refused", len(reasons))
    for reason in reasons:
        _log.warning("tcache: entry %s is not used: %s", key, reason)


def _missed(key: str, refused: list[str]) -> CacheMiss:
    miss = explain_entry(key, compile_in_progress(), active(), tuple(refused))
    missed(miss.message)
    count_miss(miss.reasons)
    return miss


def _read(kernel: Any, group: dict[str, str], error: Exception | None, again: Callable[[dict[str, str]], None]) -> None:
    """See to it that what Triton read is what was compared: a bundle may change, or go, in between.

    What changed is read again if it is intact; else it is a miss, or what the layer below has, or is compiled.
    """
    if not isinstance(group, _Packed):
        if error is not None:
            raise error
        return
    packed, key = group, next(iter(group.files.values())).parent.name
    reasons = [f"{packed.bundle.place}: its files changed each of {_READS} times that they were read"]
    for _ in range(_READS):
        found = packed.bundle.entry_files(key)
        if found is packed.files:
            if error is not None:
                raise error
            return
        if not isinstance(found, dict):
            reasons = [found.reason] if found is not None else []
            break
        packed, error = _Packed(packed.bundle, found), None
        try:
            again(packed)
        except Exception as problem:  # changed once more
            error = problem
    _refused(key, reasons)
    compilation = compile_in_progress()
    if _refusing() or compilation is None or isinstance(found, dict):  # one that never rests would be given once more
        raise _missed(key, reasons) from error
    vars(kernel).update(vars(compilation.run()))  # asks again, and is not given these files


_READS = 3


def _unwritten(filename: str) -> CacheMiss:
    told = _cache.told_to_compile()
    miss = CacheMiss(
        f"frozen: Triton would write {filename} to its cache{f', since {told}' if told else ''}",
        hint="unset it, or use mode=lookup" if told else "pack it, or use mode=lookup",
        reasons=("helper" if filename.endswith(".so") else "kernel",),
    )
    count_miss(miss.reasons)
    return miss


def _same_bytes(data: Any, filename: str, bundles: tuple[Bundle, ...]) -> str | None:
    digest = hashlib.sha256(data if isinstance(data, bytes) else str(data).encode()).hexdigest()
    found = (_loadable(bundle.helper_of(filename, digest)) for bundle in bundles)
    return next((str(path) for path in found if isinstance(path, Path)), None)


def _loadable(helper: Path | Rejected | None) -> Path | Rejected | None:
    """Refuse a helper where no code can be loaded from: runtimes may mount Kubernetes' image volumes so.

    Not :class:`tcache.bundle.Bundle`'s to say: ``verify`` looks at a copy, and loads none.
    """
    if not isinstance(helper, Path):
        return helper
    try:
        barred = os.statvfs(helper).f_flag & os.ST_NOEXEC
    except OSError as error:
        return Rejected(f"{helper}: {error.strerror}")
    return Rejected(f"{helper}: its file system is mounted noexec: copy the bundle", "helper") if barred else helper


def _refusing() -> bool:
    return active().mode == "frozen" or getattr(_strict, "on", False)


_answering = False
_answering_lock = threading.Lock()
_previous: Any = None


def _answer_for_helpers() -> None:
    global _answering, _previous  # noqa: PLW0603 - a knob of the process is set once
    if _answering:
        return
    frozen = active().mode == "frozen"
    with _answering_lock:  # all wait for it; and hooked twice, ours would be what ours falls back to
        if _answering:
            return
        _previous = _cache.set_build_impl(_build)
        _cache.see_reads(_read)
        _cache.spare_platform_search()
        if frozen:  # nothing will be linked
            _cache.skip_driver_search()
        _answering = True


def _build(
    name: str, src: str, srcdir: str, library_dirs: list[str], include_dirs: list[str], libraries: list[str]
) -> str:
    """Answer ``triton.knobs.build.impl``: the packed helper of the same source, else a compiler unless frozen."""
    digest = hashlib.sha256(Path(src).read_bytes()).hexdigest()
    refused = []
    for bundle in active().bundles:
        found = _loadable(bundle.helper(source=digest))
        if isinstance(found, Path):
            return str(found)
        if found is not None:
            count("refused")
            refused.append(found)
    if _refusing():
        miss = explain_helper(name, digest, active(), tuple(refused))
        count_miss(miss.reasons)
        raise miss
    if _previous is not None:
        return str(_previous(name, src, srcdir, library_dirs, include_dirs, libraries))
    return _cache.build_natively(name, src, srcdir, library_dirs, include_dirs, libraries)


def install() -> None:
    """Make the overlay this process's cache manager."""
    _cache.set_manager(OverlayCacheManager)
    _answer_for_helpers()
    _spare()


def _spare() -> None:
    """Give Triton what it would compute from its own files, where a bundle was packed with these very files.

    Values that bundles do not agree on are computed, and so are those that cannot be of this Triton.
    """
    settings = active()
    if not any(bundle.environment.computed for bundle in settings.bundles):
        return
    here = distribution()
    given: dict[str, str] = {}
    doubted: set[str] = set()
    for bundle in settings.bundles:
        packed = bundle.environment
        if here.problem is None and packed.distribution == here.digest:
            known = believable(packed.computed, release, here.files)
            wrong = packed.computed.keys() - known.keys()
            wrong |= {name for name in known if given.setdefault(name, known[name]) != known[name]}
            for name in sorted(wrong):
                settings.notice(
                    f"tcache: {bundle.root}: its {name[:80]!r} is not this Triton's and is computed: pack it again"
                )
            doubted |= wrong
    spare({name: value for name, value in given.items() if name not in doubted})
