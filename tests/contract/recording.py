"""One scenario under ``triton.autotune`` and under tcache: everything both did, written down to be compared.

A scenario is a function of a :class:`Stage`. It decorates a kernel with ``stage.autotune(...)`` and launches it with
``stage.launch(...)``; hooks, benchmarks and launches write themselves into ``stage.events``. Kernels are compiled for
real; a launch takes the time that its ``BLOCK`` has in :data:`TIMES` and does to its tensors what ``stage.effect``
says.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.runtime import driver as runtime_driver

import tcache
from tcache.active import activate

sys.path.insert(0, str(Path(__file__).parent))
import null_driver

TIMES = {16: 3.0, 32: 1.0, 64: 2.0, 128: 4.0}
BLOCKS = (16, 32, 64)
X = torch.zeros(64)
META = ["BLOCK", "grid", "n", "num_ctas", "num_stages", "num_warps", "warmup", "x_ptr"]
"""What upstream shows a hook or a heuristic of a kernel with the arguments ``x_ptr`` and ``n``."""

QUANTILES = (0.5, 0.2, 0.8)
SINGLE_IS_BENCHMARKED = triton.__version__ < "3.8"
"""Since 3.8 upstream does not benchmark the one config that pruning left."""


def configs(*blocks, **options):
    return [triton.Config({"BLOCK": block}, num_warps=1, **options) for block in blocks or BLOCKS]


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@triton.jit
def copy(dst, src, stride: tl.constexpr, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * stride + tl.arange(0, BLOCK) * COLUMNS
    tl.store(dst + o, tl.load(src + o, mask=o < n), mask=o < n)


@triton.jit
def staged(x_ptr, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK) + WIDTH
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@triton.jit
def asserting(x_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 32, "32 is not served")
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@triton.jit
def broken(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK + (BLOCK == 32))  # 33 is no power of two: a compilation error
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@triton.jit
def absent(x_ptr, n, BLOCK: tl.constexpr):
    if x_ptr is not None:
        tl.store(x_ptr, n)


@triton.jit
def labelled(x_ptr, n, LABEL: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


KERNELS = [fill, copy, staged, asserting, broken, absent, labelled]


class Driver(null_driver.NullDriver):
    """A null driver whose launches are written down, take time, and may change their tensors."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.clock = 0.0
        self.block = None

    def launcher_cls(self, source, metadata):
        names = source.fn.arg_names
        constants = {names[path[0]]: getattr(value, "value", value) for path, value in source.constants.items()}

        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *bound):  # as the C launcher
            if enter is not None:
                enter(launch_metadata)
            shown = tuple(sorted((name, str(value)) for name, value in constants.items()))
            self.stage.note("launch", source.name, (x, y, z), shown, metadata.num_warps, metadata.num_stages)
            self.block = constants.get("BLOCK")
            self.clock += TIMES.get(self.block, 1.0)
            self.stage.effect(*[value for value in bound if isinstance(value, torch.Tensor)])
            if leave is not None:
                leave(launch_metadata)

        return launch

    # what benchmarking without a do_bench of the user asks a driver for
    def get_benchmarker(self):
        return self.stage.bench

    def get_device_interface(self):
        driver = self

        class Event:
            def __init__(self, *, enable_timing):
                self.at = None

            def record(self):
                self.at = driver.clock

            def elapsed_time(self, end):
                return end.at - self.at

        return type("Interface", (), {"Event": Event, "synchronize": staticmethod(lambda: None)})

    def get_empty_cache_for_benchmark(self):
        return None

    def clear_cache(self, cache):
        pass


class Stage:
    """What a scenario acts on.

    Attributes:
        events: what happened, in order.
        effect: what a launch does to its tensor arguments.
        block: ``BLOCK`` of the last launch.
    """

    def __init__(self, decorate):
        self.autotune = decorate
        self.events = []
        self.effect = lambda *_: None
        self.driver = Driver(self)

    @property
    def block(self):
        return self.driver.block

    def note(self, *event):
        self.events.append(event)

    def bench(self, call, quantiles):
        """Stands for a benchmark: launches once and answers what the launch took."""
        before = self.driver.clock
        call()
        median = self.driver.clock - before
        self.note("bench", self.block, quantiles)
        return [median, median * 0.5, median * 2]

    def launch(self, kernel, *args, grid=(1,), **kwargs):
        """Launch, and note what was raised, or what the autotuner says of itself afterwards."""
        try:
            kernel[grid](*args, **kwargs)
        except Exception as error:
            self.note("raised", type(error), str(error))
        else:
            self.note("state", *state(kernel))

    def named(self, kind):
        return [event[1:] for event in self.events if event[0] == kind]


