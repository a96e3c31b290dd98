"""What a bench says: a row for each case, with the standing under the machine's measured peaks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcache.bench.cases import Measured, Timed
    from tcache.bench.peaks import Peaks
    from tcache.bench.roofline import Quantiles

__all__ = ["peaks_row", "row_of"]


def _times(timed: Timed) -> dict[str, Any]:
    if timed.error is not None:
        return {"error": timed.error}
    ms: Quantiles | None = timed.ms
    assert ms is not None  # there is an error, or there are times
    return {
        "median_ms": ms.median, "p20_ms": ms.p20, "p80_ms": ms.p80, "p95_ms": ms.p95, "samples": ms.count,
        "host_ms": timed.host_ms, "gpu_only": timed.gpu_only,
    }  # fmt: skip


def row_of(found: Measured, peaks: Peaks) -> dict[str, Any]:
    """Return a case's row for ``--json``: everything known of it.

    Args:
        found: what was measured.
        peaks: of the machine, from the same run.
    """
    agreement = found.agreement
    row: dict[str, Any] = {
        "case": found.case, "where": found.where, "kernel": found.kernel, "shape": found.shape, "dtype": found.dtype,
        "error": found.error,
        "largest_error": None if agreement is None else agreement.largest_error, "compared_with": found.against,
        "times": {name: _times(timed) for name, timed in found.times.items()}, "torch_is": found.torch_is,
        "flops": found.flops, "bytes": found.moved, "launches": found.launches,
    }  # fmt: skip
    own = found.times.get("tcache")
    if own is None or own.ms is None:
        return row
    peak, roof = peaks.roof(found.peak)
    standing = asdict(roof.standing(own.ms.median, found.flops, found.moved))
    for name, other in found.times.items():
        if name != "tcache":
            row[f"speedup_over_{name}"] = other.ms.median / own.ms.median if other.ms and own.ms.median else None
    return {**row, **standing, "peak": peak, "peak_tflops": roof.tflops, "peak_gbps": roof.gbps, "ridge": roof.ridge}


def peaks_row(begin: Peaks, end: Peaks | None) -> dict[str, Any]:
    """Return the measured peaks: at the beginning, at the end, and the higher of each, which percentages refer to."""
    return {
        "begin": asdict(begin),
        "end": None if end is None else asdict(end),
        "used": asdict(begin if end is None else begin.highest(end)),
    }
