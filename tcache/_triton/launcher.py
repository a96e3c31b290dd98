"""The warm path: from a launch's arguments to the C launcher through one generated function and one look-up.

``JITFunction.run`` binds and specializes the arguments, prints the options, and looks up the kernel by both. Once it
has done so for one launch, the same kernel serves every launch whose arguments agree in what Triton specializes on.
A :class:`Launcher` learns such launches from upstream's own path and answers later ones by a key at least as fine:

- tensors by dtype and address modulo 16,
- integers by value where the autotune key or a constexpr asks for it, else by ``== 1``, divisibility by 16 and width,
- constexprs, strings, booleans and key arguments by value, everything by its exact type.

It answers only while everything else is as it was when the launch was learnt: knobs, hooks, globals, configs, driver.
Whatever it does not know goes upstream's way, whose behaviour is the reference. Source of that behaviour:
``Autotuner.run``, ``Heuristics.run`` (``triton/runtime/autotuner.py``), ``JITFunction.run`` (``triton/runtime/jit.py``)
and the native specializer (``python/src/specialize.cc``), alike in 3.6 to 3.9 as far as this module looks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.driver import driver as _driver
from triton.runtime.jit import JITFunction

from tcache._triton.generate import LARGEST, Shape, functions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Launcher", "Winners", "captured"]

MOST_KINDS = 64
"""Combinations of argument kinds kept for one kernel."""


class _Watched:
    """What must be as it was for learnt launches to count: gathered once, compared by the generated code."""

    def __init__(self, function: Any) -> None:
        self.run = JITFunction.run
        self.upstream = Autotuner.run
        self.driver = _driver.active
        self.runtime = dict(knobs.runtime.__dict__)
        self.compilation = dict(knobs.compilation.__dict__)
        self.enter, self.exit = (_calls(getattr(knobs.runtime, f"launch_{name}_hook")) for name in ("enter", "exit"))
        self.debug = function.debug
        self.variables = {name: os.environ.get(name) for name in _VARIABLES}

    def quiet(self) -> bool:
        """Return whether no hook is set that a launch would have to call or that may change it."""
        return not (self.enter or self.exit or knobs.runtime.add_stages_inspection_hook is not None)


def _calls(hook: Any) -> list[Any]:
    """Return the list of a hook's calls; of a hook that is no chain, a list that is never empty."""
    if hook is None:
        return []
    found = getattr(hook, "calls", None)
    return found if isinstance(found, list) else [hook]


_VARIABLES = tuple(
    descriptor.key
    for name in ("fpsan_homomorphic_casts",)  # read by JITFunction.run at every launch, since 3.9
    if (descriptor := vars(type(knobs.compilation)).get(name)) is not None and hasattr(descriptor, "key")
)


