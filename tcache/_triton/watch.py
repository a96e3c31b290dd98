"""First sights of launches, seen from inside Triton, and counts: no wrapper around a launch.

``JITFunction.run`` looks a launch up with ``kernel_cache.get(key)``, where ``key`` is everything its binder made of the
arguments; an autotuner finds its winner with ``cache[key]``. While recording both dictionaries are of classes below:
they are asked as ever, and notice what they were never asked before. The launch itself is then read from the frames
of the calls in progress: the arguments as the program gave them, before heuristics and autotuners added theirs.

Source: ``JITFunction.run`` in ``triton/runtime/jit.py`` and ``Autotuner.run`` in ``triton/runtime/autotuner.py``, equal
in these respects in 3.6 to 3.9.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton import knobs

from tcache._triton.kernels import Autotuner, Heuristics, JITFunction, KernelInterface, jit_of
from tcache._triton.launcher import Winners
from tcache._triton.probe import Compilation, compile_in_progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Sight", "counts", "launch_in_progress", "reset_counts", "start", "stop"]


@dataclass(frozen=True)
class Sight:
    """A launch as the program made it.

    Attributes:
        kernel: the object that was launched, with its decorators.
        function: the ``JITFunction`` below it.
        args, kwargs: as the program passed them; ``grid`` and ``warmup`` are not among them.
        grid: the grid in blocks, None where it could not be told.
        tuner: the autotuner with several configs it went through, with the arguments it was given; or None.
        benchmark: whether the autotuner launched it to measure it.
        foreign: compiled by somebody who launches it without Triton (torch.compile): no arguments are known.
        specialization: what the binder made of the arguments, see ``Compilation.specialization``; None for a launch
            that missed before it was bound.
        options: compile options that were passed or that a config added.
        compilation: the whole compilation of what is foreign.
        files: its entry's files once there are any, name -> path.
    """

    kernel: Any
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grid: tuple[int, ...] | None = None
    tuner: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
    benchmark: bool = False
    foreign: bool = False
    specialization: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    compilation: Compilation | None = None
    files: dict[str, str] = field(default_factory=dict)


_log = logging.getLogger("tcache")
_sink: Callable[[Sight], str | None] | None = None
_tables: list[tuple[dict[Any, int], dict[Any, str | None]]] = []
"""Counts, and what to count under, of every watched dictionary; not the dictionaries, which kernels live in."""


class _Watched(dict):  # type: ignore[type-arg]
    """The compiled kernels of one ``JITFunction`` on one device."""

    __slots__ = ("below", "counts", "last", "rows")

    def __init__(self, found: dict[Any, Any], last: threading.local | None) -> None:
        super().__init__(found)
        self.below = found  # where a compilation in progress will put its kernel
        self.counts: dict[Any, int] = {}
        self.rows: dict[Any, str | None] = {}
        self.last = last
        _tables.append((self.counts, self.rows))

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            self.counts[key] += 1  # no call in it, so no other thread comes between
        except KeyError:
            _first(self, key, key, None, sys._getframe(1))
        return dict.get(self, key, default)


class _WatchedByShape(_Watched):
    """The same below an autotuner: two shape keys may share a kernel here, and have two on another GPU."""

    __slots__ = ()

    def get(self, key: Any, default: Any = None) -> Any:
        shape = self.last.__dict__.pop("key", None)
        pair = (shape, key)
        try:
            self.counts[pair] += 1
        except KeyError:
            _first(self, key, pair, shape, sys._getframe(1))
        return dict.get(self, key, default)


class _Winners(dict):  # type: ignore[type-arg]
    """An autotuner's winners by shape key; remembers for the launch that follows which one was asked for."""

    __slots__ = ("last",)

    def __init__(self, found: dict[Any, Any], last: threading.local) -> None:
        super().__init__(found)
        self.last = last

    def fresh(self) -> _Winners:
        """Return an empty one, for another device's winners, see :class:`tcache.isolation.PerDevice`."""
        return _Winners({}, self.last)

    def __getitem__(self, key: Any) -> Any:
        self.last.key = key
        return dict.__getitem__(self, key)


def _first(watched: _Watched, compiled: Any, key: Any, shape: Any, frame: FrameType) -> None:
    if compiled not in watched and compiled in watched.below:
        watched[compiled] = watched.below[compiled]
    if _sink is None or frame.f_code is not _RUN or not _is_the_programs(frame):
        return
    if not frame.f_locals["warmup"]:  # else it needs its entry, and is not counted
        watched.counts.setdefault(key, 0)  # two threads may be here at once, and both launched
        watched.counts[key] += 1
        watched.rows.setdefault(key, None)
    try:
        found = _sight(frame)
        # benchmarks go past the table of winners
        tuner = found.tuner[0] if found.tuner is not None else None
        benchmark = tuner is not None and shape is None
        if tuner is not None and not isinstance(tuner.cache, _Winners):
            benchmark = found.benchmark
        row = _sink(replace(found, benchmark=benchmark))
    except Exception as error:  # the launch is the service's business, noting it is ours
        _log.warning("tcache: a launch is not recorded: %s: %s", type(error).__name__, error)
        return
    if not benchmark and key in watched.rows:
        watched.rows[key] = row


