"""Warm up: compile what resolved launches need and the Triton cache lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tcache.compile import Compiled, compile_all, entry_present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tcache.resolve import Resolved

__all__ = ["Outcome", "pending", "warm"]


@dataclass(frozen=True)
class Outcome:
    """What became of one entry.

    Attributes:
        resolved: the first launch that needs it.
        seconds: time to compile it.
        error: why it failed, None when it is in the cache now.
        peak: most memory that its worker had resident until then, in bytes.
        worker: process id of its worker.
    """

    resolved: Resolved
    seconds: float
    error: str | None = None
    peak: int = 0
    worker: int = 0


def pending(resolved: Iterable[Resolved]) -> list[Resolved]:
    """Return one launch for each entry that the Triton cache lacks, in order."""
    first: dict[str, Resolved] = {}
    for launch in resolved:
        first.setdefault(launch.entry, launch)
    return [launch for launch in first.values() if not entry_present(launch.entry, launch.compilation.name)]


def warm(todo: list[Resolved], jobs: int, done: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
    """Compile entries into the Triton cache.

    Args:
        todo: launches of distinct entries.
        jobs: how many to compile at once.
        done: called in this process as each finishes.

    Returns:
        One outcome per launch, in order; failures are outcomes, never exceptions.
    """

    def outcome(result: Compiled) -> Outcome:
        return Outcome(todo[result.number], result.seconds, result.error, result.peak, result.worker)

    results = compile_all([launch.compilation for launch in todo], jobs, lambda result: done(outcome(result)))
    return [outcome(result) for result in results]
