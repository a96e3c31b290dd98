"""Spread small pieces of work over the cores of this machine.

Looking at thousands of small files is half Python, half the kernel's work, and hardly any of it runs outside the GIL:
threads only make it slower. A copy of this process made by ``fork`` starts in a millisecond and shares what was read.
It is made only where nothing can be cut off half-way: while the process has no other thread, not even one of a library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cores", "spread"]

T = TypeVar("T")
_WORTH = 300
"""Pieces for which another process is worth its start: some 20 µs each."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(look: Callable[[list[T]], list[str]], work: list[T], meanwhile: Callable[[], list[str]]) -> list[str]:
    """Look at all pieces, on several cores where that pays.

    Args:
        look: looks at some pieces and returns what it has to say; it changes nothing.
        work: the pieces.
        meanwhile: what this process does besides; it may start threads.

    Returns:
        What ``look`` and ``meanwhile`` said, in the order of the pieces' parts.
    """
    count = min(cores(), 16, len(work) // _WORTH + 1) if _alone() else 1
    parts = [work[number::count] for number in range(count)]
    children = [(part, *_start(look, part)) for part in parts[1:]]
    found: list[str] | None = None
    try:
        found = look(parts[0]) + meanwhile()
    finally:
        answers = [(part, _answer(*child)) for part, *child in children]
    for part, answer in answers:
        found += look(part) if answer is None else answer  # it was killed, or could not be made
    return found


def _alone() -> bool:
    """Return whether this process has one thread and can be copied."""
    try:
        return hasattr(os, "fork") and sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _start(look: Callable[[list[T]], list[str]], part: list[T]) -> tuple[int, int]:
    """Return the process that looks at a part, and where its answer can be read; -1 where none can be made."""
    try:
        reading, writing = os.pipe()
    except OSError:
        return -1, -1
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child == 0:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):  # a service's handlers are not this child's
                signal.signal(number, signal.SIG_DFL)
            with open(writing, "wb") as answer:
                answer.write(json.dumps(look(part)).encode())
        finally:
            os._exit(0)  # whatever happened: an answer that is cut off is none
    os.close(writing)
    return child, reading


def _answer(child: int, reading: int) -> list[str] | None:
    if reading < 0:
        return None
    with open(reading, "rb") as answer:
        data = answer.read()
    if child > 0:
        with contextlib.suppress(ChildProcessError):  # somebody waits for every child of this process
            os.waitpid(child, 0)
    try:
        found: list[str] = json.loads(data)
    except ValueError:
        return None
    return found