def _is_the_programs(frame: FrameType) -> bool:
    """Return whether ``JITFunction.run`` launches, or compiles for the program's ``kernel.warmup``."""
    return not frame.f_locals["warmup"] or (frame.f_back is not None and frame.f_back.f_code is _WARMUP)


_RUN, _WARMUP = JITFunction.run.__code__, KernelInterface.warmup.__code__
_OWN_OPTIONS = ("debug", "instrumentation_mode", "fpsan_homomorphic_casts")
"""What ``JITFunction.run`` adds to its keyword arguments."""


def launch_in_progress() -> Sight | None:
    """Return the launch that the calling frame is part of, bound or not; outside any, the compilation; or None."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _RUN:
            return _sight(frame) if _is_the_programs(frame) else None
        found = frame.f_locals if frame.f_code.co_name == "run" else {}
        warmup = found.get("warmup", found.get("kwargs", {}).get("warmup", True))  # tcache's run names it
        if isinstance(found.get("self"), KernelInterface) and not warmup:
            return _outermost(jit_of(found["self"]), frame)
        frame = frame.f_back
    compilation = compile_in_progress()
    return None if compilation is None or not _is_foreign(compilation.source) else _foreign(compilation, {})


def _is_foreign(source: Any) -> bool:
    """Return whether the compilation that the calling frame is part of belongs to no launch of Triton's."""
    if not isinstance(getattr(source, "fn", None), JITFunction):
        return False
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _RUN.co_filename or frame.f_code is Compilation.run.__code__:
            return False  # a launch, perhaps compiled in a thread of its own; or tcache compiling ahead
        frame = frame.f_back
    return True


def _foreign(compilation: Compilation, files: dict[str, str]) -> Sight:
    options = {name: value for name, value in compilation.options.items() if name != "extern_libs"}
    return Sight(
        compilation.source.fn, compilation.source.fn, (), {}, foreign=True,
        specialization=compilation.specialization(texts=False), options=options, compilation=compilation, files=files,
    )  # fmt: skip


def _sight(frame: FrameType) -> Sight:
    found = frame.f_locals
    function = found["self"]
    outer = _outermost(function, frame)
    grid = found["grid"]
    if callable(grid):
        try:
            grid = grid(found["bound_args"])
        except Exception:
            grid = None
    passed = {name: value for name, value in found["kwargs"].items() if name not in function.arg_names}
    if "signature" in found:  # past binding: the launch is being compiled
        made = (found["signature"], found["constexprs"], found["attrs"])
    else:
        bound = found["specialization"][: len(function.params)]
        made = function._pack_args(found["backend"], dict(found["kwargs"]), found["bound_args"], bound, dict(passed))[
            1:
        ]
    source = SimpleNamespace(fn=function, signature=made[0], constants=made[1], attrs=made[2])
    specialization = Compilation("", "", source, found["target"], {}).specialization(texts=False)
    options = {name: value for name, value in passed.items() if name not in _OWN_OPTIONS[1:]}
    if not options.get("debug"):
        options.pop("debug", None)
    return Sight(
        outer.kernel,
        function,
        outer.args,
        outer.kwargs,
        None if grid is None else tuple(int(size) for size in grid),
        outer.tuner,
        outer.benchmark,
        specialization=specialization,
        options=options,
    )