class Launcher:
    """Learnt launches of one autotuned kernel.

    Args:
        tuner: the autotuner: it, or what it decorates, may have heuristics between itself and the jit function.
        buckets: key argument -> function that returns a size's bucket.
    """

    def __init__(self, tuner: Any, buckets: Mapping[str, Callable[[Any], Any]]) -> None:
        self._buckets = dict(buckets)
        self.heuristics: list[tuple[str, Callable[..., Any]]] = []
        function = tuner.fn
        while type(function) is Heuristics:
            self.heuristics += function.values.items()
            function = function.fn
        self.function: Any = function if type(function) is JITFunction else None
        self._watched: _Watched | None = None
        self.variants: dict[Any, Callable[..., Any]] = {}
        self._entries: dict[Any, tuple[Callable[..., Any], dict[Any, Any]]] = {}
        self._refused: set[Any] = set()
        self.owner = id(tuner)
        self.keys = tuner.keys
        self.generation = 0
        _LAUNCHERS.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # copies and pickles of an autotuner learn again

    def forget(self) -> None:
        """Forget every launch, also one that is under way and would be learnt."""
        self.generation += 1
        self.variants, self._entries = {}, {}
        self._watched = None

    def __call__(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> Any:
        """Launch if such a launch was learnt; return the kernel, or None where upstream's path must be taken."""
        variant = self.variants.get(_kinds(args, kwargs) if kwargs else tuple(map(type, args)))
        return None if variant is None else variant(tuner, args, kwargs, grid)

    def launch(self, tuner: Any, grid: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Launch: what ``kernel[grid]`` is once something is learnt."""
        variant = self.variants.get(_kinds(args, kwargs) if kwargs else tuple(map(type, args)))
        if variant is not None:
            kernel = variant(tuner, args, kwargs, grid)
            if kernel is not None:
                return kernel
        return tuner.run(*args, grid=grid, warmup=False, **kwargs)  # a TypeError, as upstream's, if they name these

    def ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a launch of such arguments may be learnt at all, as far as is known before it."""
        if self.function is None or _calls(knobs.runtime.launch_enter_hook) or self.function.pre_run_hooks:
            return False
        return _kinds(args, kwargs) not in self._refused

    def learn(
        self,
        tuner: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: Any,
        bound: dict[str, Any],
        kernel: Any,
        depends: list[tuple[dict[str, Any], str, Any]] | None = None,
    ) -> bool:
        """Remember a launch that has just been made.

        Args:
            tuner: the autotuner.
            args, kwargs: what it was launched with, without ``grid`` and ``warmup``.
            config: the config it used.
            bound: the jit function's arguments by name, as they were bound: meta-parameters and heuristics included.
            kernel: the ``CompiledKernel`` launched.
            depends: ``(namespace, name, value)`` of the globals it was compiled with; None asks upstream's own list.

        Returns:
            Whether it could be remembered.
        """
        function, watched = self.function, self._watch(config, kernel)
        if watched is None or any(bound.get(name) is not value for name, value in config.kwargs.items()):
            return False
        made = self._code(_kinds(args, kwargs), tuner, args, kwargs, watched, depends)
        if made is None:
            return False
        key_of, table = made
        key_of.__globals__["EXACT"].clear()
        function.device_caches[watched.driver.get_current_device()]  # made anew after somebody cleared it: see _guards
        try:
            key, inner = key_of(args, kwargs, bound)
            hash((key, inner))
        except (TypeError, KeyError):
            return False
        given = {*function.arg_names[: len(args)], *kwargs, *(name for name, _ in self.heuristics)}
        rest = tuple(bound[name] for name in function.arg_names if name not in given)
        entry = (kernel, kernel.run, kernel.function, kernel.packed_metadata, config, rest)
        if len(table) >= LARGEST:
            for old in list(table)[: LARGEST // 2]:
                table.pop(old, None)
        if not self.heuristics:
            table[key] = entry
            return True
        meta = config.all_kwargs()
        known: tuple[dict[str, Any], dict[Any, Any]] | None = table.get(key)
        if known is None or known[0] != meta:
            known = table[key] = (meta, {})
        if len(known[1]) >= LARGEST:
            known[1].clear()
        known[1][inner] = entry
        return True

    def _watch(self, config: Any, kernel: Any) -> _Watched | None:
        """Return what learnt launches depend on, after forgetting those of another state; None to learn nothing."""
        function = self.function
        if function is None or config.pre_hook is not None or type(kernel) is not CompiledKernel or not kernel.module:
            return None
        watched = self._watched
        if watched is None or not self._still(watched):
            self.forget()
            watched = self._watched = _Watched(function)
        loud = not watched.quiet() or function.pre_run_hooks or kernel.metadata.target.backend != "cuda"
        return None if loud else watched

    def _code(
        self,
        kinds: Any,
        tuner: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        watched: _Watched,
        depends: list[tuple[dict[str, Any], str, Any]] | None,
    ) -> tuple[Callable[..., Any], dict[Any, Any]] | None:
        """Return key function and table for such arguments, making the code for them at first; None: not known."""
        made = self._entries.get(kinds)
        if made is not None:
            return made
        function = self.function
        shape = Shape.of(function, tuner.keys, self._buckets, self.heuristics, args, kwargs)
        if shape is None or len(self._entries) >= MOST_KINDS:
            if len(self._refused) < MOST_KINDS:
                self._refused.add(kinds)
            return None
        if depends is None:
            depends = [(space, name, value) for (name, _), (value, space) in function.used_global_vals.items()]
        table: dict[Any, Any] = {}
        self.variants[kinds], key_of = functions(shape, table, watched, tuner, function, depends)
        self._entries[kinds] = key_of, table
        return key_of, table

    def _still(self, watched: _Watched) -> bool:
        now = _Watched(self.function)
        return vars(now) == vars(watched) and now.driver is watched.driver


def _kinds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kinds = tuple(map(type, args))
    return (kinds, tuple(kwargs), tuple(map(type, kwargs.values()))) if kwargs else kinds


class Winners(dict[Any, Any]):
    """An autotuner's ``cache``; when a winner is changed or taken away, what was learnt from it is forgotten."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()  # of the autotuner and of its copies

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def _changed(self) -> None:
        for launcher in list(self.launchers):
            launcher.forget()

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.get(key, value) is not value:
            self._changed()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._changed()
        super().__delitem__(key)

    def clear(self) -> None:
        self._changed()
        super().clear()

    def pop(self, *args: Any) -> Any:
        self._changed()
        return super().pop(*args)

    def popitem(self) -> tuple[Any, Any]:
        self._changed()
        return super().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._changed()
        super().update(*args, **kwargs)

    def drop_oldest(self, count: int) -> None:
        """Forget winners to bound memory: what was learnt from them stays right."""
        for key in list(self)[:count]:
            super().pop(key, None)


def _nothing() -> None:
    return None


_LAUNCHERS: weakref.WeakSet[Launcher] = weakref.WeakSet()


def _forget_all() -> None:
    for launcher in list(_LAUNCHERS):
        launcher.forget()


if hasattr(os, "register_at_fork"):  # a forked child has no CUDA context: upstream's path says so
    os.register_at_fork(after_in_child=_forget_all)


class captured:  # noqa: N801 - reads as a context manager
    """Note, inside the block, what a jit function is run with in this thread.

    Attributes:
        bound: the arguments by name of the last run, defaults included; None when there was none.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._thread = threading.get_ident()
        self.bound: dict[str, Any] | None = None

    def _note(self, *args: Any, **kwargs: Any) -> None:
        # the first run of this thread: a grid function may launch the kernel again
        if threading.get_ident() == self._thread and self.bound is None:
            function = self._function
            defaults = {kp.name: kp.default for kp in function.params if kp.has_default}
            self.bound = {**defaults, **dict(zip(function.arg_names, args, strict=False)), **kwargs}

    def __enter__(self) -> captured:  # noqa: PYI034 - typing.Self is newer than 3.10
        self._function.pre_run_hooks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # somebody may have cleared the list
            self._function.pre_run_hooks.remove(self._note)
