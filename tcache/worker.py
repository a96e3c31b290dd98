"""A forked child that compiles what it is given, one at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import signal
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from tcache._triton.probe import Compilation

__all__ = ["Compiled", "Worker", "one_line", "peak_memory"]


@dataclass(frozen=True)
class Compiled:
    """What became of one compilation.

    Attributes:
        number: its place in the order given.
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


class Worker:
    """A forked child that compiles what it is given, one at a time.

    Args:
        todo: all work there is so far: what it can be given.
        first: number of what it begins with.
        others: this process's ends of other workers' pipes.
        prepare: called in the child first.

    Attributes:
        pipe: this process's end of its pipe.
        known: numbers below this it can be given.
        since: when it was given what it is at.
        grown: bytes by which its resident memory has grown; infinite once it has ended.
    """

    def __init__(
        self, todo: list[Compilation], first: int, others: list[Connection], prepare: Callable[[], None]
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe()
        # ends of other pipes that the child would inherit: closed there, each worker sees when this process is gone
        inherited = [*others, self.pipe]
        self._child = context.Process(target=_work, args=(todo, first, there, inherited, prepare), daemon=True)
        self.known, self.since, self.grown = len(todo), time.monotonic(), 0.0
        self._number = first
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread at fork; here these are idle pools of numeric libraries
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child.start()
        there.close()

    def give(self, number: int) -> bool:
        """Give it the next number; False when it is gone."""
        try:
            self.pipe.send(number)
        except OSError:
            return False
        self._number, self.since = number, time.monotonic()
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
        return Compiled(self._number, time.monotonic() - self.since, f"the compiler {reason}", 0, self._child.pid or 0)

    def dismiss(self) -> None:
        """Let the child end by itself: there is nothing more for it."""
        self.pipe.close()

    def gone(self) -> bool:
        """Return whether the child has ended."""
        return not self._child.is_alive()

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


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _work(
    todo: list[Compilation], number: int, pipe: Connection, inherited: list[Connection], prepare: Callable[[], None]
) -> None:
    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    prepare()
    base = _resident()
    with contextlib.suppress(EOFError, OSError):  # the parent wants no more, or is gone
        while True:
            begin = time.perf_counter()
            error = None
            try:
                todo[number].build()
            except Exception as problem:  # whatever a compiler raises is this entry's outcome
                error = one_line(problem)
            peak = peak_memory()
            pipe.send((number, time.perf_counter() - begin, error, _resident() - base, peak))
            number = pipe.recv()
