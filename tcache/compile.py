"""Compile into the Triton cache, several at once, and survive a compiler that does not.

Work runs in a forked child: it inherits every import, so it starts at once, and LLVM may abort it without taking
this process along. Inside the child threads compile in parallel, since LLVM and ptxas run outside the GIL.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from tcache._triton.cache import cache_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from tcache._triton.probe import Compilation

__all__ = ["Compiled", "compile_all", "cores", "entry_present", "one_line"]


@dataclass(frozen=True)
class Compiled:
    """What became of one compilation.

    Attributes:
        number: its place in the list given.
        seconds: how long it took.
        error: why it failed, None when the entry is in the cache now.
    """

    number: int
    seconds: float
    error: str | None = None


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


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(
    todo: list[Compilation], jobs: int, done: Callable[[Compiled], None] = lambda _: None, timeout: float | None = None
) -> list[Compiled]:
    """Compile entries into the Triton cache.

    Args:
        todo: distinct compilations.
        jobs: how many to compile at once.
        done: called in this process as each finishes.
        timeout: seconds without any compilation starting or finishing after which the compiler counts as hung.

    Returns:
        One result per compilation, in order; failures are results, never exceptions.
    """
    found: dict[int, Compiled] = {}
    every = list(range(len(todo)))
    processes = max(1, min(len(todo), jobs) // _THREADS)
    groups = [every[start::processes] for start in range(processes)] if todo else []
    threads = -(-jobs // processes)
    while groups:
        again: list[list[int]] = []
        running = [_Worker(todo, numbers, threads) for numbers in groups]
        for worker, event in _events(running, timeout):
            if event[0] == "done":
                result = found[event[1]] = Compiled(event[1], event[2], event[3])
                done(result)
            elif event[0] == "end":
                left = [number for number in worker.numbers if number not in found]
                suspects = [number for number in left if number in worker.started] or left[:1]
                if len(suspects) > 1:  # one of them is guilty: each gets a process of its own
                    again += [[number] for number in suspects]
                elif suspects:
                    result = found[suspects[0]] = Compiled(suspects[0], 0.0, f"the compiler {event[1]}")
                    done(result)
                if rest := [number for number in left if number not in suspects]:
                    again.append(rest)
        groups = again
    return [found[number] for number in every]


_THREADS = 4
"""Threads of one child: more of them wait for each other's GIL, since Triton's front end is Python."""


class _Worker:
    """A forked child that compiles some of the list."""

    def __init__(self, todo: list[Compilation], numbers: list[int], threads: int) -> None:
        self.numbers = numbers
        self.started: set[int] = set()
        self.heard = time.monotonic()
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe(duplex=False)
        self._child = context.Process(target=_work, args=(todo, numbers, threads, self.pipe, there), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread at fork; here these are idle pools of numeric libraries
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child.start()
        there.close()

    def end(self, *, hung: float | None = None) -> str:
        """Wait for the child, or end it, and return how it ended."""
        self.pipe.close()
        if hung is None:
            self._child.join(5)
        if self._child.is_alive():
            self._child.kill()
        self._child.join()
        code = self._child.exitcode
        if hung is not None:
            return f"hung for {hung:.0f} s"
        if code is not None and code < 0:
            return f"ended the process (signal {signal.Signals(-code).name})"
        return f"ended the process (exit code {code})"


def _events(running: list[_Worker], timeout: float | None) -> Iterator[tuple[_Worker, tuple[Any, ...]]]:
    """Yield ``done`` events of all children, and an ``end`` event for each child with how it ended."""
    open_ = {id(worker): worker for worker in running}
    try:
        while open_:
            by_pipe = {worker.pipe: worker for worker in open_.values()}
            for pipe in connection.wait(list(by_pipe), timeout=1.0):
                worker = by_pipe[pipe]  # type: ignore[index]  # what wait() was given
                worker.heard = time.monotonic()
                try:
                    event = worker.pipe.recv()
                except (EOFError, OSError):
                    del open_[id(worker)]
                    yield worker, ("end", worker.end())
                    continue
                if event[0] == "start":
                    worker.started.add(event[1])
                else:
                    yield worker, event
            if timeout is not None:
                for worker in [each for each in open_.values() if time.monotonic() - each.heard > timeout]:
                    del open_[id(worker)]
                    yield worker, ("end", worker.end(hung=timeout))
    finally:
        for worker in open_.values():
            worker.end(hung=0.0)


def _work(todo: list[Compilation], numbers: list[int], jobs: int, here: Connection, pipe: Connection) -> None:
    here.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    import threading

    lock = threading.Lock()

    def send(event: tuple[Any, ...]) -> None:
        with lock:
            pipe.send(event)

    def one(number: int) -> None:
        send(("start", number))
        begin = time.perf_counter()
        error = None
        try:
            todo[number].run()
        except Exception as problem:  # whatever a compiler raises is this entry's outcome
            error = one_line(problem)
        send(("done", number, time.perf_counter() - begin, error))

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        list(pool.map(one, numbers))
    pipe.close()
