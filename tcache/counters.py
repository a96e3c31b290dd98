"""What became of first launches in this process."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Stats", "count", "count_miss", "stats"]

_lock = threading.Lock()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - a thread that is gone in the child may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass
class Stats:
    """Counts of launches seen for the first time, by where their config and their entry came from.

    Attributes:
        hits: the store knew the winner.
        aged: of these, tuned under another Triton release.
        stale: the store knew a winner of an edited kernel, which was not used.
        nearest: the config of the nearest tuned shape was used.
        default: the first config was used.
        tuned: benchmarked here.
        waited: another process was tuning; its result was used.
        misses: refused with a CacheMiss.
        prebaked: kernels loaded from a bundle through its index, without Triton's key.
        reasons: how often each of the reasons of :class:`~tcache.errors.CacheMiss` was among those of a miss.
        entries: entries that came from a bundle.
        compiled: entries that no bundle had and Triton's own cache or compiler was left to provide.
        refused: packed entries that were damaged or could not be trusted, and were not used.
        preloaded: entries that :func:`tcache.preload` loaded onto a GPU.
    """

    hits: int = 0
    aged: int = 0
    stale: int = 0
    nearest: int = 0
    default: int = 0
    tuned: int = 0
    waited: int = 0
    misses: int = 0
    prebaked: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    entries: int = 0
    compiled: int = 0
    refused: int = 0
    preloaded: int = 0


_stats = Stats()


def count(name: str, by: int = 1) -> None:
    """Add to a counter."""
    with _lock:
        setattr(_stats, name, getattr(_stats, name) + by)


def count_miss(reasons: tuple[str, ...]) -> None:
    """Count a miss and its reasons."""
    with _lock:
        _stats.misses += 1
        for reason in dict.fromkeys(reasons):
            _stats.reasons[reason] = _stats.reasons.get(reason, 0) + 1


def stats() -> dict[str, Any]:
    """Return this process's counters, see :class:`Stats`; ``reasons`` is a dictionary of counts."""
    with _lock:
        return asdict(_stats)
