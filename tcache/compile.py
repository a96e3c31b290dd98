"""Compile into the Triton cache, several at once, and survive a compiler that does not.

Each worker is a forked child with one thread: it inherits every import, so it starts at once, LLVM may abort it without
taking this process along, and none waits for another's GIL (half of a compilation is Triton's Python). Work is handed
out one by one, longest first, so that no worker idles while another has a queue; a worker that has grown is replaced.

Work may come while workers run, as launches are resolved. A compilation cannot be sent to another process (it is made
of functions): a worker knows what there was when it was forked, and is replaced when only newer work is left.
"""

from __future__ import annotations

import bisect
import gc
import os
import time
from multiprocessing import connection
from typing import TYPE_CHECKING

from tcache._triton.cache import cache_directory
from tcache.worker import Compiled, Worker, one_line, peak_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tcache._triton.probe import Compilation

__all__ = ["GROWTH", "Compiled", "Pool", "compile_all", "cores", "entry_present", "one_line", "peak_memory"]

GROWTH = 512 << 20
"""Bytes by which a worker's resident memory may grow; LLVM and MLIR keep about 1 MB of each compilation."""
_PAUSE = 0.02
"""Seconds between two looks at busy workers while work is added."""


def entry_present(entry: str, name: str, root: str | None = None) -> bool:
    """Return whether the Triton cache has an entry: the group Triton looks for first, metadata and a binary."""
    stem = os.path.join(root or cache_directory(), entry, name[:150])
    group = os.path.join(root or cache_directory(), entry, f"__grp__{name[:150]}.json")
    binary = any(os.path.isfile(f"{stem}.{kind}") for kind in ("cubin", "hsaco"))
    return binary and os.path.isfile(group) and os.path.isfile(f"{stem}.json")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(
    todo: list[Compilation],
    jobs: int,
    done: Callable[[Compiled], None] = lambda _: None,
    timeout: float | None = None,
    growth: int = GROWTH,
) -> list[Compiled]:
    """Compile entries into the Triton cache; see :class:`Pool`.

    Returns:
        One result per compilation, in order; failures are results, never exceptions.
    """
    with Pool(jobs, done, timeout, growth) as pool:
        for work in todo:
            pool.add(work)
        return pool.finish()


class Pool:
    """Compiles entries into the Triton cache, while it is given more of them. A context manager: its end ends workers.

    Args:
        jobs: how many to compile at once.
        done: called in this process as each finishes.
        timeout: seconds that one compilation may take before the compiler counts as hung.
        growth: bytes by which a worker's resident memory may grow before another takes its place.
        prepare: called in each worker before it compiles anything.

    Attributes:
        count: how many were added.
        begun: when the first worker was started, by ``time.perf_counter``; None before.
    """

    def __init__(
        self,
        jobs: int,
        done: Callable[[Compiled], None] = lambda _: None,
        timeout: float | None = None,
        growth: int = GROWTH,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._jobs, self._done, self._timeout, self._growth, self._prepare = jobs, done, timeout, growth, prepare
        self._todo: list[Compilation] = []
        self._waiting: list[tuple[float, int]] = []  # (effort, -number), sorted: the last goes first
        self._workers: list[Worker] = []
        self._leaving: list[Worker] = []
        self._found: dict[int, Compiled] = {}
        self._looked = 0.0
        self.begun: float | None = None

    @property
    def count(self) -> int:
        return len(self._todo)

    def add(self, work: Compilation) -> None:
        """Add a compilation, unlike all others; :meth:`look` or :meth:`finish` begins it."""
        self._todo.append(work)
        bisect.insort(self._waiting, (work.effort(), 1 - len(self._todo)))

    def look(self) -> None:
        """Start workers that are lacking, take results that are there and hand out work; wait for nothing."""
        self._staff()
        if self._workers and time.monotonic() - self._looked >= _PAUSE:
            self._collect(0.0)
            self._staff()
            self._looked = time.monotonic()

    def finish(self) -> list[Compiled]:
        """Wait until everything is compiled.

        Returns:
            One result per compilation, in the order in which they were added; failures are results, never exceptions.
        """
        while self._waiting or self._workers:
            self._staff()
            self._collect(1.0)
        return [self._found[number] for number in range(len(self._todo))]

    def __enter__(self) -> Pool:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end(kill=True)
        for worker in self._leaving:
            worker.end()
        if self.begun is not None:
            gc.unfreeze()

    def _staff(self) -> None:
        """Start workers while there is work for them."""
        if self._waiting and len(self._workers) < self._jobs:
            self._leaving = [worker for worker in self._leaving if not worker.gone()]
            gc.freeze()  # the collector would write to every object, so copy it into every child
            self.begun = self.begun or time.perf_counter()
        while self._waiting and len(self._workers) < self._jobs:
            pipes = [worker.pipe for worker in self._workers]
            number = -self._waiting.pop()[1]
            self._workers.append(Worker(self._todo, number, pipes, self._prepare))

    def _collect(self, wait: float) -> None:
        """Take results, and give each worker that delivered one its next."""
        for worker, result in self._results(wait):
            if worker.grown > self._growth or not self._give(worker):
                self._workers.remove(worker)
                worker.dismiss()
                self._leaving.append(worker)
            self._found[result.number] = result
            self._done(result)

    def _give(self, worker: Worker) -> bool:
        """Give a worker the longest of what it knows; False when there is none, or the worker is gone."""
        for place in range(len(self._waiting) - 1, -1, -1):
            number = -self._waiting[place][1]
            if number < worker.known:
                given = worker.give(number)
                if given:
                    del self._waiting[place]
                return given
        return False

    def _results(self, wait: float) -> Iterator[tuple[Worker, Compiled]]:
        """Yield what has come in, after waiting for ``wait`` seconds at most."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in connection.wait(list(by_pipe), timeout=wait):
            worker = by_pipe[pipe]  # type: ignore[index]  # what wait() was given
            yield worker, worker.result()
        if self._timeout is not None:
            for worker in [each for each in self._workers if time.monotonic() - each.since > self._timeout]:
                worker.end(kill=True)
                yield worker, worker.lost(f"hung for {self._timeout:.0f} s")
