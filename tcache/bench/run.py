"""One run: peaks at the beginning, cases, peaks at the end. What was measured is kept, whatever comes after."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

from tcache.bench.cases import Measured, Options, dtype_of, measure_case
from tcache.bench.peaks import Peaks, measure, peak_of
from tcache.bench.report import peaks_row, row_of
from tcache.errors import GPUMissing, TcacheError
from tcache.manifest import CallItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tcache.bench.machine import Machine
    from tcache.manifest import Case

__all__ = ["Run", "left_out", "select"]


def select(cases: Sequence[Case], gpu: str, pattern: str | None = None) -> list[Case]:
    """Return the cases to bench: of ``call:`` items, for this GPU, whose text has the pattern somewhere.

    Args:
        cases: all cases.
        gpu: the GPU's name.
        pattern: text or glob, such as ``softmax`` or ``matmul M=16 *``; a blank after a value ends it, also the last.
    """
    return [case for case in _matching(cases, gpu, pattern) if isinstance(case.item, CallItem)]


def left_out(cases: Sequence[Case], gpu: str, pattern: str | None = None) -> int:
    """Return how many of these are of other items than ``call:``, which there is nothing to compare with."""
    return sum(not isinstance(case.item, CallItem) for case in _matching(cases, gpu, pattern))


def _matching(cases: Sequence[Case], gpu: str, pattern: str | None) -> list[Case]:
    here = [case for case in cases if case.runs_on(gpu)]
    if pattern is None:
        return here
    return [case for case in here if fnmatch.fnmatchcase(f"{case} ", f"*{pattern}*")]


class Run:
    """The bench of some cases on one machine.

    Args:
        cases: the cases that will be measured: their dtypes say which matmul peaks are.
        machine: the machine.
        options: what to measure.

    Attributes:
        found: what was measured, in order.
        stopped: why no more cases can be measured; None while they can.
    """

    def __init__(self, cases: Sequence[Case], machine: Machine, options: Options) -> None:
        self._machine, self._options = machine, options
        self._names = list(dict.fromkeys(peak_of(dtype_of(case)) for case in cases))
        self.begin = self._peaks()
        self.end: Peaks | None = None
        self.found: list[Measured] = []
        self.stopped: str | None = None

    def _peaks(self) -> Peaks:
        machine = self._machine
        return measure(self._names, machine.clock, self._options.plan, machine.device, machine.shrink)

    def add(self, case: Case) -> Measured:
        """Measure a case. After a fault of the GPU nothing else is measured."""
        if self.stopped is not None:
            found = Measured.of(case)
            found.error = "not run: the GPU faulted before"
        else:
            try:
                found = measure_case(case, self._machine, self._options)
            except GPUMissing as error:
                self.stopped = error.message
                found = Measured.of(case)
                found.error = error.message.removeprefix(f"{case}: ")
        self.found.append(found)
        return found

    def finish(self) -> None:
        """Measure the peaks again."""
        if self.stopped is None:
            try:
                self.end = self._peaks()
            except (RuntimeError, TcacheError) as error:  # rows are worth more than a second look at the peaks
                self.stopped = f"the peaks could not be measured again: {next(iter(str(error).splitlines()), '')}"

    def document(self) -> dict[str, Any]:
        """Return everything known so far: machine, peaks, a row for each case."""
        used = self.begin if self.end is None else self.begin.highest(self.end)
        return {
            "machine": self._machine.facts(),
            "peaks": peaks_row(self.begin, self.end),
            "rows": [row_of(found, used) for found in self.found],
        }
