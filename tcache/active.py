"""What this process loads from and what it may do: mode, store, bundles. Read from the environment once."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from tcache.bundle import Bundle
from tcache.discover import Offer, installed, named
from tcache.environment import Environment, Rejected, compatible
from tcache.errors import BundleError, StoreError, UsageError
from tcache.store import Store, default_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tcache.keys.shape import ShapeKey
    from tcache.scan import Scan
    from tcache.store import Kernel

__all__ = ["MODES", "Active", "Skipped", "activate", "active"]

MODES = ("tune", "lookup", "frozen")
_log = logging.getLogger("tcache")
_lock = threading.Lock()
_active: Active | None = None


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - a thread that is gone in the child may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Skipped(NamedTuple):
    """A bundle that cannot serve this process.

    Attributes:
        path: where it is.
        reason: why it is not used.
        kind: the same as one word, see :class:`tcache.environment.Rejected`.
    """

    path: str
    reason: str
    kind: str


_MOST_NOTICES = 1000


@dataclass(frozen=True)
class Active:
    """The settings in force.

    Attributes:
        mode: ``tune``, ``lookup`` or ``frozen``.
        stores: where best configs are looked up, in order; the last may be written.
        bundles: bundles in use.
        skipped: bundles that cannot serve this process, and why.
        writable: the store new results go to, None where there is none.
        named: whether the writable store was asked for by name: then it must work.
        retune: ``aged`` or ``all``: what was tuned before ``since`` (ISO 8601, UTC) is tuned again.
        on_select: told of each first launch: GPU name, kernel, shape key, config chosen, first config.
    """

    mode: str
    stores: tuple[Store, ...]
    bundles: tuple[Bundle, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    writable: Store | None = None
    named: bool = False
    retune: str | None = None
    since: str = ""
    on_select: Callable[[str, Kernel, ShapeKey, str, str], None] | None = None
    notices: set[str] = field(default_factory=set)

    def refused(self, qualname: str) -> list[str]:
        """Return why files of bundles that hold best configs of a kernel of that name are not used."""
        rows = [row for store in self.stores if isinstance(store, _BundleStore) for row in store.refused.items()]
        return [reason for file, reason in rows if file.endswith(f".{qualname}.json")]

    def notice(self, text: str) -> None:
        """Log ``text`` once in this process; after very many different ones, no more."""
        if text not in self.notices and len(self.notices) < _MOST_NOTICES:
            self.notices.add(text)
            _log.warning(text)


def active() -> Active:
    """Return the settings in force, reading them from the environment at first use.

    ``TCACHE_MODE``, ``TCACHE_STORE``, ``TCACHE_BUNDLES`` and the bundles of installed packages count. A process made
    by ``fork`` keeps its parent's settings; one made by ``spawn`` reads the environment again, and what a module calls
    :func:`activate` with when it is imported there.

    Raises:
        UsageError: ``TCACHE_MODE`` is not a mode.
    """
    global _active  # noqa: PLW0603 - the process-wide setting this module exists for
    if _active is None:
        with _lock:
            if _active is None:
                found = _gather(None, None, None, asked=False)
                _active = found
                if found.bundles or found.mode == "frozen":  # settings in the environment mean what they say
                    _install()
                    _tell(found)
    return _active


def _install() -> None:
    from tcache import overlay

    overlay.install()


def activate(
    bundles: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    mode: str | None = None,
    store: str | os.PathLike[str] | None = None,
    *,
    retune: str | None = None,
    since: str = "",
    on_select: Callable[[str, Kernel, ShapeKey, str, str], None] | None = None,
) -> Active:
    """Use bundles in this process: tcache's kernels find their winners there, every kernel its entry.

    A bundle for another Triton, Python, platform or environment is skipped with a reason, never an error. One line at
    level INFO of the logger ``tcache`` says what is in use.

    Args:
        bundles: bundle directories, first match wins, or one of them; None reads ``TCACHE_BUNDLES`` (separated like
            ``PATH``) and adds the bundles of installed packages (entry points of the group ``tcache.bundles``, unless
            ``TCACHE_INSTALLED_BUNDLES=0``).
        mode: ``tune``, ``lookup`` or ``frozen``; None reads ``TCACHE_MODE``, else ``frozen`` with bundles and
            ``tune`` without. Without this call, installed packages alone do not freeze a process.
        store: directory of best configs to consult first; None reads ``TCACHE_STORE``.
        retune, since, on_select: see :class:`Active`.

    Returns:
        The settings in force, with the bundles that were skipped and why.

    Raises:
        UsageError: ``mode`` is not a mode.
    """
    global _active  # noqa: PLW0603
    if isinstance(bundles, (str, os.PathLike)):
        bundles = [bundles]
    with _lock:
        found = _active = replace(_gather(bundles, mode, store), retune=retune, since=since, on_select=on_select)
    _install()
    _tell(found)
    return found


def _tell(found: Active) -> None:
    """Say in one line what is in use; a warning when bundles were offered and none can be used."""
    level = logging.WARNING if found.skipped and not found.bundles else logging.INFO
    if _log.isEnabledFor(level):
        entries = sum(len(bundle.entries) for bundle in found.bundles)
        names = ", ".join(bundle.name for bundle in found.bundles)
        skipped = "".join(f"; skipped {row.path}: {row.reason}" for row in found.skipped)
        _log.log(
            level,
            "tcache: mode %s, %d bundles%s, %d entries%s",
            *(found.mode, len(found.bundles), f" ({names})" if names else "", entries, skipped),
        )


class _BundleStore(Store):
    """The best configs of a bundle: read only after their digests were compared, never written."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.place / "store")
        self._bundle = bundle
        self.refused: dict[str, str] = {}
        """Files that are not used -> why."""

    def read(self, path: Path) -> Scan | None:
        name = path.relative_to(self._bundle.place).as_posix()
        if name not in self._bundle.files:
            return None
        checked = self._bundle.check(name)
        try:
            if isinstance(checked, Rejected):
                raise StoreError(checked.reason)
            found = super().read(path)
        except StoreError as error:  # of another schema, say, although its digest is right
            _log.warning("tcache: best configs are not used: %s", error.message)
            self.refused[path.name] = error.message
            return None
        self.refused.pop(path.name, None)
        return found