def _outermost(function: Any, frame: FrameType | None) -> Sight:
    """Walk from ``JITFunction.run`` to where the program launched: ``kernel[grid](…)``, or a call of ``run``."""
    kernel, args, kwargs, tuner, benchmark = function, (), {}, None, False
    while frame is not None:
        name = frame.f_code.co_name
        benchmark |= name == "_bench" and isinstance(frame.f_locals.get("self"), Autotuner)
        if name in ("run", "<lambda>"):
            found = frame.f_locals
            here = found.get("self")
            # others' launchers are passed by: what they launch is replayed without them
            own = isinstance(here, (Autotuner, Heuristics, JITFunction))
            if own and "args" in found and "kwargs" in found and jit_of(here) is function:
                kernel, args, kwargs = here, tuple(found["args"]), dict(found["kwargs"])
                if name == "<lambda>":
                    break
                if isinstance(here, Autotuner) and len(here.configs) > 1 and tuner is None:
                    tuner = (here, args, {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")})
                added: tuple[str, ...] = ("grid", "warmup")
                if isinstance(here, Heuristics):
                    added = (*added, *here.values)
                elif isinstance(here, JITFunction):
                    added = (*added, *_OWN_OPTIONS[1:], *(() if kwargs.get("debug") else ("debug",)))
                kwargs = {k: v for k, v in kwargs.items() if k not in added}
        frame = frame.f_back
    return Sight(kernel, function, args, kwargs, None, tuner, benchmark)


def counts() -> dict[str, int]:
    """Return how often each row (what the sink returned) was launched since recording began or counts were reset.

    Launches that an autotuner made to measure configs are not counted.
    """
    found: dict[str, int] = {}
    for table, rows in _tables.copy():
        for key, row in list(rows.items()):
            if row is not None:
                found[row] = found.get(row, 0) + table.get(key, 0)
    return found


def reset_counts() -> None:
    """Start counting from zero: a forked child must not report its parent's launches."""
    for table, _ in _tables.copy():
        for key in list(table):
            table[key] = 0


def _compiled(*, src: Any, cache_hit: bool, **rest: Any) -> None:
    """Listen to ``triton.compile``: what is compiled outside a launch is launched by others, and not seen here."""
    if _listener is not None:
        _listener(src=src, cache_hit=cache_hit, **rest)
    if _sink is None or not _is_foreign(src):
        return
    try:
        compilation = compile_in_progress()
        if compilation is not None:
            _sink(_foreign(compilation, dict(rest.get("metadata_group") or {})))
    except Exception as error:
        _log.warning("tcache: a compilation is not recorded: %s: %s", type(error).__name__, error)


_listener: Callable[..., Any] | None = None
_create_binder = JITFunction.create_binder
_init_tuner = Autotuner.__init__


def _watching_binder(function: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _create_binder(function)
    return (_watch(function, found[0]), *found[1:]) if _sink is not None else found


_watching_binder.__name__ = "create_binder"  # what a pickled JITFunction names: torch's workers send theirs back


def _watch(function: Any, kernels: dict[Any, Any]) -> _Watched:
    last = function.__dict__.get("_tcache_last")
    return _Watched(kernels, None) if last is None else _WatchedByShape(kernels, last)


def _watching_tuner(tuner: Any, *args: Any, **kwargs: Any) -> None:
    _init_tuner(tuner, *args, **kwargs)
    if _sink is not None:
        _watch_tuner(tuner)


def _watch_tuner(tuner: Any) -> None:
    function, winners = jit_of(tuner), _winners_of(tuner)
    if not isinstance(function, JITFunction) or type(winners) not in (dict, Winners):
        return  # FlagGems keeps winners in a database: what it measured first is recorded, and not counted
    last = function.__dict__.setdefault("_tcache_last", threading.local())
    tuner.cache = _Winners(winners, last)
    _replace_caches(function)


def _winners_of(tuner: Any) -> Any:
    """Return an autotuner's winners; of one of tcache's that never launched without asking for the current device,
    which would set up CUDA where a kernel is decorated, perhaps in a process that forks later.
    """
    found = vars(tuner).get("cache")
    return getattr(tuner, "cache", None) if found is None else found


def _replace_caches(function: Any) -> None:
    for device, found in list(function.device_caches.items()):
        function.device_caches[device] = (_watch(function, found[0]), *found[1:])


def _existing(*kinds: type) -> list[Any]:
    return [found for found in gc.get_objects() if issubclass(type(found), kinds)]


def start(sink: Callable[[Sight], str | None]) -> None:
    """Watch every launch of this process from now on, also of kernels that were launched before.

    Args:
        sink: called with each launch seen for the first time, in the thread that launches, before it compiles; returns
            what its launches are to be counted under.
    """
    global _sink, _listener  # noqa: PLW0603 - Triton's classes are of the process, and so is what watches them
    _sink = sink
    _listener, knobs.compilation.listener = knobs.compilation.listener, _compiled
    JITFunction.create_binder = _watching_binder
    Autotuner.__init__ = _watching_tuner
    for function in _existing(JITFunction):
        function.device_caches.default_factory = function.create_binder
        _replace_caches(function)
    for tuner in _existing(Autotuner):
        _watch_tuner(tuner)
    here = launch_in_progress()  # recording begins inside a launch where that is what imports tcache
    if here is not None:
        sink(here)


def stop() -> None:
    """Put plain dictionaries back: launches are as they were before :func:`start`."""
    global _sink  # noqa: PLW0603
    _sink = None
    if knobs.compilation.listener is _compiled:  # else somebody listens above, and is left alone
        knobs.compilation.listener = _listener
    JITFunction.create_binder = _create_binder
    Autotuner.__init__ = _init_tuner
    for function in _existing(JITFunction):
        function.device_caches.default_factory = function.create_binder
        for device, found in list(function.device_caches.items()):
            function.device_caches[device] = (dict(found[0]), *found[1:])
    for tuner in _existing(Autotuner):
        winners = _winners_of(tuner)
        if isinstance(winners, _Winners):
            tuner.cache = dict(winners)
    _tables.clear()
