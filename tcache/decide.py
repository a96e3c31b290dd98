"""Which config a launch uses: pure decisions over an entry, the configs that exist now, and their identities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tcache.keys.config import space_identity

if TYPE_CHECKING:
    from tcache.store import Entry

__all__ = ["Best", "Missing", "decide"]


@dataclass(frozen=True)
class Best:
    """The store knows the winner.

    Attributes:
        config: its config key.
        aged: the Triton release it was tuned under, when that is another one; still valid.
    """

    config: str
    aged: str | None = None


@dataclass(frozen=True)
class Missing:
    """The store does not know the winner.

    Attributes:
        reason: why, in words.
        untried: config keys without a result for the present source, in the order given.
        best: the best of those that have a result, None without any.
    """

    reason: str
    untried: tuple[str, ...]
    best: str | None = None


def decide(
    entry: Entry | None, configs: list[str], pruned: list[str] | None, source: str, triton: str
) -> Best | Missing:
    """Decide from what is stored for a shape.

    Args:
        entry: what the store has.
        configs: keys of all configs of the decorator.
        pruned: keys of those left after pruning for this launch; None when pruning was not run. Asked for (by calling
            again) only when the config space is not the one the entry was completed with.
        source: the kernel's source identity now.
        triton: the Triton release now.
    """
    wanted = tuple(configs if pruned is None else pruned)
    if entry is None:
        return Missing("never tuned", wanted)
    if entry.source != source:
        return Missing("stale: the kernel's source changed since it was tuned", wanted)
    known = {key: entry.timings[key] for key in wanted if key in entry.timings}
    timed = {key: timing.quantiles for key, timing in known.items() if timing.median is not None}
    best = min(timed, key=lambda key: timed[key]) if timed else None  # of equals the first listed, as upstream
    if entry.config in timed and best is not None:
        tied = entry.config in entry.tied and best in entry.tied
        if tied or timed[entry.config] == timed[best]:
            best = entry.config  # chosen among configs that the benchmark could not tell apart
    aged = entry.triton if entry.triton != triton else None
    if entry.space == space_identity(configs) and best is not None:
        return Best(best, aged)
    untried = tuple(key for key in wanted if key not in entry.timings)
    if untried or best is None:
        if not untried:
            return Missing("every config failed when it was tuned", (), None)
        return Missing("some configs were never tried", untried, best)
    return Best(best, aged)
