"""What Triton prints and tells when a shape's winner is chosen."""

from __future__ import annotations

from typing import Any

from triton import knobs

from tcache._triton.kernels import jit_of

__all__ = ["SINGLE_IS_BENCHMARKED", "announce"]

SINGLE_IS_BENCHMARKED = not hasattr(knobs.autotuning, "listener")
"""Whether upstream benchmarks the one config that pruning left. The release that has the listener (3.8) does not."""


def announce(autotuner: Any, key: tuple[Any, ...], config: Any, seconds: float | None) -> None:
    """Tell ``knobs.autotuning.listener`` and, under ``TRITON_PRINT_AUTOTUNING``, print; in upstream's order and words.

    Args:
        autotuner: the autotuner, its ``configs_timings`` set.
        key: upstream's key of the launch.
        config: the winner.
        seconds: how long benchmarking took; None when the winner was read from a store, as upstream reads it from the
            results that ``cache_results`` keeps.

    Source: ``Autotuner.run`` in ``triton/runtime/autotuner.py``.
    """
    listener = getattr(knobs.autotuning, "listener", None)
    if listener is not None:
        listener(
            fn=jit_of(autotuner),
            key=key,
            best_config=config,
            configs_timings=autotuner.configs_timings,
            duration=seconds,
            cache_hit=seconds is None,
        )
    if knobs.autotuning.print and seconds is not None:
        print(  # noqa: T201 - upstream's words, at the user's request to upstream
            f"Triton autotuning for function {autotuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {seconds:.2f}s,\nbest config selected: {config};"
        )
