"""``tcache.autotune``: ``triton.autotune`` whose winners live in a store.

A winner that the store knows is put where upstream's ``Autotuner`` keeps the winners of this process, and upstream's
own ``run`` does the rest. So a hit launches through exactly the code, and exactly the hooks, of ``triton.autotune``.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcache._triton import release
from tcache._triton.driver import current_properties, current_target
from tcache._triton.kernels import Autotuner as UpstreamAutotuner
from tcache._triton.kernels import OutOfResources, PTXASError, interpreting, jit_of
from tcache.active import active
from tcache.decide import Best, Missing, decide
from tcache.errors import TcacheError, UnsupportedValue
from tcache.explain import explain_config
from tcache.keys.config import config_key, space_identity
from tcache.keys.gpu import GPU, catalogue
from tcache.keys.shape import ShapeKey, nearest
from tcache.keys.source import source_identity
from tcache.store import Entry, Kernel, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache.active import Active
    from tcache.store import Store

__all__ = ["Autotuner", "Lookup", "autotune", "current_gpu", "lookup"]


@dataclass(frozen=True)
class Lookup:
    """What the stores know about one launch.

    Attributes:
        shape: its shape key.
        verdict: the winner, or why there is none.
        near: the nearest tuned shape and its winner's config key, when there is no winner and one is comparable.
    """

    shape: ShapeKey
    verdict: Best | Missing
    near: tuple[ShapeKey, str] | None = None


def current_gpu() -> GPU:
    """Return the identity of the current device, under the name ``TCACHE_GPU_NAME`` gives it if that is set."""
    backend, arch, warp_size = current_target()
    properties = current_properties()
    alias = os.environ.get("TCACHE_GPU_NAME")
    if alias:
        name = alias
    else:
        import torch

        name = torch.cuda.get_device_name()
    count = int(properties.get("multiprocessor_count", 0))
    if name in catalogue() and not count:
        count = catalogue()[name].multiprocessors
    return GPU(name, backend, arch, warp_size, count, int(properties.get("max_shared_mem", 0)))


def kernel_of(autotuner: Any) -> Kernel:
    """Return the store's identity of the kernel under an autotuner."""
    function = jit_of(autotuner)
    return Kernel(function.fn.__module__, function.fn.__qualname__, tuple(autotuner.keys))


def named_arguments(autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a launch's arguments by name, in the order upstream puts them into its key."""
    named = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if name in autotuner.arg_names}


def lookup(
    autotuner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gpu: GPU,
    stores: tuple[Store, ...],
    *,
    triton: str = release,
) -> Lookup:
    """Ask the stores for a launch's winner; benchmarks nothing and writes nothing.

    Args:
        autotuner: an ``Autotuner`` of tcache or of upstream.
        args: positional arguments of the launch.
        kwargs: keyword arguments of the launch, without ``grid``.
        gpu: on which GPU it would run.
        stores: where to look, in order.
        triton: the Triton release.

    Raises:
        UnsupportedValue: a key argument has no canonical text.
        StoreError: a record is corrupt.
    """
    arguments = named_arguments(autotuner, args, kwargs)
    shape = ShapeKey.of(autotuner.keys, arguments)
    kernel, source = kernel_of(autotuner), source_identity(jit_of(autotuner))
    keys = [config_key(config) for config in autotuner.configs]
    first: Missing | None = None
    for store in stores:
        entry = store.get(gpu, kernel, shape, source)
        verdict = decide(entry, keys, None, source, triton)
        if isinstance(verdict, Missing) and entry is not None and verdict.untried:
            autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
            pruned = [config_key(config) for config in autotuner.prune_configs(kwargs)]
            verdict = decide(entry, keys, pruned, source, triton)
        if isinstance(verdict, Best):
            return Lookup(shape, verdict)
        if first is None or (first.reason == "never tuned" and verdict.reason != "never tuned"):
            first = verdict
    missing = first if first is not None else Missing("never tuned", tuple(keys))
    if missing.best is not None:
        return Lookup(shape, missing, (shape, missing.best))
    return Lookup(shape, missing, _near(shape, gpu, kernel, source, keys, stores, triton))


