"""``tcache.autotune``, the decorator, and the compact config space it takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import Config
from tcache.autotuner import Autotuner
from tcache.keys.bucket import make_bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ON_UNTUNED", "autotune", "expand"]

ON_UNTUNED = ("tune", "nearest", "default", "error")

_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def expand(space: Mapping[str, Sequence[Any]], where: Callable[[dict[str, Any]], bool] | None = None) -> list[Any]:
    """Return the ``triton.Config`` list of a compact space.

    Args:
        space: parameter -> the values it may have; ``num_warps``, ``num_stages``, ``num_ctas`` and ``maxnreg`` are
            launch options, all others meta-parameters.
        where: keeps a combination when it returns true for ``{parameter: value}``.

    Raises:
        ValueError: a parameter has no value, or ``where`` keeps nothing.
    """
    for name, values in space.items():
        if isinstance(values, str) or not list(values):
            raise ValueError(f"config space: {name} needs a list of values, found {values!r}")
    found = []
    for point in itertools.product(*space.values()):
        row = dict(zip(space, point, strict=True))
        if where is None or where(dict(row)):
            options = {name: row.pop(name) for name in _LAUNCH_OPTIONS if name in row}
            found.append(Config(row, **options))
    if not found:
        raise ValueError("config space: `where` keeps no combination")
    return found


def autotune(
    configs: list[Any] | Mapping[str, Sequence[Any]],
    key: list[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: list[str] | None = None,
    restore_value: list[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,  # noqa: ARG001 - upstream's parameter
    *,
    where: Callable[[dict[str, Any]], bool] | None = None,
    buckets: Mapping[str, Any] | None = None,
    on_untuned: str | None = None,
) -> Callable[[Any], Autotuner]:
    """Decorate a ``triton.jit`` function: ``triton.autotune`` with the winners in a store.

    Args:
        configs: the ``triton.Config`` objects to choose from, or a compact space
            ``{"BLOCK_M": [64, 128], "num_warps": [4, 8]}``.
        key: names of the arguments whose values the winner depends on; tensor dtypes always count.
        prune_configs_by: ``perf_model``, ``top_k``, ``early_config_prune``, as upstream.
        reset_to_zero: arguments set to zero before each benchmarked launch.
        restore_value: arguments restored after each benchmarked launch.
        pre_hook, post_hook: called around each benchmarked launch, as upstream.
        warmup, rep: milliseconds of warm-up and measurement (deprecated upstream).
        use_cuda_graph: benchmark with a CUDA graph (deprecated upstream).
        do_bench: ``do_bench(call, quantiles=…)`` returning milliseconds for each quantile; without one, tcache
            benchmarks in passes and repeats only configs that may still win.
        cache_results: accepted for compatibility; the store makes it unnecessary.
        where: keeps a combination of a compact space.
        buckets: key argument -> ``"pow2"``, ``"log2"``, ``"multiple:16"``, a list of edges, or a function; sizes of
            one bucket share a winner. See :func:`tcache.keys.bucket.make_bucket`.
        on_untuned: what a shape without a winner does outside frozen mode: ``tune``, ``nearest`` (the nearest tuned
            shape's config, else the first), ``default`` (the first config) or ``error``. Left out: ``tune`` in mode
            tune, ``nearest`` in mode lookup.

    Returns:
        A decorator that makes an :class:`Autotuner`.

    Raises:
        ValueError: a bucket, ``on_untuned`` or the space is not what it should be; upstream's checks of the names in
            ``key`` (Triton 3.9).
    """
    if on_untuned is not None and on_untuned not in ON_UNTUNED:
        raise ValueError(f"on_untuned={on_untuned!r}: expected one of {', '.join(ON_UNTUNED)}")
    for name, spec in (buckets or {}).items():
        make_bucket(spec)
        if name not in key:
            raise ValueError(f"buckets: {name!r} is not in key={key}")
    if where is not None and not isinstance(configs, Mapping):
        raise ValueError("where: goes with a compact config space, not with a list of configs")
    listed = expand(configs, where) if isinstance(configs, Mapping) else configs

    def decorator(fn: Any) -> Autotuner:
        tuner = Autotuner(
            fn,
            fn.arg_names,
            listed,
            key,
            reset_to_zero,
            restore_value,
            pre_hook=pre_hook,
            post_hook=post_hook,
            prune_configs_by=prune_configs_by,
            warmup=warmup,
            rep=rep,
            use_cuda_graph=use_cuda_graph,
            do_bench=do_bench,
        )
        tuner.cache_results = False  # upstream's records know no GPU name: they are not consulted, whoever asks
        if buckets:
            tuner.buckets = dict(buckets)
        tuner.on_untuned = on_untuned
        return tuner

    return decorator
