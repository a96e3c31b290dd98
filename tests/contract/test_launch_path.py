"""The warm path against upstream's: thousands of random launches, and everything that must make it step aside."""

from __future__ import annotations

import copy
import gc
import random
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

import tcache
from tcache._triton import launcher
from tcache.active import activate

sys.path.insert(0, str(Path(__file__).parent))
import null_driver

SCALE = 1.0


@triton.jit
def plain(x, y, n, step, alpha, flag, other, BLOCK: tl.constexpr, KIND: tl.constexpr = "copy"):
    o = tl.arange(0, BLOCK)
    value = tl.load(x + o * step, mask=o < n) * alpha
    if KIND == "copy":
        tl.store(y + o, value, mask=o < n)


@triton.jit
def reads_global(x, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x + o, o.to(tl.float32) * LIMIT, mask=o < n)


LIMIT = tl.constexpr(3)


class Recording(null_driver.NullDriver):
    """Notes every launch as the C launcher would get it."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.device = 0

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 100 + device

    def launcher_cls(self, source, metadata):
        def launch(*arguments):
            self.hooks = arguments[6:9]  # launch metadata and the two hooks, for the C launcher to call
            self.seen.append((source.name, metadata.hash, arguments[:4], arguments[9:]))

        return launch


@pytest.fixture
def null(monkeypatch, triton_cache, tmp_path):
    monkeypatch.setenv("TCACHE_GPU_NAME", "NVIDIA H200")
    before = driver._active
    made = Recording()
    driver.set_active(made)
    activate(store=tmp_path / "store", mode="tune")
    yield made
    for kernel in (plain, reads_global):
        kernel.device_caches.clear()
    gc.collect()
    driver._active = before


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32)]


def both(kernel, key=("n",), heuristics=None, over=None, configs=CONFIGS, **more):
    def bench(call, quantiles):
        call()
        return [1.0 for _ in quantiles]

    def made(decorate, **extra):
        inner = triton.heuristics(heuristics)(kernel) if heuristics else kernel
        tuned = decorate(configs=configs, key=list(key), do_bench=bench, **extra)(inner)
        return triton.heuristics(over)(tuned) if over else tuned

    return made(triton.autotune), made(tcache.autotune, **more)


def launched(null, kernel, grid, args, kwargs):
    """Launch and return what reached the driver, or the exception."""
    null.seen.clear()
    try:
        returned = kernel[grid](*args, **kwargs)
    except Exception as error:
        return type(error), str(error).splitlines()[:1]
    name, entry, head, arguments = null.seen[-1]
    assert returned.hash == entry
    shown = tuple(id(value) if isinstance(value, torch.Tensor) else (type(value), value) for value in arguments)
    return name, entry, head, shown


@pytest.fixture
def fast(monkeypatch):
    """Count launches that took the warm path."""
    taken = []
    functions = launcher.functions

    def counting(*args):
        launch, key_of = functions(*args)

        def counted(*given):
            kernel = launch(*given)
            taken.append(kernel is not None)
            return kernel

        return counted, key_of

    monkeypatch.setattr(launcher, "functions", counting)
    return taken


STORAGE = torch.zeros(4096)
TENSORS = [STORAGE, STORAGE[1:], STORAGE.to(torch.float16), torch.nn.Parameter(STORAGE, requires_grad=False)]
SIZES = [1, 16, 17, 32, 2**40 + 1, -16, True]
STEPS = [1, 16, 2**33]


@pytest.mark.parametrize("shape", ["plain", "heuristic below", "heuristic above", "bucketed"])
def test_random_launches_reach_the_driver_as_upstreams_do(null, fast, shape):
    chance = random.Random(shape)
    more = {"buckets": {"n": "pow2"}} if shape == "bucketed" else {}
    computed = {"KIND": lambda given: "copy" if given["flag"] else "none"}
    stock, ours = both(
        plain,
        key=("n", "step") if shape != "bucketed" else ("n",),
        heuristics=computed if shape == "heuristic below" else None,
        over=computed if shape == "heuristic above" else None,
        **more,
    )
    different = []
    for number in range(1500):
        n = chance.choice(SIZES if shape != "bucketed" else [1, 3, 16, 17, 30])
        values = {
            "x": chance.choice(TENSORS), "y": chance.choice(TENSORS[:2]), "n": n, "step": chance.choice(STEPS),
            "alpha": 2.5, "flag": chance.choice([True, False]),
            "other": chance.choice([None, STORAGE]),
        }  # fmt: skip
        split = chance.choice([7, 7, 3, 0])
        args = tuple(values[name] for name in list(values)[:split])
        kwargs = {name: values[name] for name in list(values)[split:]}
        if shape == "plain" and chance.random() < 0.3:
            kwargs["KIND"] = chance.choice(["copy", "none"])
        grid = chance.choice([(4,), (4, 2), (1, 2, 3), lambda meta: (triton.cdiv(64, meta["BLOCK"]), meta["step"])])
        null.device = chance.choice([0, 0, 1])
        expected, found = launched(null, stock, grid, args, kwargs), launched(null, ours, grid, args, kwargs)
        if expected != found:
            different.append((number, values, expected, found))
    assert not different, different[:2]
    assert sum(fast) > 120, sum(fast)


def test_nothing_that_is_set_is_passed_over(null, fast, monkeypatch):
    stock, ours = both(plain)
    args = (STORAGE, STORAGE, 16, 1, 1.0, True, None)

    def taken():
        fast.clear()
        kernel = ours[(1,)](*args)
        assert kernel.hash == stock[(1,)](*args).hash
        return any(fast)

    def learn():
        ours[(1,)](*args)
        ours[(1,)](*args)
        assert taken()

    learn()
    events = []
    knobs.runtime.launch_enter_hook.add(events.append)
    knobs.runtime.launch_exit_hook.add(events.append)
    try:
        assert not taken()
        metadata, enter, leave = null.hooks
        assert metadata.get()["name"] == "plain"
        assert enter.calls == leave.calls == [events.append]
    finally:
        knobs.runtime.launch_enter_hook.remove(events.append)
        knobs.runtime.launch_exit_hook.remove(events.append)
    assert taken()
    hook = events.append
    plain.add_pre_run_hook(lambda *_, **__: hook("pre"))
    try:
        events.clear()
        assert not taken()
        assert events == ["pre", "pre"]
    finally:
        plain.pre_run_hooks.clear()
    assert taken()
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        assert not taken()
    learn()
    with monkeypatch.context() as changed:
        changed.setattr(plain, "debug", True)
        assert not taken()
    learn()


def test_another_driver_and_other_configs_are_noticed(null, fast):
    stock, ours = both(plain)
    args = (STORAGE, STORAGE, 16, 1, 1.0, True, None)
    for _ in range(3):
        ours[(1,)](*args)
    assert fast[-1]
    other = Recording()
    driver.set_active(other)
    for kernel in (stock, ours):
        kernel[(1,)](*args)
    assert not fast[-1]
    driver.set_active(null)
    for _ in range(3):
        ours[(1,)](*args)
    assert fast[-1]
    ours.configs = [CONFIGS[1]]
    ours[(1,)](*args)
    assert not fast[-1]
    assert ours.best_config is CONFIGS[1]


def test_winners_that_are_changed_are_followed(null, fast):
    _, ours = both(plain)
    args = (STORAGE, STORAGE, 16, 1, 1.0, True, None)
    for _ in range(3):
        ours[(1,)](*args)
    assert fast[-1]
    (key,) = ours.cache
    ours.cache[key] = CONFIGS[1]
    ours[(1,)](*args)
    assert ours.best_config is CONFIGS[1]
    again = copy.copy(ours)
    again[(1,)](*args)
    ours.cache.clear()
    fast.clear()
    ours[(1,)](*args)
    assert not any(fast)
    ours.cache = {key: CONFIGS[1]}
    fast.clear()
    ours[(1,)](*args)
    assert not any(fast)
    assert ours.best_config is CONFIGS[1]


def test_a_changed_global_is_upstreams_error(null, monkeypatch):
    stock, ours = both(reads_global)
    for kernel in (stock, ours):
        for _ in range(3):
            kernel[(1,)](STORAGE, 16)
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", tl.constexpr(4))
    messages = []
    for kernel in (stock, ours):
        with pytest.raises(RuntimeError, match="Global variable LIMIT has changed") as error:
            kernel[(1,)](STORAGE, 16)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_config_hooks_and_foreign_arguments_go_upstreams_way(null, fast):
    seen = []
    configs = [triton.Config({"BLOCK": 16}, num_warps=1, pre_hook=lambda given: seen.append(given["n"]))]
    stock, ours = both(plain, configs=configs)
    args = (STORAGE, STORAGE, 16, 1, 1.0, True, None)
    for _ in range(3):
        stock[(1,)](*args)
    assert seen == [16] * 3
    for _ in range(3):
        ours[(1,)](*args)
    assert seen == [16] * 6
    assert not any(fast)

    class Pointer:
        dtype = torch.float32

        def data_ptr(self):
            return 64

    _, ours = both(plain)
    for _ in range(3):
        ours[(1,)](Pointer(), STORAGE, 16, 1, 1.0, True, None)
    assert not any(fast)


@pytest.mark.parametrize("word", ["grid", "warmup"])
def test_words_of_the_launch_itself_are_no_arguments(null, word):
    stock, ours = both(plain)
    args = (STORAGE, STORAGE, 16, 1, 1.0, True, None)
    for kernel in (stock, ours):
        for learnt in range(3):
            if learnt:
                kernel[(1,)](*args)
            with pytest.raises(TypeError, match=f"multiple values for keyword argument '{word}'"):
                kernel[(1,)](*args, **{word: (2,)})


def test_memory_is_bounded(null):
    _, ours = both(plain, buckets={"n": "pow2"})
    for n in range(1, 3 * launcher.LARGEST):
        ours[(1,)](STORAGE, STORAGE, n, 1, 1.0, True, None)
    (variant,) = ours._launcher.variants.values()
    assert len(variant.__globals__["EXACT"]) <= launcher.LARGEST
    assert len(variant.__globals__["TABLE"]) < 60
    assert len(ours.cache) < 60


def test_what_is_replaced_on_an_autotuner_is_followed(null, fast):
    """As stock: another function, a copy with winners of its own, a hook or a wrapped method after the first launch."""
    _, ours = both(plain)
    args = (STORAGE, STORAGE, 16, 1, 1.0, True, None)
    for _ in range(3):
        ours[(1,)](*args)
    assert fast[-1]
    twin = copy.copy(ours)
    twin.cache = dict.fromkeys(ours.cache, CONFIGS[1])
    for _ in range(3):
        twin[(1,)](*args)
        assert twin.best_config is CONFIGS[1]
        ours[(1,)](*args)
        assert ours.best_config is CONFIGS[0]
    calls = []
    own = triton.Config({"BLOCK": 16}, num_warps=1)
    _, hooked = both(plain, configs=[own, CONFIGS[1]])
    for _ in range(3):
        hooked[(1,)](*args)
    own.pre_hook = lambda given: calls.append(given["n"])
    hooked[(1,)](*args)
    assert calls == [16]
    winners = hooked.cache
    winners |= dict.fromkeys(winners, CONFIGS[1])
    hooked[(1,)](*args)
    assert hooked.best_config is CONFIGS[1]


def test_a_launch_within_a_grid_function_is_not_taken_for_the_outer_one(null):
    stock, ours = both(plain)
    seen = {}
    for name, kernel in (("stock", stock), ("ours", ours)):
        for n in (16, 17):  # tuned before: stock itself cannot be launched within its own benchmarks
            kernel[(1,)](STORAGE, STORAGE, n, 1, 1.0, True, None)

        def grid(meta, kernel=kernel):
            if meta["n"] == 16:
                kernel[(1,)](STORAGE, STORAGE, 17, 1, 1.0, True, None, KIND="none")
            return (meta["BLOCK"],)

        rows = []
        for _ in range(4):
            null.seen.clear()
            kernel[grid](STORAGE, STORAGE, 16, 1, 1.0, False, None)  # first seen here: learnt around the inner one
            rows.append([(row[1], row[2], row[3][2:]) for row in null.seen])
        seen[name] = rows
    assert seen["ours"] == seen["stock"]


def test_a_launch_that_cannot_compile_spoils_nothing(null):
    _, ours = both(plain)
    with pytest.raises(tcache.TcacheError, match="every config failed"):
        ours[(1,)](STORAGE, STORAGE, 16, None, 1.0, True, None)
    assert ours[(1,)](STORAGE, STORAGE, 16, 1, 1.0, True, None) is not None
