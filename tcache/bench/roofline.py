"""The arithmetic of a bench, over numbers alone: percentiles, rates, roofs, verdicts.

The roofline model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009. A launch can end no sooner than its bytes need at the memory's peak rate, nor than its
operations need at the processors'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tcache.contend import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Quantiles", "Roof", "Standing", "matmul_flops"]


@dataclass(frozen=True)
class Quantiles:
    """Percentiles of samples, in the samples' unit, and how many samples there are."""

    median: float
    p20: float
    p80: float
    p95: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Return the percentiles of samples, by linear interpolation.

        Raises:
            ValueError: there are none.
        """
        if not samples:
            raise ValueError("no samples")
        ordered = sorted(samples)
        p20, median, p80, p95 = (quantile(ordered, at) for at in (0.2, 0.5, 0.8, 0.95))
        return cls(median, p20, p80, p95, len(ordered))


@dataclass(frozen=True)
class Standing:
    """Where a launch stands under its roof.

    Attributes:
        gbps: achieved gigabytes per second; None where the bytes are not known, as all that follow from them.
        tflops: achieved 10**12 operations per second.
        intensity: operations per byte.
        bound_ms: the least time that the roof allows, in milliseconds.
        fraction: ``bound_ms`` over the time taken: 1.0 is the roof.
        percent_of_bandwidth, percent_of_flops: of the measured peaks.
        verdict: ``memory`` or ``compute``, whichever the bound comes from.
    """

    gbps: float | None = None
    tflops: float | None = None
    intensity: float | None = None
    bound_ms: float | None = None
    fraction: float | None = None
    percent_of_bandwidth: float | None = None
    percent_of_flops: float | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Roof:
    """Peaks of one machine for one dtype, as measured.

    Attributes:
        tflops: 10**12 operations per second; None where no matmul of the dtype could be measured.
        gbps: 10**9 bytes per second, read and written.
    """

    tflops: float | None
    gbps: float

    @property
    def ridge(self) -> float | None:
        """The intensity, in operations per byte, from which on a launch is bound by compute."""
        return None if self.tflops is None else self.tflops * 1e12 / (self.gbps * 1e9)

    def standing(self, ms: float, flops: int | None, moved: int | None) -> Standing:
        """Place a launch under the roof.

        Args:
            ms: the time it took, in milliseconds; of 0, less than events can tell, no rate follows.
            flops: its operations; None where no formula is known.
            moved: the least bytes that must move; None where no formula is known.
        """
        by_memory = None if moved is None else moved / (self.gbps * 1e9) * 1e3
        by_compute = None if flops is None or self.tflops is None else flops / (self.tflops * 1e12) * 1e3
        bounds = [bound for bound in (by_memory, by_compute) if bound is not None]
        bound = max(bounds, default=None)
        verdict = None
        if bound and by_memory is not None and (by_compute is not None or not flops):
            verdict = "compute" if by_compute is not None and by_compute > by_memory else "memory"
        gbps = None if moved is None or not ms else moved / (ms * 1e-3) / 1e9
        tflops = None if flops is None or not ms else flops / (ms * 1e-3) / 1e12
        return Standing(
            gbps=gbps,
            tflops=tflops,
            intensity=flops / moved if flops is not None and moved else None,
            bound_ms=bound,
            fraction=None if bound is None or not ms else bound / ms,
            percent_of_bandwidth=None if gbps is None else 100 * gbps / self.gbps,
            percent_of_flops=None if tflops is None or self.tflops is None else 100 * tflops / self.tflops,
            verdict=verdict,
        )


def matmul_flops(m: int, n: int, k: int) -> int:
    """Return the operations of an ``[m, k] @ [k, n]``: a multiplication and an addition for each product."""
    return 2 * m * n * k
