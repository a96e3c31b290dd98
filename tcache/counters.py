"""What became of first launches in this process."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

__all__ = ["Stats", "count", "stats"]

_lock = threading.Lock()


@dataclass
class Stats:
    """Counts of launches seen for the first time, by where their config came from.

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


_stats = Stats()


def count(name: str) -> None:
    """Add one to a counter."""
    with _lock:
        setattr(_stats, name, getattr(_stats, name) + 1)


def stats() -> dict[str, int]:
    """Return this process's counters, see :class:`Stats`."""
    with _lock:
        return asdict(_stats)
