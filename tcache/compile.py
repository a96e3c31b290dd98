"""Compile into the Triton cache, several at once, and survive a compiler that does not.

Each worker is a forked child with one thread: it inherits every import, so it starts at once, LLVM may abort it without
taking this process along, and none waits for another's GIL (half of a compilation is Triton's Python). Work is handed
out one by one, longest first, so that no worker idles while another has a queue; a worker that has grown is replaced.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections import deque
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING

from tcache._triton.cache import cache_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from tcache._triton.probe import Compilation

__all__ = ["GROWTH", "Compiled", "compile_all", "cores", "entry_present", "one_line", "peak_memory"]

GROWTH = 512 << 20
"""Bytes by which a worker's resident memory may grow; LLVM and MLIR keep about 1 MB of each compilation."""


@dataclass(frozen=True)
class Compiled:
    """What became of one compilation.

    Attributes:
        number: its place in the list given.
        seconds: how long it took.
        error: why it failed, None when the entry is in the cache now.
        peak: most memory that its worker had resident until then, in bytes; 0 when the worker did not survive.
        worker: process id of its worker.
    """

    number: int
    seconds: float
    error: str | None = None
    peak: int = 0
    worker: int = 0


def one_line(error: BaseException) -> str:
    """Return what an exception says, on one line: Triton's compile errors quote the source first and say it last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1] if lines and lines[0].startswith("at ") else next(iter(lines), "")
    return f"{type(error).__name__}: {said}"


def entry_present(entry: str, name: str, root: str | None = None) -> bool:
    """Return whether the Triton cache has an entry: the group Triton looks for first, metadata and a binary."""
    stem = os.path.join(root or cache_directory(), entry, name[:150])
    group = os.path.join(root or cache_directory(), entry, f"__grp__{name[:150]}.json")
    binary = any(os.path.isfile(f"{stem}.{kind}") for kind in ("cubin", "hsaco"))
    return binary and os.path.isfile(group) and os.path.isfile(f"{stem}.json")


def peak_memory() -> int:
    """Return the most memory this process has had resident, in bytes.

    ``ru_maxrss`` is no answer: a process started by a large one begins with the other's.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    """Compile entries into the Triton cache.

    Args:
        todo: distinct compilations.
        jobs: how many to compile at once.
        done: called in this process as each finishes.
        timeout: seconds that one compilation may take before the compiler counts as hung.
        growth: bytes by which a worker's resident memory may grow before another takes its place.

    Returns:
        One result per compilation, in order; failures are results, never exceptions.
    """
    found: dict[int, Compiled] = {}
    waiting = deque(sorted(range(len(todo)), key=lambda number: -todo[number].effort()))
    workers: list[_Worker] = []
    with _unshared_heap():
        try:
            while waiting or workers:
                while waiting and len(workers) < jobs:
                    workers.append(_Worker(todo, waiting.popleft(), [worker.pipe for worker in workers]))
                for worker, result in _results(workers, timeout):
                    if not (waiting and worker.grown <= growth and worker.give(waiting)):
                        workers.remove(worker)
                        worker.end()
                    found[result.number] = result
                    done(result)
        finally:
            for worker in workers:
                worker.end(kill=True)
    return [found[number] for number in range(len(todo))]


@contextlib.contextmanager
def _unshared_heap() -> Iterator[None]:
    """Keep the garbage collector off what exists now: it would write to every object, so copy it into every child."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Worker:
    """A forked child that compiles what it is given, one at a time.

    Attributes:
        grown: bytes by which its resident memory has grown; infinite once it has ended.
    """

    def __init__(self, todo: list[Compilation], first: int, others: list[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe()
        # ends of other pipes that the child would inherit: closed there, each worker sees when this process is gone
        inherited = [*others, self.pipe]
        self._child = context.Process(target=_work, args=(todo, first, there, inherited), daemon=True)
        self.number, self.since, self.grown = first, time.monotonic(), 0.0
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread at fork; here these are idle pools of numeric libraries
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child.start()
        there.close()

    def give(self, waiting: deque[int]) -> bool:
        """Give it the next number; False when it is gone, and the number stays."""
        try:
            self.pipe.send(waiting[0])
        except OSError:
            return False
        self.number, self.since = waiting.popleft(), time.monotonic()
        return True

    def result(self) -> Compiled:
        """Return what it sent, or how it ended."""
        try:
            number, seconds, error, self.grown, peak = self.pipe.recv()
        except (EOFError, OSError):
            return self.lost(self.end())
        return Compiled(number, seconds, error, peak, self._child.pid or 0)

    def lost(self, reason: str) -> Compiled:
        """Return the outcome of what it was compiling when it ended."""
        self.grown = float("inf")
        return Compiled(self.number, time.monotonic() - self.since, f"the compiler {reason}", 0, self._child.pid or 0)

    def end(self, *, kill: bool = False) -> str:
        """Let the child end, or end it, and return how it ended."""
        self.pipe.close()
        if not kill:
            self._child.join(5)
        if self._child.is_alive():
            self._child.kill()
        self._child.join()
        code = self._child.exitcode
        if code is not None and code < 0:
            return f"ended the process (signal {signal.Signals(-code).name})"
        return f"ended the process (exit code {code})"


def _results(workers: list[_Worker], timeout: float | None) -> Iterator[tuple[_Worker, Compiled]]:
    """Yield what has come in, after waiting for a second at most."""
    by_pipe = {worker.pipe: worker for worker in workers}
    for pipe in connection.wait(list(by_pipe), timeout=1.0):
        worker = by_pipe[pipe]  # type: ignore[index]  # what wait() was given
        yield worker, worker.result()
    if timeout is not None:
        for worker in [each for each in workers if time.monotonic() - each.since > timeout]:
            worker.end(kill=True)
            yield worker, worker.lost(f"hung for {timeout:.0f} s")


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _work(todo: list[Compilation], number: int, pipe: Connection, inherited: list[Connection]) -> None:
    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    base = _resident()
    with contextlib.suppress(EOFError, OSError):  # the parent wants no more, or is gone
        while True:
            begin = time.perf_counter()
            error = None
            try:
                todo[number].run()
            except Exception as problem:  # whatever a compiler raises is this entry's outcome
                error = one_line(problem)
            peak = peak_memory()
            pipe.send((number, time.perf_counter() - begin, error, _resident() - base, peak))
            number = pipe.recv()
