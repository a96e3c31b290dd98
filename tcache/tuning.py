"""Tune one shape: compile ahead in parallel, benchmark only what may win, keep every result."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tcache._triton import release
from tcache._triton.bench import Sampler, is_faulted, load_handles
from tcache._triton.kernels import OutOfResources, PTXASError, through_decorators
from tcache._triton.probe import Compilation, compilation_of
from tcache.compile import Compiled, compile_all, cores, entry_present, one_line
from tcache.contend import PASSES, contenders, indistinguishable, summary
from tcache.counters import count
from tcache.decide import Best
from tcache.errors import StoreError, TcacheError
from tcache.journal import Journal
from tcache.keys.config import config_key, config_options, space_identity
from tcache.lookup import kernel_of, lookup, source_of
from tcache.store import Entry, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache.active import Active
    from tcache.keys.gpu import GPU
    from tcache.keys.shape import ShapeKey

__all__ = ["Faulted", "Tuned", "tune"]


_FAILURES = ("OutOfMemoryError", "CompilationError")  # torch's and Triton's own: facts about one config


class Faulted(TcacheError):
    """A config left the GPU's context unusable. It is recorded as failed; this process cannot go on."""

    exit_code = 75


@dataclass(frozen=True)
class Tuned:
    """What tuning a shape gave.

    Attributes:
        config: the winner's key.
        times: config key -> what its benchmark answered, ``[inf, inf, inf]`` for a config that failed.
        seconds: how long benchmarking took; None when another process did it.
    """

    config: str
    times: dict[str, Any]
    seconds: float | None


def tune(
    tuner: Any,
    shape: ShapeKey,
    gpu: GPU,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Active,
    candidates: list[Any],
) -> Tuned:
    """Benchmark the configs that the store does not know for a shape, store every result, return the winner.

    Of N processes that call this at once for one shape, one benchmarks; the others wait and use its result.

    Args:
        tuner: the autotuner, its ``nargs`` set.
        shape: the launch's shape key.
        gpu: the GPU it runs on.
        args, kwargs: the launch's arguments, ``grid`` included.
        settings: mode, stores and what to tune again.
        candidates: the configs that pruning left.

    Raises:
        Faulted: a config faulted the GPU.
        TcacheError: every config failed.
        StoreError: the store cannot be written.
    """
    begin = time.time()
    pruned = {config_key(config): config for config in candidates}
    store, kernel = settings.writable, kernel_of(tuner)
    if store is None:
        settings.notice("tcache: no writable store: results are kept in memory only; set TCACHE_STORE")
        count("tuned")
        race = _Race(tuner, args, kwargs, None)
        race.run(pruned)
        return race.outcome(pruned, {}, f"{kernel.ref} [{shape}]", begin)
    source = source_of(tuner)
    try:
        lock = store.tuning_lock(gpu, kernel, str(shape))
        lock.__enter__()
    except StoreError as error:
        if settings.named:
            raise
        settings.notice(f"tcache: {error.message}")
        return tune(tuner, shape, gpu, args, kwargs, replace(settings, writable=None), candidates)
    with contextlib.ExitStack() as held:
        held.push(lock)
        found = lookup(tuner, args, kwargs, gpu, (store,), retune=settings.retune, since=settings.since, fresh=True)
        if isinstance(found.verdict, Best):  # another process tuned it while this one waited
            count("waited")
            times = {key: found.timings[key].quantiles for key in pruned if key in found.timings}
            return Tuned(found.verdict.config, times, None)
        count("tuned")
        journal = Journal(store.journal(gpu, kernel, str(shape)), source)
        entry = store.get(gpu, kernel, shape, source)
        again = settings.retune is not None and entry is not None and entry.tuned < settings.since
        known = dict(entry.timings) if entry is not None and entry.source == source and not again else {}
        unsettled = _unsettled(journal.timings)  # a killed run may have left a few launches only
        known.update(journal.timings)
        race = _Race(tuner, args, kwargs, journal)
        try:
            race.run({key: config for key, config in pruned.items() if key not in known or key in unsettled})
        finally:
            timings = {**known, **race.timings()}
            keys = [config_key(config) for config in tuner.configs]
            complete = all(key in timings for key in pruned)
            if _is_mistake(timings):
                journal.close()
            elif any(timing.median is not None for timing in timings.values()) or complete:
                best, tied = _best(timings, race, pruned)
                now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                space = space_identity(keys) if complete else None
                # timings kept from another release keep the entry aged
                made_by = entry.triton if entry is not None and known and not again else release
                done = Entry(shape, best, timings, source, space, made_by, now, tied)
                store.update(gpu, kernel, shape, done.keeping, buckets=getattr(tuner, "buckets", None))
                journal.close()
    return race.outcome(pruned, timings, f"{kernel.ref} [{shape}]", begin)


