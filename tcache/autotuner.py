"""``tcache.autotune``: ``triton.autotune`` whose winners live in a store.

A winner that the store knows is put where upstream's ``Autotuner`` keeps the winners of this process, and upstream's
own ``run`` does the rest. So a hit launches through exactly the code, and exactly the hooks, of ``triton.autotune``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tcache._triton import release
from tcache._triton.announce import SINGLE_IS_BENCHMARKED, announce
from tcache._triton.kernels import Autotuner as UpstreamAutotuner
from tcache._triton.kernels import Config, OutOfResources, PTXASError, interpreting, is_nested
from tcache.active import active
from tcache.counters import count
from tcache.decide import Best
from tcache.errors import NothingLeft, UnsupportedValue
from tcache.explain import explain_config
from tcache.keys.bucket import make_bucket
from tcache.keys.config import config_key
from tcache.lookup import Lookup, current_gpu, kernel_of, lookup, named_arguments
from tcache.tuning import tune

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tcache.active import Active
    from tcache.keys.shape import ShapeKey
    from tcache.tuning import Tuned

__all__ = ["ON_UNTUNED", "Autotuner", "autotune", "expand"]

ON_UNTUNED = ("tune", "nearest", "default", "error")


class Autotuner(UpstreamAutotuner):  # type: ignore[misc]  # upstream is untyped
    """Upstream's ``Autotuner``, reading winners from the store and writing them there.

    Also an instance of ``triton.runtime.autotuner.Autotuner``, which is how torch.compile recognises it.

    Attributes:
        buckets: key argument -> bucket, see :func:`autotune`.
        on_untuned: what a shape without a winner does, see :func:`autotune`; None leaves it to the mode.
    """

    # class attributes, so that an adopted upstream autotuner has them too
    buckets: Mapping[str, Any] | None = None
    on_untuned: str | None = None
    _shape: ShapeKey | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the winner for these arguments; look it up, or tune, the first time.

        Raises:
            CacheMiss: no winner is known, in frozen mode, with ``on_untuned="error"``, or while a CUDA graph is being
                captured.
        """
        if len(self.configs) > 1:
            named = named_arguments(self, args, kwargs)
            # upstream's own key, so that upstream's run() finds what is put into its cache
            key = tuple(
                [named[name] for name in self.keys if name in named]
                + [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
            )
            if key not in self.cache:
                configs = self._select(key, args, kwargs)
                self._tell(configs)
                for config in configs[:-1]:  # nearest shapes' winners: one that does not fit falls to the next
                    self.cache[key] = config
                    try:
                        return super().run(*args, **kwargs)
                    except (OutOfResources, PTXASError):
                        del self.cache[key]
                if configs:
                    self.cache[key] = configs[-1]
                    result = super().run(*args, **kwargs)
                    if self.best_config is not configs[-1]:  # an adopted subclass with a will of its own
                        kind = f"{type(self).__module__}.{type(self).__name__}"
                        active().notice(f"tcache: {kind} overrules the store for {kernel_of(self).ref}")
                    return result
        return super().run(*args, **kwargs)

    def _select(self, upstream_key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the configs to try for a launch seen for the first time; none leaves it to upstream."""
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        self._shape = None
        if interpreting():
            return self._pruned(kwargs)[:1]  # nothing to measure: kernels run as Python
        if is_nested(self):
            return []
        settings = active()
        gpu = current_gpu()
        kernel = kernel_of(self)
        try:
            found = lookup(self, args, kwargs, gpu, settings.stores, retune=settings.retune, since=settings.since)
        except UnsupportedValue as error:
            action = self._untuned(settings)
            if action == "error":
                raise
            if action == "tune":
                settings.notice(f"tcache: {kernel.ref} is tuned in memory only: {error.message}")
                return []
            count("default")
            settings.notice(f"tcache: {kernel.ref} uses the first config: {error.message}")
            return self._pruned(kwargs)[:1]
        self._shape = found.shape
        if isinstance(found.verdict, Best):
            config = found.configs[found.verdict.config]
            self._hit(found.verdict, settings)
            self.configs_timings = {
                known: found.timings[key].quantiles for key, known in found.configs.items() if key in found.timings
            }
            announce(self, upstream_key, config, None)
            return [config]
        if found.verdict.reason.startswith("stale"):
            count("stale")
        action, pruned = self._untuned(settings), self._pruned(kwargs)
        if len(pruned) == 1 and not (action == "tune" and SINGLE_IS_BENCHMARKED):
            return pruned  # nothing to choose, so nothing to tune
        if action == "tune":
            tuned = tune(self, found.shape, gpu, args, kwargs, settings, pruned)
            return [self._tuned(upstream_key, tuned, pruned, kwargs)]
        if action == "error":
            raise self._miss(found, gpu.name, settings)
        what = f"tcache: {kernel.ref} [{found.shape}] has no winner on {gpu.name} ({found.verdict.reason})"
        near = [(shape, found.configs[key]) for shape, key in found.near if found.configs[key] in pruned]
        if action == "nearest" and near:
            count("nearest")
            settings.notice(f"{what}: uses [{near[0][0]}]'s config")
            return [*dict.fromkeys(config for _, config in near), pruned[0]]
        count("default")
        settings.notice(f"{what}: uses the first config")
        return pruned[:1]

    def _hit(self, verdict: Best, settings: Active) -> None:
        count("hits")
        if verdict.aged:
            count("aged")
            settings.notice(
                f"tcache: {kernel_of(self).ref} was tuned under Triton {verdict.aged}, runs under {release}"
            )

    def _tuned(self, upstream_key: tuple[Any, ...], tuned: Tuned, pruned: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do what upstream does between benchmarking and the launch, and return the winner."""
        by_key = {config_key(config): config for config in [*self.configs, *pruned]}
        config = by_key[tuned.config]
        if tuned.seconds is not None:  # else another process did it, and nothing here was touched
            self.bench_time = tuned.seconds
            # what accumulates starts from zero
            self.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()}, reset_only=True)
        self.configs_timings = {by_key[key]: times for key, times in tuned.times.items()}
        announce(self, upstream_key, config, tuned.seconds)
        return config

    def _pruned(self, kwargs: dict[str, Any]) -> list[Any]:
        """Return the configs that pruning leaves for a launch.

        Raises:
            NothingLeft: none; up to Triton 3.8 a fractional ``top_k`` can do that.
        """
        pruned = list(self.prune_configs(kwargs))
        if not pruned:
            raise NothingLeft(
                f"{kernel_of(self).ref}: pruning left no config of {len(self.configs)}",
                f"top_k={self.configs_top_k} rounds down to none: use a larger fraction, or a number of configs",
            )
        return pruned

    def _tell(self, configs: list[Any]) -> None:
        """Tell whoever listens, see :class:`tcache.active.Active`."""
        listener = active().on_select if not interpreting() else None
        if listener is not None and configs and self._shape is not None:
            first = config_key(self.configs[0])
            listener(current_gpu().name, kernel_of(self), self._shape, config_key(configs[0]), first)

    def _untuned(self, settings: Active) -> str:
        """Decide what a shape without a winner does."""
        if settings.mode == "frozen":
            return "error"
        wanted = self.on_untuned or ("nearest" if settings.mode == "lookup" else "tune")
        if wanted == "tune" and (settings.mode == "lookup" or _capturing()):
            return "nearest" if settings.mode == "lookup" else "error"
        return wanted

    def _miss(self, found: Lookup, gpu: str, settings: Active) -> Exception:
        count("misses")
        reason = found.verdict.reason if not isinstance(found.verdict, Best) else ""
        if settings.mode == "tune" and self.on_untuned != "error":
            reason += "; nothing is benchmarked while a CUDA graph is being captured"
        near = f"{found.near[0][0]} -> {found.near[0][1]}" if found.near else None
        return explain_config(kernel_of(self).ref, gpu, str(found.shape), settings, reason=reason, near=near)


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


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
