"""Which configs are still in the race: pure decisions over samples.

Every config gets a few launches; only those that may still win get more, until the order is settled or the
budget is spent. Two configs whose medians differ by less than what the samples can tell are indistinguishable.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from tcache.store import Timing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PASSES", "contenders", "indistinguishable", "summary"]

PASSES = (4, 8, 16, 32, 64)
"""Launches of each contender in successive passes."""

_MARGINS = (0.30, 0.12, 0.06, 0.03, 0.0)
"""How far behind the best median a contender may be after each pass."""


def quantile(ordered: Sequence[float], at: float) -> float:
    """Return a quantile of sorted values by linear interpolation."""
    place = at * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(samples: Sequence[float]) -> Timing:
    """Return median, 20th and 80th percentile in the samples' unit, and their number."""
    ordered = sorted(samples)
    return Timing(quantile(ordered, 0.5), quantile(ordered, 0.2), quantile(ordered, 0.8), len(ordered))


def _error(*groups: Sequence[float]) -> float:
    """Return the standard error of a difference of medians.

    Of one median it is 1.2533 sigma / sqrt(n) for a normal distribution, whose central 60% spans 1.6832 sigma.
    """
    found = []
    for samples in groups:
        ordered = sorted(samples)
        sigma = (quantile(ordered, 0.8) - quantile(ordered, 0.2)) / 1.6832
        found.append(1.2533 * sigma / math.sqrt(len(samples)))
    return math.hypot(*found)


def contenders(samples: Mapping[str, Sequence[float]], done: int) -> list[str]:
    """Return the configs that may still be the best, best first.

    Args:
        samples: config key -> milliseconds of each launch so far.
        done: how many passes were made.
    """
    medians = {key: statistics.median(values) for key, values in samples.items()}
    best = min(medians, key=lambda key: (medians[key], key))
    margin = _MARGINS[min(done, len(_MARGINS)) - 1]
    limit = medians[best] * (1 + margin)
    # the 20th percentile of a candidate: one late launch among few must not cost it the race
    live = [
        key
        for key, values in samples.items()
        if quantile(sorted(values), 0.2) <= limit or medians[key] - medians[best] <= 2 * _error(values, samples[best])
    ]
    return sorted(live, key=lambda key: (medians[key], key))


def indistinguishable(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the configs that the samples cannot tell from the best, best first; at least the best itself.

    A difference below 0.3% or below one and a half standard errors does not count.
    """
    medians = {key: statistics.median(values) for key, values in samples.items()}
    best = min(medians, key=lambda key: (medians[key], key))
    close = [
        key for key in medians
        if medians[key] - medians[best]
        <= max(0.003 * medians[best], min(1.5 * _error(samples[key], samples[best]), 0.05 * medians[best]))
    ]  # fmt: skip
    return sorted(close, key=lambda key: (medians[key], key))
