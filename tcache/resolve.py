"""From launches to entry names, without compiling: (kernel, config, specialization, target) -> entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import through_decorators
from tcache._triton.probe import Compilation, compilation_of
from tcache.decide import Best
from tcache.errors import ManifestError, TcacheError
from tcache.explain import facts_of
from tcache.keys.config import config_key, space_identity
from tcache.lookup import kernel_of, lookup, named_arguments
from tcache.replay import launches, machine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.keys.gpu import GPU
    from tcache.manifest import Case
    from tcache.replay import Launch
    from tcache.store import Kernel, Store

__all__ = ["UNTUNED", "Resolved", "Unresolved", "resolve"]

UNTUNED = ("error", "nearest", "default", "all")
"""What to do with a shape that has no best config: refuse, use the nearest shape's, the first config, or every one."""


@dataclass(frozen=True)
class Resolved:
    """One launch with one config, and the entry it reads.

    Attributes:
        gpu: on which GPU.
        kernel: the jit function as ``module:qualname``.
        shape: shape key as text, None for a kernel without autotuner.
        config: config key, None without autotuner.
        tuned: the store's identity of the kernel when the config came from the store, else None.
        notice: what a reader should know: the config is aged, or another shape's.
        compilation: how to compile it; its ``entry`` is the name of the entry.
        where: ``file:line:column`` of the manifest case.
        ref: the manifest's ref.
        space: identity of the autotuner's config space now.
        tuning: the autotuner that chose the config, and its arguments: Triton names its own record after them.
    """

    gpu: GPU
    kernel: str
    shape: str | None
    config: str | None
    tuned: Kernel | None
    notice: str | None
    compilation: Compilation
    where: str
    ref: str
    space: str | None = None
    tuning: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = field(default=None, compare=False, repr=False)

    @property
    def entry(self) -> str:
        return self.compilation.entry

    def facts(self) -> dict[str, Any]:
        """What the entry's name depends on, as named JSON values."""
        return facts_of(self.compilation)


@dataclass(frozen=True)
class Unresolved:
    """A launch without a best config."""

    gpu: GPU
    kernel: str
    shape: str
    reason: str
    where: str
    ref: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kernel} [{self.shape}] has no best config on {self.gpu.name}: {self.reason}"


def resolve(
    cases: Iterable[Case], gpu: GPU, stores: tuple[Store, ...], untuned: str = "error"
) -> tuple[list[Resolved], list[Unresolved]]:
    """Resolve every launch of every case for one GPU, under the stub driver.

    Args:
        cases: manifest cases; those for other GPUs are passed over.
        gpu: for which GPU.
        stores: where the best configs are.
        untuned: one of :data:`UNTUNED`.

    Returns:
        What resolved, in order, and what has no best config (empty unless ``untuned`` is ``error``).

    Raises:
        ManifestError: a case does not fit its kernel.
    """
    done: list[Resolved] = []
    open_: list[Unresolved] = []
    with machine(gpu):
        for case in cases:
            for launch in launches(case) if case.runs_on(gpu.name) else []:
                _resolve_launch(launch, gpu, stores, untuned, done, open_)
    return done, open_


def _resolve_launch(
    launch: Launch, gpu: GPU, stores: tuple[Store, ...], untuned: str, done: list[Resolved], open_: list[Unresolved]
) -> None:
    shape: str | None = None
    notice: str | None = None
    tuned: Kernel | None = None
    space: str | None = None
    tuning: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def choose(autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        nonlocal shape, notice, tuned, space, tuning
        tuning = (autotuner, args, dict(kwargs))
        space = space_identity(config_key(config) for config in autotuner.configs)
        named = named_arguments(autotuner, args, kwargs)
        known = {*named, *(name for config in autotuner.configs for name in config.all_kwargs())}
        absent = [name for name in autotuner.keys if name in autotuner.arg_names and name not in known]
        if absent:
            raise ManifestError(launch.where, f"{launch.ref} needs its key argument {', '.join(absent)}")
        found = lookup(autotuner, args, kwargs, gpu, stores)
        shape = str(found.shape)
        if untuned == "all":
            autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
            return list(autotuner.prune_configs(kwargs))
        if isinstance(found.verdict, Best):
            tuned = kernel_of(autotuner)
            notice = f"tuned under Triton {found.verdict.aged}" if found.verdict.aged else None
            return [found.configs[found.verdict.config]]
        autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
        pruned = autotuner.prune_configs(kwargs)
        if len(pruned) == 1:  # nothing to choose, so nothing to tune
            return list(pruned)
        near = [(other, found.configs[key]) for other, key in found.near if found.configs[key] in pruned]
        if untuned == "nearest" and near:
            notice = f"untuned: config of [{near[0][0]}]"
            return [near[0][1]]
        if untuned in ("nearest", "default"):
            notice = "untuned: first config"
            return [pruned[0]]
        kernel = kernel_of(autotuner).ref
        open_.append(Unresolved(gpu, kernel, shape, found.verdict.reason, launch.where, launch.ref))
        return []

    try:
        for function, kwargs, config in through_decorators(launch.kernel, launch.args, launch.kwargs, choose):
            if launch.grid is not None:
                launch.grid({name: value for name, value in kwargs.items() if isinstance(value, (int, float))})
            compilation = compilation_of(function, launch.args, kwargs)
            kernel = f"{function.fn.__module__}:{function.fn.__qualname__}"
            key = config_key(config) if config is not None else None
            where = launch.where
            done.append(Resolved(gpu, kernel, shape, key, tuned, notice, compilation, where, launch.ref, space, tuning))
    except TcacheError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise ManifestError(
            launch.where, f"{launch.ref} cannot be bound: {type(error).__name__}: {text}", "check the case's arguments"
        ) from error
