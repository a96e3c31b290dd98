"""What the stores know about a launch: shape key, verdict, nearest tuned shapes. Benchmarks nothing, writes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tcache._triton import release
from tcache._triton.driver import current_properties, current_target
from tcache._triton.kernels import jit_of
from tcache.decide import Best, Missing, decide
from tcache.keys.bucket import make_bucket
from tcache.keys.config import config_key
from tcache.keys.gpu import GPU, catalogue
from tcache.keys.shape import ShapeKey, ranked
from tcache.keys.source import source_identity
from tcache.store import Kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tcache.store import Store, Timing

__all__ = ["Lookup", "current_gpu", "kernel_of", "lookup", "named_arguments", "shape_of", "source_of"]


@dataclass(frozen=True)
class Lookup:
    """What the stores know about one launch.

    Attributes:
        shape: its shape key.
        verdict: the winner, or why there is none.
        near: tuned shapes and their winners' config keys, nearest first, when there is no winner.
        configs: config key -> config: the decorator's, and those that its pruning function made.
        timings: config key -> what benchmarking it gave, when there is a winner.
    """

    shape: ShapeKey
    verdict: Best | Missing
    near: tuple[tuple[ShapeKey, str], ...] = ()
    configs: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)


def current_gpu() -> GPU:
    """Return the identity of the current device, under the name ``TCACHE_GPU_NAME`` gives it if that is set."""
    backend, arch, warp_size = current_target()
    properties = current_properties()
    name = os.environ.get("TCACHE_GPU_NAME")
    if not name:
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


def source_of(autotuner: Any) -> str:
    """Return the identity of the kernel's source, and of the bucketing that gives its shape keys their meaning."""
    return source_identity(jit_of(autotuner), getattr(autotuner, "buckets", None))


def named_arguments(autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a launch's arguments by name, in the order upstream puts them into its key."""
    named = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if name in autotuner.arg_names}


def shape_of(autotuner: Any, arguments: dict[str, Any]) -> ShapeKey:
    """Return a launch's shape key, sizes bucketed as the autotuner says.

    Raises:
        UnsupportedValue: a key argument has no canonical text.
    """
    buckets = getattr(autotuner, "buckets", None) or {}
    if buckets:
        bucketed = {name: make_bucket(spec)(arguments[name]) for name, spec in buckets.items() if name in arguments}
        arguments = {**arguments, **bucketed}
    return ShapeKey.of(autotuner.keys, arguments)


def lookup(
    autotuner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gpu: GPU,
    stores: tuple[Store, ...],
    *,
    retune: str | None = None,
    since: str = "",
    fresh: bool = False,
) -> Lookup:
    """Ask the stores for a launch's winner.

    Args:
        autotuner: an ``Autotuner`` of tcache or of upstream.
        args: positional arguments of the launch.
        kwargs: keyword arguments of the launch; pruning is shown all of them, as upstream shows it ``grid``.
        gpu: on which GPU it would run.
        stores: where to look, in order.
        retune: ``aged`` or ``all``: entries tuned before ``since`` that are to be treated as missing.
        since: ISO 8601 time in UTC.
        fresh: look into the files, also for what was found before.

    Raises:
        UnsupportedValue: a key argument has no canonical text.
        StoreError: a record is corrupt.
    """
    shape = shape_of(autotuner, named_arguments(autotuner, args, kwargs))
    kernel, source = kernel_of(autotuner), source_of(autotuner)
    configs = {config_key(config): config for config in autotuner.configs}
    keys = list(configs)
    first: Missing | None = None
    for store in stores:
        entry = store.get(gpu, kernel, shape, source, fresh=fresh)
        if (
            entry is not None
            and entry.tuned < since
            and (retune == "all" or (retune == "aged" and entry.triton != release))
        ):
            entry = None
        verdict = decide(entry, keys, None, source, release)
        if isinstance(verdict, Missing) and entry is not None and verdict.untried:
            autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
            pruned = {config_key(config): config for config in autotuner.prune_configs(kwargs)}
            configs |= pruned
            verdict = decide(entry, keys, list(pruned), source, release)
        if entry is not None and isinstance(verdict, Best):
            return Lookup(shape, verdict, configs=configs, timings=entry.timings)
        assert isinstance(verdict, Missing)  # without an entry there is no winner
        if first is None or (first.reason == "never tuned" and verdict.reason != "never tuned"):
            first = verdict
    missing = first if first is not None else Missing("never tuned", tuple(keys))
    near = _near(shape, gpu, kernel, source, keys, stores)
    if missing.best is not None:
        near = ((shape, missing.best), *near)
    return Lookup(shape, missing, near, configs)


def _near(
    shape: ShapeKey, gpu: GPU, kernel: Kernel, source: str, keys: list[str], stores: tuple[Store, ...]
) -> tuple[tuple[ShapeKey, str], ...]:
    winners: dict[ShapeKey, str] = {}
    for store in stores:
        for candidate, entry in store.shapes(gpu, kernel, source).items():
            verdict = decide(entry, keys, None, source, release)
            best = verdict.config if isinstance(verdict, Best) else verdict.best
            if best is not None and candidate != shape:
                winners.setdefault(candidate, best)
    return tuple((found, winners[found]) for found in ranked(shape, list(winners)))
