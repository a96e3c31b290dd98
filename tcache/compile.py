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
from pathlib import Path
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
    """Return whether the Triton cache has an entry, complete with the file that Triton looks for first."""
    return Path(root or cache_directory(), entry, f"__grp__{name[:150]}.json").is_file()


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
    queue = [list(range(len(todo)))] if todo else []
    while queue:
        numbers = queue.pop(0)
        started: set[int] = set()
        ending = "exit code None"
        for event in _worker(todo, numbers, jobs, timeout):
            if event[0] == "start":
                started.add(event[1])
            elif event[0] == "done":
                result = found[event[1]] = Compiled(event[1], event[2], event[3])
                done(result)
            else:
                ending = event[1]
        left = [number for number in numbers if number not in found]
        suspects = [number for number in left if number in started] or left[:1]
        if len(suspects) > 1:  # one of them is guilty: each gets a process of its own
            queue += [[number] for number in suspects]
        elif suspects:
            result = found[suspects[0]] = Compiled(suspects[0], 0.0, f"the compiler {ending}")
            done(result)
        if rest := [number for number in left if number not in suspects]:
            queue.insert(0, rest)
    return [found[number] for number in range(len(todo))]


def _worker(todo: list[Compilation], numbers: list[int], jobs: int, timeout: float | None) -> Iterator[tuple[Any, ...]]:
    """Run one forked child and yield its events: ``start``, ``done`` and at last ``end`` with how it ended."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(todo, numbers, jobs, here, there), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread at fork; here these are idle pools of numeric libraries
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    there.close()
    hung = False
    try:
        while True:
            if timeout is not None and not here.poll(timeout):
                hung = True
                break
            try:
                yield here.recv()
            except EOFError:
                break
    finally:
        here.close()
        if not hung:
            child.join(0.2)
        if child.is_alive():
            child.kill() if hung else child.terminate()
        child.join()
    if hung:
        yield ("end", f"hung for {timeout:.0f} s")
    elif child.exitcode is not None and child.exitcode < 0:
        yield ("end", f"ended the process (signal {signal.Signals(-child.exitcode).name})")
    else:
        yield ("end", f"ended the process (exit code {child.exitcode})")


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
