"""Warm up: compile what resolved launches need and the Triton cache lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tcache.compile import Compiled, Pool, entry_present
from tcache.replay import leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tcache.resolve import Resolved

__all__ = ["Outcome", "WarmUp", "pending", "warm"]


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
        todo: launches of distinct entries, none of which is there.
        jobs: how many to compile at once.
        done: called in this process as each finishes.

    Returns:
        One outcome per launch, in order; failures are outcomes, never exceptions.
    """
    with WarmUp(jobs, done) as warming:
        for launch in todo:
            warming.add(launch)
        return warming.finish()


class WarmUp:
    """Compiles entries into the Triton cache while launches are being resolved. A context manager.

    Args:
        jobs: how many to compile at once.
        done: called in this process as each finishes, inside :meth:`see` or :meth:`finish`.
    """

    def __init__(self, jobs: int, done: Callable[[Outcome], None] = lambda _: None) -> None:
        self._seen: set[str] = set()
        self._todo: list[Resolved] = []
        self._pool = Pool(jobs, lambda result: done(self._outcome(result)), prepare=leave)

    @property
    def count(self) -> int:
        """How many entries were to be compiled so far."""
        return len(self._todo)

    @property
    def begun(self) -> float | None:
        """When compiling began, by ``time.perf_counter``; None when nothing was to be compiled."""
        return self._pool.begun

    def see(self, launch: Resolved) -> None:
        """Have a launch's entry compiled, unless the Triton cache has it or it was seen before; does not wait."""
        if launch.entry not in self._seen:
            self._seen.add(launch.entry)
            if not entry_present(launch.entry, launch.compilation.name):
                self.add(launch)
        self._pool.look()

    def add(self, launch: Resolved) -> None:
        """Have a launch's entry compiled."""
        self._todo.append(launch)
        self._pool.add(launch.compilation)

    def finish(self) -> list[Outcome]:
        """Wait until everything is compiled.

        Returns:
            One outcome per entry that was lacking, in the order of the launches; failures are outcomes, never
            exceptions.
        """
        return [self._outcome(result) for result in self._pool.finish()]

    def _outcome(self, result: Compiled) -> Outcome:
        return Outcome(self._todo[result.number], result.seconds, result.error, result.peak, result.worker)

    def __enter__(self) -> WarmUp:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)