def state(kernel):
    """Return what an upstream autotuner shows after a launch."""
    while not isinstance(kernel, triton.runtime.autotuner.Autotuner):
        kernel = kernel.fn
    cache = {key: str(config) for key, config in kernel.cache.items()}
    timings = {str(config): times for config, times in getattr(kernel, "configs_timings", {}).items()}
    return str(kernel.best_config), cache, timings, kernel.nargs


def launched(events):
    """Return the BLOCK of every launch."""
    return [int(dict(event[3])["BLOCK"]) for event in events if event[0] == "launch"]


def simple(stage, kernel=fill, given=None, **options):
    return stage.autotune(configs=given or configs(), key=["n"], do_bench=stage.bench, **options)(kernel)


def hooked(stage, **options):
    """A kernel whose hooks note what they are given."""

    def pre(kwargs, reset_only=False):
        stage.note("pre", sorted(kwargs), kwargs["BLOCK"], kwargs["n"], kwargs["grid"], reset_only)

    def post(kwargs, exception):
        stage.note("post", sorted(kwargs), kwargs["BLOCK"], type(exception), str(exception))

    def own(kwargs):
        stage.note("own", sorted(kwargs), kwargs["BLOCK"], kwargs["n"], kwargs["grid"])

    given = configs(pre_hook=own if options.pop("own", False) else None)
    kernel = options.pop("kernel", fill)
    options = {"configs": given, "pre_hook": pre, "post_hook": post, **options}
    return stage.autotune(key=["n"], do_bench=stage.bench, **options)(kernel)


def kinds(events):
    return [event[0] for event in events if event[0] not in ("state", "bench")]


def heuristic(stage):
    def width(arguments):
        stage.note("width", sorted(arguments))
        return arguments.get("BLOCK", 8) // 8

    return triton.heuristics({"WIDTH": width})


def stock(**options):
    return triton.autotune(**options)


def ours(**options):
    return tcache.autotune(**options)


def adopted(**options):
    def decorate(fn):
        kernel = triton.autotune(**options)(fn)
        assert tcache.adopt(kernel)
        return kernel

    return decorate


@contextlib.contextmanager
def stage_of(decorate, store):
    """Yield a stage on a driver of its own; what Triton keeps of a kernel in memory is as in a new process."""
    stage = Stage(decorate)
    for kernel in KERNELS:
        kernel.device_caches.clear()
    runtime_driver.set_active(stage.driver)
    activate(store=store, mode="tune")
    yield stage


class Both:
    """Runs scenarios under upstream's decorator and under one of tcache's.

    Attributes:
        decorate: tcache's way: :func:`ours` or :func:`adopted`.
        store: the store of tcache's runs.
    """

    def __init__(self, decorate, store):
        self.decorate, self.store = decorate, store

    def record(self, decorate, scenario):
        with stage_of(decorate, self.store) as stage, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION is unset")  # 3.9, once in a process
            scenario(stage)
            stage.events += [("warned", item.category, str(item.message)) for item in warned]
        return stage.events

    def apart(self, scenario):
        """Return what upstream did and what tcache did."""
        return self.record(stock, scenario), self.record(self.decorate, scenario)

    def same(self, scenario):
        """Assert that tcache, its store empty, does exactly what upstream does; return it."""
        expected, found = self.apart(scenario)
        assert found == expected
        assert expected
        return expected

    def same_hit(self, prepare):
        """Assert that a new process that finds its winner in the store launches as upstream does once it has tuned.

        Args:
            prepare: decorates and returns the launch.
        """
        with stage_of(stock, self.store) as stage:
            launch = prepare(stage)
            launch()
            stage.events.clear()
            launch()
            expected = stage.events
        with stage_of(self.decorate, self.store) as stage:
            prepare(stage)()
        with stage_of(self.decorate, self.store) as stage:
            launch = prepare(stage)
            stage.events.clear()
            launch()
            assert stage.events == expected
        assert expected
        return expected


@contextlib.contextmanager
def printed(stage):
    """Note what is printed inside the block, times of the day's machine left out."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        yield
    for line in out.getvalue().splitlines():
        stage.note("printed", re.sub(r"after \d+\.\d\ds", "after TIME", line))
