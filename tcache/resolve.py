"""From launches to entry names, without compiling: (kernel, config, specialization, target) -> entry."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tcache._triton.ahead import begin_key
from tcache._triton.kernels import through_decorators
from tcache._triton.probe import Compilation, compilation_of
from tcache._triton.specialize import Specialized, specialize
from tcache.decide import Best
from tcache.errors import KernelError, ManifestError, TcacheError, UnsupportedValue
from tcache.explain import facts_of, specialization_of
from tcache.keys.config import config_key, space_identity
from tcache.keys.source import source_identity
from tcache.lookup import kernel_of, lookup, named_arguments
from tcache.replay import launches, machine
from tcache.standin import described_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
        direct: whether tcache specializes the launch as Triton does, so that the entry may be found without Triton.
        tuning: the autotuner that chose the config, and its arguments: Triton names its own record after them.
        launch: the launch described, where its types do not say enough, see :func:`tcache.standin.described_launch`.
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
    direct: bool = False
    tuning: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    launch: dict[str, Any] | None = field(default=None, compare=False, repr=False)

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
    cases: Iterable[Case],
    gpu: GPU,
    stores: tuple[Store, ...],
    untuned: str = "error",
    broken: list[TcacheError] | None = None,
    found: Callable[[Resolved], None] = lambda _: None,
) -> tuple[list[Resolved], list[Unresolved]]:
    """Resolve every launch of every case for one GPU, under the stub driver.

    Args:
        cases: manifest cases; those for other GPUs are passed over.
        gpu: for which GPU.
        stores: where the best configs are.
        untuned: one of :data:`UNTUNED`.
        broken: where to note why a case cannot be replayed, to go on with the next; None raises it.
        found: called with each launch as it is resolved.

    Returns:
        What resolved, in order, and what has no best config (empty unless ``untuned`` is ``error``). Launches of one
        entry share its compilation.

    Raises:
        ManifestError: a case does not fit its kernel.
        KernelError: a kernel cannot be imported.
        UnsupportedValue: a key argument has no canonical text.
        StoreError: a record is corrupt.
    """
    done: list[Resolved] = []
    open_: list[Unresolved] = []
    entries: dict[str, Compilation] = {}
    begin_key()  # while torch is imported
    with machine(gpu):
        for case in cases:
            if not case.runs_on(gpu.name):
                continue
            try:
                for launch in launches(case):
                    for row in _resolve_launch(launch, gpu, stores, untuned, open_):
                        made = entries.setdefault(row.entry, row.compilation)
                        done.append(replace(row, compilation=made) if made is not row.compilation else row)
                        found(done[-1])
            except (ManifestError, KernelError, UnsupportedValue) as error:
                if broken is None:
                    raise
                broken.append(error)
    return done, open_


class _Choice:
    """Chooses the configs of one launch, and notes what they are chosen by.

    Attributes:
        shape, notice, tuned, space, tuning: see :class:`Resolved`.
    """

    def __init__(
        self, launch: Launch, gpu: GPU, stores: tuple[Store, ...], untuned: str, open_: list[Unresolved]
    ) -> None:
        self._launch, self._gpu, self._stores, self._untuned, self._open = launch, gpu, stores, untuned, open_
        self.shape: str | None = None
        self.notice: str | None = None
        self.tuned: Kernel | None = None
        self.space: str | None = None
        self.tuning: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        launch = self._launch
        self.tuning = (autotuner, args, dict(kwargs))
        self.space = space_identity(config_key(config) for config in autotuner.configs)
        named = named_arguments(autotuner, args, kwargs)
        # configs may add a key argument; in a program's own launch (no grid here) upstream skips what is absent
        added = {name for config in autotuner.configs for name in config.all_kwargs()}
        wanted = [name for name in autotuner.keys if name in autotuner.arg_names and name not in added]
        absent = [name for name in wanted if name not in named]
        if absent and launch.grid is not None:
            raise ManifestError(launch.where, f"{launch.ref} needs its key argument {', '.join(absent)}")
        found = lookup(autotuner, args, kwargs, self._gpu, self._stores)
        self.shape = str(found.shape)
        if self._untuned == "all":
            autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
            return list(autotuner.prune_configs(kwargs))
        if isinstance(found.verdict, Best):
            self.tuned = kernel_of(autotuner)
            self.notice = f"tuned under Triton {found.verdict.aged}" if found.verdict.aged else None
            return [found.configs[found.verdict.config]]
        autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
        pruned = autotuner.prune_configs(kwargs)
        if len(pruned) == 1:  # nothing to choose, so nothing to tune
            return list(pruned)
        near = [(other, found.configs[key]) for other, key in found.near if found.configs[key] in pruned]
        if self._untuned == "nearest" and near:
            self.notice = f"untuned: config of [{near[0][0]}]"
            return [near[0][1]]
        if self._untuned in ("nearest", "default"):
            self.notice = "untuned: first config"
            return [pruned[0]]
        kernel = kernel_of(autotuner).ref
        reason = found.verdict.reason
        self._open.append(Unresolved(self._gpu, kernel, self.shape, reason, launch.where, launch.ref))
        return []


def _resolve_launch(
    launch: Launch, gpu: GPU, stores: tuple[Store, ...], untuned: str, open_: list[Unresolved]
) -> Iterator[Resolved]:
    choice = _Choice(launch, gpu, stores, untuned, open_)
    try:
        for function, kwargs, config in through_decorators(launch.kernel, launch.args, launch.kwargs, choice):
            if launch.grid is not None:
                launch.grid({name: value for name, value in kwargs.items() if isinstance(value, (int, float))})
            compilation = compilation_of(function, launch.args, kwargs)
            notice = choice.notice
            if launch.source is not None and launch.source != source_identity(function):
                notice = "recorded from another source: the kernel, or a global it reads, is not the same here"
            kernel = f"{function.fn.__module__}:{function.fn.__qualname__}"
            key = sys.intern(config_key(config)) if config is not None else None
            made = specialize(function, launch.args, kwargs)
            direct = _agrees(function, compilation, made)
            described = described_launch(function, launch.args, kwargs, made if direct else None)
            yield Resolved(
                gpu, sys.intern(kernel), choice.shape, key, choice.tuned, notice, compilation, launch.where, launch.ref,
                choice.space, direct, choice.tuning, described,
            )  # fmt: skip
    except TcacheError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise ManifestError(
            launch.where, f"{launch.ref} cannot be bound: {type(error).__name__}: {text}", "check the case's arguments"
        ) from error


def _agrees(function: Any, compilation: Compilation, made: Specialized | None) -> bool:
    """Return whether tcache's own specialization of a launch is what Triton's binder made of it.

    A kernel that runs hooks before each launch goes Triton's way.
    """
    return made is not None and not function.pre_run_hooks and made.facts() == specialization_of(compilation)
