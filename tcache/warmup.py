"""Compile resolved launches into the Triton cache, several at once, and survive a compiler that does not.

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
from typing import TYPE_CHECKING, Any

from tcache.resolve import entry_present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    from tcache.resolve import Resolved

__all__ = ["Outcome", "cores", "pending", "warm"]


@dataclass(frozen=True)
class Outcome:
    """What became of one entry.

    Attributes:
        resolved: the first launch that needs it.
        seconds: time to compile it.
        error: why it failed, None when it is in the cache now.
    """

    resolved: Resolved
    seconds: float
    error: str | None = None


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        One outcome per launch, in the order of ``todo``; failures are outcomes, never exceptions.
    """
    found: dict[int, Outcome] = {}
    queue = [list(range(len(todo)))] if todo else []
    while queue:
        numbers = queue.pop(0)
        started: set[int] = set()
        ended: int | None = None
        for event in _worker(todo, numbers, jobs):
            if event[0] == "start":
                started.add(event[1])
            elif event[0] == "done":
                outcome = found[event[1]] = Outcome(todo[event[1]], event[2], event[3])
                done(outcome)
            else:
                ended = event[1]
        left = [number for number in numbers if number not in found]
        suspects = [number for number in left if number in started]
        if not left:
            continue
        if len(suspects) == 1 or not suspects:
            number = suspects[0] if suspects else left[0]
            outcome = found[number] = Outcome(todo[number], 0.0, f"the compiler ended the process ({_ending(ended)})")
            done(outcome)
            suspects = [number]
        else:  # one of them is guilty: each gets a process of its own
            queue += [[number] for number in suspects]
        if rest := [number for number in left if number not in suspects]:
            queue.insert(0, rest)
    return [found[number] for number in range(len(todo))]


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _worker(todo: list[Resolved], numbers: list[int], jobs: int) -> Iterator[tuple[Any, ...]]:
    """Run one forked child and yield its events: ``start``, ``done`` and at last ``end``."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(todo, numbers, jobs, here, there), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread at fork; here these are idle pools of numeric libraries
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    there.close()
    try:
        while True:
            try:
                yield here.recv()
            except EOFError:
                break
    finally:
        here.close()
        if child.is_alive():
            child.join(0.2)
        if child.is_alive():
            child.terminate()
        child.join()
    yield ("end", child.exitcode)


def _work(todo: list[Resolved], numbers: list[int], jobs: int, here: Connection, pipe: Connection) -> None:
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
            todo[number].compilation.run()
        except Exception as problem:  # whatever a compiler raises is this entry's outcome
            first = next(iter(str(problem).splitlines()), "")
            error = f"{type(problem).__name__}: {first}"
        send(("done", number, time.perf_counter() - begin, error))

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        list(pool.map(one, numbers))
    pipe.close()
