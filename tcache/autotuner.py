"""``tcache.autotune``: ``triton.autotune`` whose winners live in a store.

A winner that the store knows is put where upstream's ``Autotuner`` keeps the winners of this process, and upstream's
own ``run`` does the rest. Two ways around it lead to the same launch: a packed kernel is found through its bundle's
index (:mod:`tcache.prebaked`), and a launch that was seen before is answered by what was learnt from it
(:mod:`tcache._triton.launcher`). Both step aside for everything they do not know.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tcache._triton import release
from tcache._triton.announce import SINGLE_IS_BENCHMARKED, announce
from tcache._triton.kernels import Autotuner as UpstreamAutotuner
from tcache._triton.kernels import OutOfResources, PTXASError, interpreting, is_nested
from tcache._triton.launcher import Launcher, Winners, captured
from tcache.active import active
from tcache.counters import count, count_miss
from tcache.decide import Best
from tcache.errors import NothingLeft, UnsupportedValue
from tcache.explain import explain_config
from tcache.isolation import PerDevice, PerThread
from tcache.keys.bucket import make_bucket
from tcache.keys.config import config_key
from tcache.lookup import Lookup, current_gpu, kernel_of, lookup, named_arguments
from tcache.prebaked import prebaked
from tcache.startup import missed
from tcache.tuning import tune

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tcache.active import Active
    from tcache.keys.shape import ShapeKey
    from tcache.tuning import Tuned

__all__ = ["Autotuner"]

MOST_WINNERS = 16384
"""Winners an autotuner keeps in memory before it forgets the older half."""


class Autotuner(UpstreamAutotuner):  # type: ignore[misc]  # upstream is untyped
    """Upstream's ``Autotuner``, reading winners from the store and writing them there.

    Also an instance of ``triton.runtime.autotuner.Autotuner``, which is how torch.compile recognises it.

    Attributes:
        buckets: key argument -> bucket, see :func:`autotune`.
        on_untuned: what a shape without a winner does, see :func:`autotune`; None leaves it to the mode.
    """

    # class attributes, so that an adopted upstream autotuner has them too
    cache = PerDevice()
    nargs = PerThread()
    buckets: Mapping[str, Any] | None = None
    on_untuned: str | None = None
    _shape: ShapeKey | None = None
    _launcher: Launcher | None = None

    def __getitem__(self, grid: Any) -> Any:
        """Return what launches the kernel on a grid."""
        launcher = self._launcher
        if launcher is not None and launcher.variants:
            return partial(launcher.launch, self, grid)
        return super().__getitem__(grid)

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch with the winner for these arguments; look it up, or tune, the first time.

        Raises:
            CacheMiss: no winner is known, in frozen mode, with ``on_untuned="error"``, or while a CUDA graph is being
                captured.
        """
        launcher = self._launcher
        if launcher is not None and not warmup:
            kernel = launcher(self, args, kwargs, grid)
            if kernel is not None:
                return kernel
        return self._first(args, kwargs, grid, warmup=warmup)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any, *, warmup: bool) -> Any:
        """Launch the way upstream does, after putting the winner where it looks, and learn from it."""
        active()  # installs the overlay before Triton builds its driver
        launch = {**kwargs, "grid": grid, "warmup": warmup}
        config = self.configs[0] if len(self.configs) == 1 else None
        if len(self.configs) > 1:
            named = named_arguments(self, args, kwargs)
            # upstream's own key, so that upstream's run() finds what is put into its cache
            key = tuple(
                [named[name] for name in self.keys if name in named]
                + [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
            )
            if key not in self.cache:
                configs = self._select(key, args, launch)
                self._tell(configs)
                self._bound_memory()
                for near in configs[:-1]:  # nearest shapes' winners: one that does not fit falls to the next
                    self.cache[key] = near
                    try:
                        return super().run(*args, **launch)
                    except (OutOfResources, PTXASError):
                        del self.cache[key]
                if configs:
                    self.cache[key] = configs[-1]
            config = self.cache.get(key)
        if warmup or config is None or super().run.__func__ is not UpstreamAutotuner.run:
            kernel = super().run(*args, **launch)
            if config is not None and self.best_config is not config:  # an adopted subclass with a will of its own
                kind = f"{type(self).__module__}.{type(self).__name__}"
                active().notice(f"tcache: {kind} overrules the store for {kernel_of(self).ref}")
            return kernel
        launcher = self._launcher
        if launcher is None or launcher.owner != id(self) or self.keys is not launcher.keys:
            launcher = self._new_launcher()
        generation = launcher.generation
        kernel = self._from_bundle(launcher, args, kwargs, grid, config)
        if kernel is None and (config.pre_hook is not None or not launcher.ready(args, kwargs)):
            kernel = super().run(*args, **launch)
        elif kernel is None:
            with captured(launcher.function) as seen:
                kernel = super().run(*args, **launch)
            if seen.bound is not None and self._remembered() and launcher.generation == generation:
                launcher.learn(self, args, kwargs, config, seen.bound, kernel)
        return kernel

    def ways(self) -> tuple[bool, bool]:
        """Return whether a bundle's index may answer launches, and whether some go Triton's way though it would.

        A config's own hook may change what is launched, and a subclass may launch in its own way.
        """
        hooked = [config.pre_hook is not None for config in self.configs]
        own = super().run.__func__ is not UpstreamAutotuner.run
        return not own and not all(hooked), own or any(hooked)

    def _from_bundle(
        self, launcher: Launcher, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any, config: Any
    ) -> Any:
        """Launch a packed kernel that the bundles' index knows; None where Triton's own way must be taken."""
        packed = prebaked() if config.pre_hook is None else None
        function = launcher.function
        inner = {**kwargs, **config.all_kwargs()}
        unique = len(inner) == len(kwargs) + len(config.all_kwargs())
        if packed is None or function is None or grid is None or not unique:
            return None
        for name, heuristic in launcher.heuristics:  # as Heuristics.run does
            named = {**dict(zip(function.arg_names, args, strict=False)), "grid": grid, "warmup": False, **inner}
            inner[name] = heuristic(named)
        done = packed.launch(function, args, inner, grid)
        if done is None:
            return None
        kernel, bound, depends = done
        self.best_config, self.nargs = config, None
        if self._remembered():
            launcher.learn(self, args, kwargs, config, bound, kernel, depends)
        return kernel

    def _remembered(self) -> bool:
        """Return whether what is learnt now will be forgotten when the winners are changed: not while recording."""
        winners = self.cache
        if isinstance(winners, Winners) and self._launcher is not None:
            winners.launchers.add(self._launcher)
            return True
        return False

    def _new_launcher(self) -> Launcher:
        self._launcher = Launcher(self, {name: make_bucket(spec) for name, spec in (self.buckets or {}).items()})
        return self._launcher

    def _bound_memory(self) -> None:
        """Forget the oldest winners of very many shapes; the store has them, except those tuned in memory only."""
        settings = active()
        if (
            len(self.cache) >= MOST_WINNERS
            and isinstance(self.cache, Winners)
            and (settings.writable or settings.mode != "tune")
        ):
            self.cache.drop_oldest(MOST_WINNERS // 2)

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
            raise self._miss(found, gpu.name, settings, named_arguments(self, args, kwargs))
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

    def _miss(self, found: Lookup, gpu: str, settings: Active, arguments: dict[str, Any]) -> Exception:
        reason = found.verdict.reason if not isinstance(found.verdict, Best) else ""
        word = "stale" if reason.startswith("stale") else "untuned"
        if settings.mode == "tune" and self.on_untuned != "error":
            reason += "; nothing is benchmarked while a CUDA graph is being captured"
            word = "capturing"
        near = f"{found.near[0][0]} -> {found.near[0][1]}" if found.near else None
        miss = explain_config(
            *(kernel_of(self).ref, gpu, str(found.shape), settings),
            reason=reason, near=near, word=word, arguments=arguments,
        )  # fmt: skip
        missed(f"{miss.message}: {reason}")
        count_miss(miss.reasons)
        return miss


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
