"""What this process loads from and what it may do: mode, store, bundles. Read from the environment once."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tcache.bundle import Bundle, Environment, Rejected, compatible
from tcache.errors import BundleError, UsageError
from tcache.store import Store, default_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tcache.keys.shape import ShapeKey
    from tcache.scan import Scan
    from tcache.store import Kernel

__all__ = ["MODES", "Active", "activate", "active"]

MODES = ("tune", "lookup", "frozen")
_log = logging.getLogger("tcache")
_lock = threading.Lock()
_active: Active | None = None


@dataclass(frozen=True)
class Active:
    """The settings in force.

    Attributes:
        mode: ``tune``, ``lookup`` or ``frozen``.
        stores: where best configs are looked up, in order; the last may be written.
        bundles: bundles in use.
        skipped: ``(path, reason)`` of bundles that cannot serve this process.
        writable: the store new results go to, None where there is none.
        named: whether the writable store was asked for by name: then it must work.
        retune: ``aged`` or ``all``: what was tuned before ``since`` (ISO 8601, UTC) is tuned again.
        on_select: told of each first launch: GPU name, kernel, shape key, config chosen, first config.
    """

    mode: str
    stores: tuple[Store, ...]
    bundles: tuple[Bundle, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    writable: Store | None = None
    named: bool = False
    retune: str | None = None
    since: str = ""
    on_select: Callable[[str, Kernel, ShapeKey, str, str], None] | None = None
    notices: set[str] = field(default_factory=set)

    def notice(self, text: str) -> None:
        """Log ``text`` once in this process."""
        if text not in self.notices:
            self.notices.add(text)
            _log.warning(text)


def active() -> Active:
    """Return the settings in force, reading ``TCACHE_MODE``, ``TCACHE_STORE`` and ``TCACHE_BUNDLES`` at first use.

    Raises:
        UsageError: ``TCACHE_MODE`` is not a mode.
    """
    global _active  # noqa: PLW0603 - the process-wide setting this module exists for
    if _active is None:
        with _lock:
            if _active is None:
                found = _gather(None, None, None)
                _active = found
                if found.bundles or found.mode == "frozen":  # settings in the environment mean what they say
                    _install()
    return _active


def _install() -> None:
    from tcache import overlay

    overlay.install()


def activate(
    bundles: Sequence[str | os.PathLike[str]] | None = None,
    mode: str | None = None,
    store: str | os.PathLike[str] | None = None,
    *,
    retune: str | None = None,
    since: str = "",
    on_select: Callable[[str, Kernel, ShapeKey, str, str], None] | None = None,
) -> Active:
    """Use bundles in this process: tcache's kernels find their winners there, every kernel its entry.

    Args:
        bundles: bundle directories, first match wins; None reads ``TCACHE_BUNDLES`` (separated like ``PATH``).
        mode: ``tune``, ``lookup`` or ``frozen``; None reads ``TCACHE_MODE``, else ``frozen`` with bundles and
            ``tune`` without.
        store: directory of best configs to consult first; None reads ``TCACHE_STORE``.
        retune, since, on_select: see :class:`Active`.

    Returns:
        The settings in force, with the bundles that were skipped and why.

    Raises:
        UsageError: ``mode`` is not a mode.
    """
    global _active  # noqa: PLW0603
    with _lock:
        _active = replace(_gather(bundles, mode, store), retune=retune, since=since, on_select=on_select)
    _install()
    entries = sum(len(bundle.entries) for bundle in _active.bundles)
    _log.info("tcache: mode %s, %d bundles, %d entries", _active.mode, len(_active.bundles), entries)
    return _active


class _BundleStore(Store):
    """The best configs of a bundle: read only after their digests were compared, never written."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.root / "store")
        self._bundle = bundle

    def read(self, path: Path) -> Scan | None:
        name = path.relative_to(self._bundle.root).as_posix()
        if name not in self._bundle.files:
            return None
        checked = self._bundle.check(name)
        if isinstance(checked, Rejected):
            _log.warning("tcache: best configs are not used: %s", checked.reason)
            return None
        return super().read(path)


def _gather(
    bundles: Sequence[str | os.PathLike[str]] | None,
    mode: str | None,
    store: str | os.PathLike[str] | None,
) -> Active:
    if bundles is None:
        bundles = [path for path in os.environ.get("TCACHE_BUNDLES", "").split(os.pathsep) if path]
    mode = mode or os.environ.get("TCACHE_MODE") or ("frozen" if bundles else "tune")
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is unknown", f"use one of {', '.join(MODES)}")
    opened, skipped = _open(bundles)
    for path, reason in skipped:
        _log.warning("tcache: bundle %s is not used: %s", path, reason)
    stores = []
    named = store or os.environ.get("TCACHE_STORE")
    if named:
        stores.append(Store(named))
    stores += [_BundleStore(bundle) for bundle in opened]
    fallback = default_store()
    if fallback is not None and mode != "frozen":
        stores.append(Store(fallback))
    writable = stores[0] if named else (stores[-1] if fallback is not None and mode != "frozen" else None)
    return Active(mode, tuple(stores), tuple(opened), tuple(skipped), writable, named=bool(named))


def _open(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Bundle], list[tuple[str, str]]]:
    if not paths:
        return [], []
    from tcache._triton import release
    from tcache._triton.probe import key_environment

    here = Environment.current(release, key_environment())
    opened, skipped = [], []
    for path in paths:
        try:
            bundle = Bundle(Path(path))
        except BundleError as error:
            skipped.append((os.fspath(path), error.message))
            continue
        verdict = compatible(bundle.environment, here)
        if isinstance(verdict, Rejected):
            skipped.append((os.fspath(path), verdict.reason))
        else:
            opened.append(bundle)
    return opened, skipped
