"""Kernel objects: what decorates what, and the names tcache's other modules use for Triton's classes."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITCallable, JITFunction, KernelInterface, MockTensor

from tcache.errors import TcacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ONE",
    "Autotuner",
    "Config",
    "Heuristics",
    "JITCallable",
    "JITFunction",
    "KernelInterface",
    "OutOfResources",
    "PTXASError",
    "defaults_of",
    "interpreting",
    "is_kernel",
    "is_nested",
    "is_typed",
    "jit_of",
    "outermost_launches",
    "through_decorators",
    "through_launchers",
]


def interpreting() -> bool:
    """Return whether ``TRITON_INTERPRET=1``: kernels run as Python on the CPU and nothing is compiled."""
    return bool(knobs.runtime.interpret)


ONE = "equal to 1"
"""Property, among the facts of a launch, of an argument that upstream has no list of properties for although it is
specialized: a parameter with a type keeps that type where the value is 1, and the entry's key tells the two apart."""


def is_kernel(value: object) -> bool:
    """Return whether ``value`` can be launched as ``value[grid](...)``."""
    return isinstance(value, KernelInterface)


def jit_of(kernel: Any) -> Any:
    """Return the ``JITFunction`` (or interpreted function) below any autotuners, heuristics and launchers."""
    while isinstance(kernel, (Autotuner, Heuristics)) or _is_launcher(kernel):
        kernel = kernel.fn
    return kernel


def _is_launcher(kernel: Any) -> bool:
    """Return whether a kernel object is of a class that Triton does not know and that launches another, its ``fn``."""
    own = isinstance(kernel, (Autotuner, Heuristics, JITCallable))
    return is_kernel(kernel) and not own and is_kernel(getattr(kernel, "fn", None))


class _Launched(BaseException):
    def __init__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.launch = kernel, args, kwargs