def _near(
    shape: ShapeKey, gpu: GPU, kernel: Kernel, source: str, keys: list[str], stores: tuple[Store, ...], triton: str
) -> tuple[ShapeKey, str] | None:
    winners: dict[ShapeKey, str] = {}
    for store in stores:
        for candidate, entry in store.shapes(gpu, kernel, source).items():
            verdict = decide(entry, keys, None, source, triton)
            best = verdict.config if isinstance(verdict, Best) else verdict.best
            if best is not None:
                winners.setdefault(candidate, best)
    found = nearest(shape, list(winners))
    return (found, winners[found]) if found is not None else None


class Autotuner(UpstreamAutotuner):  # type: ignore[misc]  # upstream is untyped
    """Upstream's ``Autotuner``, reading winners from the store and writing them there.

    Also an instance of ``triton.runtime.autotuner.Autotuner``, which is how torch.compile recognises it.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the winner for these arguments; look it up, or tune, the first time.

        Raises:
            CacheMiss: no winner is known, in frozen mode or while a CUDA graph is being captured.
        """
        if len(self.configs) > 1:
            named = named_arguments(self, args, kwargs)
            # upstream's own key, so that upstream's run() finds what is put into its cache
            key = tuple(
                [named[name] for name in self.keys if name in named]
                + [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
            )
            if key not in self.cache:
                config = self._select(args, kwargs)
                if config is not None:
                    self.cache[key] = config
        return super().run(*args, **kwargs)

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the config for a launch seen for the first time; None leaves it to upstream."""
        launch = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        if interpreting():
            return self.prune_configs(launch)[0]  # nothing to measure: kernels run as Python
        settings = active()
        gpu = current_gpu()
        by_key = {config_key(config): config for config in self.configs}
        try:
            found = lookup(self, args, launch, gpu, settings.stores)
        except UnsupportedValue as error:
            if settings.mode == "frozen":
                raise
            settings.notice(f"tcache: {kernel_of(self).ref} is tuned in memory only: {error.message}")
            return None
        kernel = kernel_of(self)
        if isinstance(found.verdict, Best):
            if found.verdict.aged:
                settings.notice(
                    f"tcache: {kernel.ref} was tuned under Triton {found.verdict.aged} and runs under {release}"
                )
            return by_key[found.verdict.config]
        if settings.mode == "lookup":
            if found.near is not None:
                settings.notice(
                    f"tcache: {kernel.ref} [{found.shape}] is not tuned on {gpu.name}: uses [{found.near[0]}]'s config"
                )
                return by_key[found.near[1]]
            settings.notice(f"tcache: {kernel.ref} [{found.shape}] is not tuned on {gpu.name}: uses the first config")
            return self.prune_configs(launch)[0]
        if settings.mode == "frozen" or _capturing():
            reason = found.verdict.reason
            if settings.mode != "frozen":
                reason += "; nothing is benchmarked while a CUDA graph is being captured"
            near = f"{found.near[0]} -> {found.near[1]}" if found.near else None
            raise explain_config(kernel.ref, gpu.name, str(found.shape), settings, reason=reason, near=near)
        return self._tune(found.shape, gpu, args, launch, kwargs, settings)

    def _tune(
        self,
        shape: ShapeKey,
        gpu: GPU,
        args: tuple[Any, ...],
        launch: dict[str, Any],
        kwargs: dict[str, Any],
        settings: Active,
    ) -> Any:
        """Benchmark what was never tried, keep every result at once, and return the winner."""
        kernel, source = kernel_of(self), source_identity(jit_of(self))
        pruned = {config_key(config): config for config in self.prune_configs(launch)}
        keys = [config_key(config) for config in self.configs]
        store = settings.writable
        if store is None:
            settings.notice("tcache: no writable store: results are kept in memory only; set TCACHE_STORE")
            results = {key: self._measure(config, args, kwargs) for key, config in pruned.items()}
            return self._after_tuning(pruned[_winner(kernel, shape, results)], kwargs)
        path = store.path(gpu, kernel)
        with store.lock(path, ".tuning"):
            entry = store.get(gpu, kernel, shape, source)
            verdict = decide(entry, keys, list(pruned), source, release)
            if isinstance(verdict, Best):  # another process tuned it while this one waited
                return pruned[verdict.config]
            for number, key in enumerate(verdict.untried):
                timing = self._measure(pruned[key], args, kwargs)
                done = number + 1 == len(verdict.untried)
                change = _adding(shape, key, timing, source, space_identity(keys) if done else None)
                entry = store.update(gpu, kernel, shape, change)
        timings = entry.timings if entry is not None else {}
        winner = _winner(kernel, shape, {key: timings[key] for key in pruned if key in timings})
        return self._after_tuning(pruned[winner], kwargs)

    def _after_tuning(self, config: Any, kwargs: dict[str, Any]) -> Any:
        """Reset what must start from zero, as upstream does between benchmarking and the launch."""
        self.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()}, reset_only=True)
        return config

    def _measure(self, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timing:
        """Benchmark one config with upstream's ``_bench``, which runs the hooks; a failure is a result too."""
        failures: list[str] = []
        bench = self.do_bench

        def noting(call: Callable[[], Any], quantiles: Any) -> Any:
            try:
                return bench(call, quantiles=quantiles)
            except (OutOfResources, PTXASError) as error:
                failures.append(str(error).splitlines()[0])
                raise
            except Exception as error:
                failures.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                raise

        self.__dict__["do_bench"] = noting
        try:
            found = self._bench(*args, config=config, **kwargs)
        finally:
            self.__dict__["do_bench"] = bench
        if failures or not all(value < float("inf") for value in found):
            return Timing(failed=failures[0] if failures else "every timing was infinite")
        return Timing(median=float(found[0]), p20=float(found[1]), p80=float(found[2]))


def _winner(kernel: Kernel, shape: ShapeKey, timings: dict[str, Timing]) -> str:
    timed = {key: timing.median for key, timing in timings.items() if timing.median is not None}
    if not timed:
        reasons = "; ".join(f"[{key}] {timing.failed}" for key, timing in list(timings.items())[:3])
        raise TcacheError(
            f"{kernel.ref} [{shape}]: every config failed: {reasons}", "add a config that fits, then tune again"
        )
    return min(timed, key=lambda key: (timed[key], key))


def _adding(
    shape: ShapeKey, key: str, timing: Timing, source: str, space: str | None
) -> Callable[[Entry | None], Entry]:
    """Return the change that adds one result to an entry; results of another source are dropped."""

    def change(entry: Entry | None) -> Entry:
        kept = entry.timings if entry is not None and entry.source == source else {}
        timings = {**kept, key: timing}
        timed = {name: row.median for name, row in timings.items() if row.median is not None}
        best = min(timed, key=lambda name: (timed[name], name)) if timed else None
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Entry(shape, best, timings, source, space, release, now, entry.extra if entry is not None else {})

    return change


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def autotune(
    configs: list[Any],
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
    cache_results: bool = False,
) -> Callable[[Any], Autotuner]:
    """Decorate a ``triton.jit`` function: ``triton.autotune`` with the winners in a store.

    Args:
        configs: the ``triton.Config`` objects to choose from.
        key: names of the arguments whose values the winner depends on; tensor dtypes always count.
        prune_configs_by: ``perf_model``, ``top_k``, ``early_config_prune``, as upstream.
        reset_to_zero: arguments set to zero before each benchmarked launch.
        restore_value: arguments restored after each benchmarked launch.
        pre_hook, post_hook: called around each benchmarked launch, as upstream.
        warmup, rep: milliseconds of warm-up and measurement (deprecated upstream).
        use_cuda_graph: benchmark with a CUDA graph (deprecated upstream).
        do_bench: ``do_bench(call, quantiles=…)`` returning milliseconds for each quantile.
        cache_results: accepted for compatibility; the store makes it unnecessary.

    Returns:
        A decorator that makes an :class:`Autotuner`.

    Raises:
        ValueError: upstream's checks of the names in ``key`` (Triton 3.9).
    """

    def decorator(fn: Any) -> Autotuner:
        return Autotuner(
            fn,
            fn.arg_names,
            configs,
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
            cache_results=cache_results,
        )

    return decorator