def _is_mistake(timings: dict[str, Timing]) -> bool:
    """Return whether no config compiles: the launch's arguments are to blame, and the next one's may be right."""
    return bool(timings) and all((timing.failed or "").startswith("CompilationError") for timing in timings.values())


def _unsettled(timings: dict[str, Timing]) -> set[str]:
    """Return the configs of a killed run that may be the best, judged by launches that were cut short."""
    timed = {key: timing.median for key, timing in timings.items() if timing.median is not None and timing.reps}
    limit = 1.3 * min(timed.values(), default=0.0)
    return {key for key, median in timed.items() if median <= limit}


def _best(timings: dict[str, Timing], race: _Race, pruned: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    listed = {key: timings[key] for key in [*pruned, *timings] if key in timings}
    timed = {key: timing.quantiles for key, timing in listed.items() if timing.median is not None}
    if not timed:
        return None, ()
    live = {key: value for key, value in timed.items() if key in pruned} or timed
    best = min(live, key=lambda key: live[key])  # of equals the first listed, as upstream
    close = race.close_to_best()
    if best in close and len(close) > 1:
        return race.smallest(close), tuple(close)
    return best, ()


def _jobs() -> int:
    text = os.environ.get("TCACHE_TUNE_JOBS", "")
    return int(text) if text.isdigit() else cores()


class _Race:
    """The benchmarks of one shape."""

    def __init__(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], journal: Journal | None) -> None:
        self._tuner, self._args, self._kwargs, self._journal = tuner, args, kwargs, journal
        self._samples: dict[str, list[float]] = {}
        self._failed: dict[str, Timing] = {}
        self._given: dict[str, Timing] = {}
        self._answers: dict[str, Any] = {}
        self._compilations: dict[str, Compilation] = {}
        self._sampler: Sampler | None = None

    def timings(self) -> dict[str, Timing]:
        return {**{key: summary(values) for key, values in self._samples.items()}, **self._given, **self._failed}

    def run(self, configs: dict[str, Any]) -> None:
        """Compile, then benchmark in passes; configs that fail drop out."""
        if not configs:
            return
        self._compile_ahead(configs)
        live = [key for key in configs if key not in self._failed]
        if self._tuner._do_bench is not None:  # the user's own benchmark decides by itself
            for key in live:
                self._measure(key, configs[key], 0)
            return
        for number, reps in enumerate(PASSES, 1):
            for key in live:
                self._measure(key, configs[key], reps)
            if not self._samples:
                return
            live = contenders(self._samples, number)
            if len(live) == 1 and number > 1:
                return

    def _compile_ahead(self, configs: dict[str, Any]) -> None:
        """Compile in child processes what the Triton cache lacks; a compiler that dies there fails its config only."""
        jobs = _jobs()
        for key, config in configs.items():
            # what upstream refuses or cannot bind is left to it: it says so when it benchmarks the config
            if self._kwargs.keys() & config.kwargs.keys():
                return
            with contextlib.suppress(Exception):
                self._bind(key, config)
        todo = {key: made for key, made in self._compilations.items() if not entry_present(made.entry, made.name)}
        if not jobs or len(todo) < 2:
            return
        names = list(todo)
        loaded = False

        def done(result: Compiled) -> None:
            nonlocal loaded
            if result.error is not None:
                self._fail(names[result.number], result.error)
            elif not loaded:  # builds Triton's native helpers, once for all configs, while the others compile
                loaded = True
                load_handles(todo[names[result.number]])

        compile_all(list(todo.values()), jobs, done, timeout=600)

    def _bind(self, key: str, config: Any) -> None:
        """Note the compilation that a config leads to; its own hook and heuristics see what they see at a launch."""
        bound = {**self._kwargs, **config.all_kwargs()}
        if config.pre_hook is not None:  # it may change what is bound
            config.pre_hook({**self._tuner.nargs, **bound})
        for function, inner, _ in through_decorators(self._tuner.fn, self._args, bound, lambda t, *_: t.configs[:1]):
            launch = {name: value for name, value in inner.items() if name not in ("grid", "warmup")}
            self._compilations[key] = compilation_of(function, self._args, launch)

    def _fail(self, key: str, reason: str) -> None:
        self._samples.pop(key, None)
        self._failed[key] = Timing(failed=reason[:500])
        if self._journal is not None:
            self._journal.result(key, self._failed[key])

    def _measure(self, key: str, config: Any, reps: int) -> None:
        """Benchmark one config through upstream's ``_bench``, which runs the hooks around every launch."""
        own = self._tuner._do_bench
        problem: BaseException | None = None

        def bench(call: Callable[[], Any], quantiles: Any) -> Any:
            nonlocal problem
            try:
                if own is not None:
                    return own(call, quantiles=quantiles)
                if self._sampler is None:
                    self._sampler = Sampler()
                if key not in self._samples:
                    call()  # loads the module
                self._samples.setdefault(key, []).extend(self._sampler(call, reps))
            except Exception as error:
                problem = error
                raise
            return [1.0, 1.0, 1.0]

        if self._journal is not None:
            self._journal.start(key)
        self._tuner.__dict__["do_bench"] = bench
        try:
            found = self._tuner._bench(*self._args, config=config, **self._kwargs)
        except Exception as error:
            self._raised(key, error)
            return
        finally:
            self._tuner.__dict__.pop("do_bench", None)
        if problem is not None:
            self._fail(key, one_line(problem))
        elif own is not None:
            times = [float(found)] if isinstance(found, (int, float)) else [float(value) for value in found]
            finite = all(0 <= value < float("inf") for value in times)
            median, p20, p80 = (times * 3)[:3] if len(times) < 3 else times[:3]
            timing = Timing(median, p20, p80) if finite else Timing(failed=f"the benchmark returned {times}")
            self._given[key], self._answers[key] = timing, found
            if self._journal is not None:
                self._journal.result(key, timing)
        elif self._journal is not None:
            self._journal.result(key, summary(self._samples[key]))

    def _raised(self, key: str, error: Exception) -> None:
        """Sort an exception: a failed config, a faulted GPU, or the caller's own mistake."""
        text = one_line(error)
        if isinstance(error, (OutOfResources, PTXASError)) or type(error).__name__ in _FAILURES:
            self._fail(key, text)
            return
        if isinstance(error, RuntimeError) and "CUDA" in str(error).upper():
            self._fail(key, text)
            if is_faulted():
                raise Faulted(
                    f"{kernel_of(self._tuner).ref}: config [{key}] faulted the GPU: {text}",
                    "it is recorded as failed; start again, or tune with `tcache tune`, which goes on by itself",
                ) from error
            return
        raise error

    def close_to_best(self) -> list[str]:
        return indistinguishable(self._samples) if self._samples else []

    def smallest(self, keys: list[str]) -> str:
        """Return the config that uses the fewest resources: shared memory, then warps, then stages."""

        def cost(key: str) -> tuple[Any, ...]:
            options = config_options(key)[1]
            made = self._compilations.get(key)
            shared = made.run().metadata.shared if made is not None else 0
            return shared, options.get("num_warps", 0), options.get("num_stages", 0), key

        return min(keys, key=cost)

    def outcome(self, pruned: dict[str, Any], known: dict[str, Timing], what: str, begin: float) -> Tuned:
        """Return the winner among the configs of this launch.

        Raises:
            TcacheError: none of them ran.
        """
        timings = {**known, **self.timings()}
        best, _ = _best({key: timings[key] for key in pruned if key in timings}, self, pruned)
        if best is None:
            reasons = "; ".join(f"[{key}] {timings[key].failed}" for key in list(pruned)[:3] if key in timings)
            raise TcacheError(f"{what}: every config failed: {reasons}", "add a config that fits, then tune again")
        times = {key: self._answers.get(key, timings[key].quantiles) for key in pruned if key in timings}
        return Tuned(best, times, time.time() - begin)