def through_launchers(
    kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the launch of Triton's own that a launch makes: itself, unless ``kernel`` is somebody's own launcher.

    Libraries decorate kernels with classes of their own, which keep compiled kernels by keys of their own (FlagGems'
    ``libentry``). Such a class's ``run`` runs until it launches what is below it, and no further: it would go on to ask
    what was compiled and tuned.

    Args:
        kernel: what is launched.
        grid: as in ``kernel[grid]``.
        args, kwargs: the arguments, without ``grid`` and ``warmup``.

    Returns:
        Kernel object, arguments and keyword arguments.

    Raises:
        TcacheError: it benchmarks by itself, so that what it would launch is not known.
        Exception: whatever the launcher raises.
    """
    if not _is_launcher(kernel):
        return kernel, args, kwargs

    def seen(here: Any, *given: Any, grid: Any = None, warmup: Any = None, **named: Any) -> None:  # noqa: ARG001
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code is not through_launchers.__code__:
            if frame.f_globals.get("__name__") == "triton.testing":
                raise TcacheError(f"a {type(kernel).__name__} measures configs, which needs a GPU")
            frame = frame.f_back
        raise _Launched(here, given, named)

    originals = _runs()
    for cls, _ in originals:
        cls.run = seen
    try:
        kernel.run(*args, grid=grid, warmup=False, **kwargs)
    except _Launched as launched:
        return launched.launch
    finally:
        for cls, run in originals:
            cls.run = run
    raise TypeError(f"{type(kernel).__name__} launched no kernel of Triton's")


def _runs() -> list[tuple[Any, Any]]:
    """Return the classes that Triton launches by, as far as they have a ``run`` of their own, and that."""
    every = (cls for kind in (Autotuner, Heuristics, JITFunction) for cls in _subclasses(kind))
    return [(cls, vars(cls)["run"]) for cls in every if "run" in vars(cls)]


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for each in cls.__subclasses__():
        yield from _subclasses(each)


def is_nested(autotuner: Any) -> bool:
    """Return whether there is another autotuner below this one, whose launches Triton refuses (``num_warps`` twice)."""
    kernel = autotuner.fn
    while isinstance(kernel, Heuristics):
        kernel = kernel.fn
    return isinstance(kernel, Autotuner)


def through_decorators(
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    choose: Callable[[Any, tuple[Any, ...], dict[str, Any]], list[Any]],
) -> Iterator[tuple[Any, dict[str, Any], Any]]:
    """Walk from a decorated kernel to its ``JITFunction`` as upstream's ``run`` methods do, launching nothing.

    Args:
        kernel: a ``JITFunction``, or one under any order of autotuners and heuristics.
        args: positional arguments of the launch.
        kwargs: keyword arguments of the launch, without ``grid``.
        choose: called for an autotuner with more than one config as ``(autotuner, args, kwargs)``; returns the
            configs to follow.

    Yields:
        ``(jit_function, kwargs, config)`` for every config chosen; ``config`` is None without an autotuner.

    Source: ``Heuristics.run`` and ``Autotuner.run`` in ``triton/runtime/autotuner.py``, equal in 3.6 to 3.9 in
    the order of evaluation: heuristics see earlier heuristics' values; a config's pre_hook runs before binding,
    because it may change what is bound (the block shape of a tensor descriptor).
    """
    if isinstance(kernel, Autotuner):
        configs = choose(kernel, args, kwargs) if len(kernel.configs) > 1 else list(kernel.configs)
        for config in configs:
            bound = {**kwargs, **config.all_kwargs()}
            if config.pre_hook is not None:
                config.pre_hook({**dict(zip(kernel.arg_names, args, strict=False)), **bound})
            for function, inner, below in through_decorators(kernel.fn, args, bound, choose):
                yield function, inner, config if below is None else below
    elif isinstance(kernel, Heuristics):
        bound = dict(kwargs)
        for name, heuristic in kernel.values.items():
            bound[name] = heuristic({**dict(zip(kernel.arg_names, args, strict=False)), **bound})
        yield from through_decorators(kernel.fn, args, bound, choose)
    else:
        yield kernel, kwargs, None


def defaults_of(kernel: Any) -> dict[str, Any]:
    """Return the numbers that a kernel's signature gives parameters a launch leaves out; empty for no kernel."""
    function = getattr(jit_of(kernel), "fn", None)
    parameters = inspect.signature(function).parameters if function is not None else {}
    return {name: each.default for name, each in parameters.items() if isinstance(each.default, (int, float))}


class outermost_launches:  # noqa: N801 - reads as a context manager
    """Hand every ``kernel[grid](...)`` inside the block to ``sink`` instead of launching it.

    ``kernel.run(..., grid=grid)`` is one, too, and so is ``kernel.warmup(..., grid=grid)``, by which programs compile
    what they launch by its handle. The launch is seen before heuristics and autotuners act on it. Only tools that
    replay use this, in their own process; a service never does.

    Args:
        sink: called as ``sink(kernel, grid, args, kwargs)``; what it returns is what the launch returns.
    """

    def __init__(self, sink: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._sink = sink

    def __enter__(self) -> None:
        sink = self._sink

        def getitem(kernel: Any, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> Any:
                made, given, named = through_launchers(kernel, grid, args, kwargs)
                return sink(made, grid, given, named)

            return launch

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:  # noqa: ARG001
            return getitem(kernel, grid)(*args, **kwargs)

        # Autotuner.warmup warms up every config, by what is below it
        replaced = {"__getitem__": getitem, "warmup": lambda kernel, *args, grid, **kwargs: run(
            kernel, *map(MockTensor.wrap_dtype, args), grid=grid, **kwargs)}  # fmt: skip
        wanted = [(KernelInterface, name, function) for name, function in replaced.items()]
        wanted += [(cls, "run", run) for cls, _ in _runs()]
        self._originals = [(cls, name, vars(cls)[name]) for cls, name, _ in wanted]
        for cls, name, function in wanted:
            setattr(cls, name, function)

    def __exit__(self, *_: object) -> None:
        for cls, name, function in self._originals:
            setattr(cls, name, function)


def is_typed(parameter: Any) -> bool:
    """Return whether a parameter states a type that upstream specializes on properties all the same."""
    kind = parameter.annotation_type
    return bool(kind) and kind != "u1" and kind[:2] not in ("fp", "bf") and not parameter.do_not_specialize
