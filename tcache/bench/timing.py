"""Time of the GPU alone: launches queued behind one that spins, L2 emptied before each, CUDA events around it.

Between its two events a launch takes the GPU's time and nothing else if the GPU comes to the first event only after the
host has queued the second. That is not assumed but looked up for every sample: right after the second event was
queued, the first must not have happened yet. Samples for which it had are told apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["QUICK", "Clock", "CudaClock", "Plan", "Sample", "Series", "interleave"]


@dataclass(frozen=True)
class Sample:
    """One timed call.

    Attributes:
        ms: milliseconds between the events around it.
        host_ms: milliseconds the host took to make it.
        ahead: whether all of it was queued before the GPU came to it, so that ``ms`` is the GPU's time alone.
    """

    ms: float
    host_ms: float
    ahead: bool


class Clock(Protocol):
    """What times calls."""

    def __call__(self, calls: Sequence[Callable[[], Any]]) -> list[Sample]:
        """Make calls one after the other, caches emptied before each, and return a sample of each."""


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        budget_ms: about how long the timed calls of one case shall take together, in milliseconds.
        fewest, most: bounds on the samples of each alternative; of what takes long there are fewer, three at least.
        batch: calls that are queued at once.
    """

    budget_ms: float = 600.0
    fewest: int = 20
    most: int = 200
    batch: int = 30

    def rounds(self, ms: float) -> int:
        """Return how often each alternative is timed, when all of them once take ``ms``."""
        wanted = int(self.budget_ms / max(ms, 1e-3))
        return max(3, min(self.fewest, 10 * wanted), min(self.most, wanted))


QUICK = Plan(budget_ms=100.0, fewest=8, most=40)


@dataclass
class Series:
    """The samples of one alternative."""

    samples: list[Sample]

    @property
    def ahead(self) -> bool:
        """Whether there are samples of the GPU's time alone, enough to keep to them."""
        return 2 * sum(sample.ahead for sample in self.samples) >= len(self.samples)

    def times(self) -> list[float]:
        """Return milliseconds: of the samples of the GPU's time alone, or of all where most are not."""
        return [sample.ms for sample in self.samples if sample.ahead or not self.ahead]


def interleave(
    alternatives: Sequence[Sequence[Callable[[], Any]]], clock: Clock, plan: Plan, rounds: int | None = None
) -> list[Series]:
    """Time alternatives in turns (A B C, A B C, …), so that clocks and temperature are the same for all.

    Args:
        alternatives: for each, calls that do the same on different inputs; they are gone through in turn.
        clock: times the calls.
        plan: how much to measure.
        rounds: how often each is timed; None finds it from a first round, which does not count.

    Returns:
        The samples of each alternative.
    """
    if rounds is None:
        once = clock([calls[0] for calls in alternatives])
        rounds = plan.rounds(sum(max(sample.ms, sample.host_ms) for sample in once))
    found: list[Series] = [Series([]) for _ in alternatives]
    step = max(1, plan.batch // len(alternatives))
    for first in range(0, rounds, step):
        numbers = range(first, min(first + step, rounds))
        samples = clock([calls[number % len(calls)] for number in numbers for calls in alternatives])
        for place, sample in enumerate(samples):
            found[place % len(alternatives)].samples.append(sample)
    return found


class CudaClock:
    """Times calls on the current GPU and stream.

    Args:
        l2_cache: bytes of the L2 cache. A buffer of at least four times as many, and of 256 MiB, is written and then
            read before each call: what is left in the cache is neither the call's data nor waiting to be written back,
            which would be charged to the call.
        cuda: events, ``synchronize`` and ``_sleep``; None is ``torch.cuda``.
        device: where the buffer is.
        least: the least bytes of the buffer.
    """

    def __init__(self, l2_cache: int, cuda: Any = None, device: str = "cuda", least: int = 256 << 20) -> None:
        import torch

        self._cuda: Any = torch.cuda if cuda is None else cuda
        size = max(4 * l2_cache, least)
        self._buffer = torch.empty(size // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self._read: Callable[[], Any] = lambda: torch.sum(self._buffer, 0, out=self._sum)
        self._lead_ms = 2.0

    def _clear(self) -> None:
        self._buffer.zero_()
        self._read()

    def __call__(self, calls: Sequence[Callable[[], Any]]) -> list[Sample]:
        """Queue calls behind a kernel that spins for as long as queueing took the last time, and wait for them."""
        pairs = [[self._cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        host, ahead = [], []
        self._cuda.synchronize()
        self._cuda._sleep(int(self._lead_ms * _CYCLES_PER_MS))
        first = time.perf_counter()
        for call, (start, end) in zip(calls, pairs, strict=True):
            self._clear()
            start.record()
            begin = time.perf_counter()
            call()
            host.append((time.perf_counter() - begin) * 1e3)
            end.record()
            ahead.append(not start.query())
        self._lead_ms = min(_LONGEST_LEAD_MS, max(2.0, 1.5e3 * (time.perf_counter() - first)))
        self._cuda.synchronize()
        return [
            Sample(float(start.elapsed_time(end)), spent, queued)
            for (start, end), spent, queued in zip(pairs, host, ahead, strict=True)
        ]


_CYCLES_PER_MS = 2_000_000
"""Of a GPU at 2 GHz; at lower clocks the lead is longer."""

_LONGEST_LEAD_MS = 50.0