def _gather(
    bundles: Sequence[str | os.PathLike[str]] | None,
    mode: str | None,
    store: str | os.PathLike[str] | None,
    *,
    asked: bool = True,
) -> Active:
    paths = named() if bundles is None else [os.fspath(path) for path in bundles]
    offers = [Offer(path) for path in paths] + (installed() if bundles is None else [])
    opened, skipped = _open(offers)
    wanted = bool(paths) or (asked and bool(offers))
    mode = mode or os.environ.get("TCACHE_MODE") or ("frozen" if wanted else "tune")
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is unknown", f"use one of {', '.join(MODES)}")
    stores = []
    chosen = store or os.environ.get("TCACHE_STORE")
    if chosen:
        stores.append(Store(chosen))
    stores += [_BundleStore(bundle) for bundle in opened]
    fallback = default_store()
    if fallback is not None and mode != "frozen":
        stores.append(Store(fallback))
    writable = stores[0] if chosen else (stores[-1] if fallback is not None and mode != "frozen" else None)
    return Active(mode, tuple(stores), tuple(opened), tuple(skipped), writable, named=bool(chosen))


def _open(offers: Sequence[Offer]) -> tuple[list[Bundle], list[Skipped]]:
    if not offers:
        return [], []
    from tcache._triton import release
    from tcache._triton.probe import key_environment

    here = Environment.current(release, key_environment())
    opened: list[Bundle] = []
    skipped = []
    for path, problem in offers:
        try:
            bundle = None if problem else Bundle(path)
        except BundleError as error:
            skipped.append(Skipped(path, error.message, "bundle"))
            continue
        if bundle is None:
            skipped.append(Skipped(path, problem, "bundle"))
        elif any(other.place == bundle.place for other in opened):
            continue  # named twice, or named and installed
        elif isinstance(verdict := compatible(bundle.environment, here), Rejected):
            skipped.append(Skipped(path, verdict.reason, verdict.kind))
        else:
            opened.append(bundle)
    return opened, skipped
