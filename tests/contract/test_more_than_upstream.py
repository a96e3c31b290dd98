"""What tcache.autotune has beyond upstream's: buckets, compact spaces, on_untuned, adoption, counters."""

from __future__ import annotations

import gc
import json
import sys
import types
from pathlib import Path

import pytest
import triton
import triton.language as tl

import tcache
from tcache.active import activate
from tcache.errors import CacheMiss, KernelError, UnsupportedValue

sys.path.insert(0, str(Path(__file__).parent))
from test_autotuner import CONFIGS, Bench, base, edited, gpu, launch, tuned  # noqa: F401 - gpu is a fixture


@triton.jit
def other(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32) * 3, mask=o < n)


@pytest.fixture(autouse=True)
def clean_other(gpu):  # noqa: F811 - before the null driver goes, as its own kernels do
    for kernel in (other, with_odd):
        kernel.device_caches.clear()
    yield
    for kernel in (other, with_odd):
        kernel.device_caches.clear()
    gc.collect()


@pytest.mark.parametrize(
    ("spec", "same", "different"),
    [
        ("pow2", (3, 4), (4, 5)),
        ("log2", (4, 7), (7, 8)),
        ("multiple:16", (17, 32), (32, 33)),
        ([16, 64], (17, 64), (64, 65)),
        ([16, 64], (65, 10**9), (16, 17)),
        (lambda n: n % 2, (1, 3), (1, 2)),
    ],
)
def test_sizes_of_a_bucket_share_a_winner(tmp_path, spec, same, different):
    activate(store=tmp_path, mode="tune")
    bench = Bench()
    kernel = tuned(bench, buckets={"n": spec})
    launch(kernel, n=same[0])
    assert len(bench.asked) == 3
    launch(kernel, n=same[1])
    assert len(bench.asked) == 3
    launch(tuned(bench, buckets={"n": spec}), n=different[0])
    asked = len(bench.asked)
    launch(kernel, n=different[1])
    assert len(bench.asked) == asked + 3


def test_another_bucketing_is_another_meaning(tmp_path):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench(), buckets={"n": "pow2"}), n=16)
    record = json.loads(next(tmp_path.glob("*/*.json")).read_text())
    assert record["kernel"]["buckets"] == {"n": "pow2"}
    bench = Bench()
    launch(tuned(bench), n=16)
    assert bench.asked == [16, 32, 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": {"n": "pow3"}}, "bucket 'pow3' is unknown"),
        ({"buckets": {"n": "multiple:0"}}, "is unknown"),
        ({"buckets": {"n": [64, 16]}}, "is unknown"),
        ({"buckets": {"m": "pow2"}}, "'m' is not in key"),
        ({"on_untuned": "guess"}, "expected one of tune, nearest, default, error"),
        ({"where": bool}, "goes with a compact config space"),
        ({"configs": {"BLOCK": []}}, "BLOCK needs a list of values"),
        ({"configs": {"BLOCK": "16"}}, "BLOCK needs a list of values"),
        ({"configs": {"BLOCK": [16]}, "where": lambda _: False}, "keeps no combination"),
    ],
)
def test_mistakes_are_said_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        tcache.autotune(**{"configs": CONFIGS, "key": ["n"], **options})


def test_a_compact_space():
    space = {"BLOCK": [16, 32], "num_warps": [1, 2], "num_stages": [2]}
    kernel = tcache.autotune(space, key=["n"], where=lambda row: row["BLOCK"] >= 32 or row["num_warps"] == 1)(base)
    assert kernel.configs == [
        triton.Config({"BLOCK": 16}, num_warps=1, num_stages=2),
        triton.Config({"BLOCK": 32}, num_warps=1, num_stages=2),
        triton.Config({"BLOCK": 32}, num_warps=2, num_stages=2),
    ]


def test_on_untuned(tmp_path):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()), n=16)
    bench = Bench()
    assert launch(tuned(bench, on_untuned="nearest"), n=48) == 32
    assert launch(tuned(bench, on_untuned="default"), n=48) == 16
    with pytest.raises(CacheMiss, match="never tuned"):
        launch(tuned(bench, on_untuned="error"), n=48)
    assert bench.asked == []
    activate(store=tmp_path, mode="frozen")
    for choice in ("tune", "nearest", "default"):
        with pytest.raises(CacheMiss):
            launch(tuned(bench, on_untuned=choice), n=48)
    activate(store=tmp_path, mode="lookup")
    assert launch(tuned(bench, on_untuned="tune"), n=48) == 32
    assert bench.asked == []


def test_a_nearest_config_that_does_not_fit_falls_to_the_next(tmp_path, monkeypatch):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()), n=1024)  # 32 wins
    monkeypatch.setitem(sys.modules["test_autotuner"].TIMES, 64, 0.1)
    launch(tuned(Bench()), n=64)  # 64 wins
    activate(store=tmp_path, mode="lookup")
    run = triton.JITFunction.run

    def small(self, *args, **kwargs):
        if kwargs["BLOCK"] == 64 and not kwargs["warmup"]:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", small)
    assert launch(tuned(Bench()), n=65) == 32


def module_of(name, **values):
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
    return module


def test_adopting_stock_kernels(tmp_path):
    activate(store=tmp_path, mode="tune")
    first, second = Bench(), Bench()
    stock = triton.autotune(CONFIGS, key=["n"], do_bench=first)(other)
    decorated = triton.heuristics({})(triton.autotune(CONFIGS, key=["n"], do_bench=second)(edited))
    library = module_of("some_library.ops", kernel=stock, also=stock, heuristic=decorated, plain=other)
    elsewhere = [stock]  # a reference that nobody told us of
    names = tcache.adopt(library)
    assert names == sorted([f"{__name__}:other", "test_autotuner:base"])
    assert elsewhere[0] is stock
    assert launch(stock) == 32
    assert launch(decorated) == 32
    assert tcache.adopt("some_library.ops") == names  # again: nothing changes
    again = Bench()
    fresh = triton.autotune(CONFIGS, key=["n"], do_bench=again)(other)
    tcache.adopt(fresh)
    assert launch(fresh) == 32
    assert again.asked == []
    assert first.asked == second.asked == [16, 32, 64]
    untouched = triton.autotune(CONFIGS, key=["n"], do_bench=Bench())(other)
    assert type(untouched) is triton.runtime.autotuner.Autotuner


class OwnTuner(triton.runtime.autotuner.Autotuner):
    """A library's subclass, as fla-core has one: looks somewhere, then leaves the rest to upstream."""

    asked = 0

    def run(self, *args, **kwargs):
        OwnTuner.asked += 1
        return super().run(*args, **kwargs)


class WilfulTuner(triton.runtime.autotuner.Autotuner):
    """One that always has its way."""

    def run(self, *args, **kwargs):
        for key in self.cache:
            self.cache[key] = self.configs[2]
        return super().run(*args, **kwargs)


class HoardingTuner(triton.runtime.autotuner.Autotuner):
    """One whose winners live in a cache of its own, as FlagGems's do in a data base."""

    class Cache(dict):
        pass

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cache = self.Cache()


def of_class(kind, bench):
    return kind(other, other.arg_names, CONFIGS, ["n"], None, None, do_bench=bench)


def test_a_librarys_own_subclass_is_served_and_stays_in_place(tmp_path):
    activate(store=tmp_path, mode="tune")
    bench, before = Bench(), OwnTuner.asked
    kernel = of_class(OwnTuner, bench)
    assert tcache.adopt(kernel) == tcache.adopt(kernel) == [f"{__name__}:other"]
    assert isinstance(kernel, OwnTuner)
    assert isinstance(kernel, sys.modules["tcache.autotuner"].Autotuner)
    assert type(kernel).__name__ == "OwnTuner"
    assert launch(kernel) == 32
    again = of_class(OwnTuner, Bench())
    tcache.adopt(again)
    assert type(again) is type(kernel)
    assert launch(again) == 32
    assert again._do_bench.asked == []
    assert OwnTuner.asked == before + 2
    assert type(of_class(OwnTuner, Bench())) is OwnTuner


class Entry(triton.runtime.jit.KernelInterface):
    """A library's own wrapper around an autotuner."""

    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs)


def test_an_autotuner_below_a_librarys_wrapper_is_found(tmp_path):
    activate(store=tmp_path, mode="tune")
    bench = Bench()
    wrapped = Entry(triton.heuristics({})(triton.autotune(CONFIGS, key=["n"], do_bench=bench)(other)))
    assert tcache.adopt(module_of("wrapping_library", kernel=wrapped, plain=Entry(other))) == [f"{__name__}:other"]
    assert launch(wrapped) == 32
    assert type(wrapped.fn.fn) is sys.modules["tcache.autotuner"].Autotuner


def test_a_subclass_that_overrules_the_store_is_named(tmp_path, caplog):
    activate(store=tmp_path, mode="tune")
    kernel = of_class(WilfulTuner, Bench())
    tcache.adopt(kernel)
    assert launch(kernel) == 64
    assert f"{__name__}.WilfulTuner overrules the store for {__name__}:other" in caplog.text


def test_a_subclass_with_a_cache_of_its_own_is_left_alone(tmp_path, caplog):
    activate(store=tmp_path, mode="tune")
    kernel = of_class(HoardingTuner, Bench())
    with pytest.raises(KernelError, match="HoardingTuner keeps its winners in a cache of its own"):
        tcache.adopt(kernel)
    stock = triton.autotune(CONFIGS, key=["n"])(other)
    assert tcache.adopt(module_of("mixed_library", kernel=kernel, stock=stock)) == [f"{__name__}:other"]
    assert "HoardingTuner keeps its winners" in caplog.text
    assert type(kernel) is HoardingTuner


@triton.jit
def with_odd(x_ptr, n, BLOCK: tl.constexpr, ODD: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32) * 3, mask=o < n)


def decorated_with(what, bench, on_untuned):
    if what == "key":  # a tensor
        return tcache.autotune(CONFIGS, key=["x_ptr"], do_bench=bench, on_untuned=on_untuned)(other)
    configs = [triton.Config({"BLOCK": block, "ODD": lambda: 0}, num_warps=1) for block in (16, 32, 64)]
    return tcache.autotune(configs, key=["n"], do_bench=bench, on_untuned=on_untuned)(with_odd)


@pytest.mark.parametrize("what", ["key", "config"])
def test_what_has_no_text(tmp_path, what):
    """Such a shape has no place in a store: tuned in memory where tuning is allowed, and nowhere else."""
    activate(store=tmp_path, mode="tune")
    kernel = decorated_with(what, Bench(), None)
    assert launch(kernel) == 32
    assert len(kernel._do_bench.asked) == 3
    for mode, on_untuned in (("lookup", None), ("tune", "nearest"), ("tune", "default")):
        activate(store=tmp_path, mode=mode)
        kernel = decorated_with(what, Bench(), on_untuned)
        assert launch(kernel) == 16
        assert kernel._do_bench.asked == []
    for mode, on_untuned in (("frozen", None), ("tune", "error")):
        activate(store=tmp_path, mode=mode)
        kernel = decorated_with(what, Bench(), on_untuned)
        with pytest.raises(UnsupportedValue, match="cannot be part of a persistent key"):
            launch(kernel)
    assert not list(tmp_path.glob("*/*.json"))


def test_adopting_by_pattern(tmp_path):
    stock = triton.autotune(CONFIGS, key=["n"])(other)
    module_of("another_library.ops", kernel=stock)
    assert tcache.adopt(f"{other.__module__}:oth*") == [f"{other.__module__}:other"]
    assert isinstance(stock, sys.modules["tcache.autotuner"].Autotuner)
    with pytest.raises(KernelError, match="nothing to adopt"):
        tcache.adopt("no.such.module.*")
    with pytest.raises(KernelError, match="nothing to adopt"):
        tcache.adopt(other)


def test_counters(tmp_path):
    before = tcache.stats()
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()))
    launch(tuned(Bench()))
    launch(tuned(Bench(), kernel=edited))
    activate(store=tmp_path, mode="frozen")
    with pytest.raises(CacheMiss):
        launch(tuned(Bench()), n=5)
    after = tcache.stats()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {"tuned": 2, "hits": 1, "stale": 1, "misses": 1}


def test_no_benchmark_while_a_graph_is_captured(tmp_path, monkeypatch):
    activate(store=tmp_path, mode="tune")
    monkeypatch.setattr("tcache.autotuner._capturing", lambda: True)
    bench = Bench()
    with pytest.raises(CacheMiss, match="while a CUDA graph is being captured"):
        launch(tuned(bench))
    assert bench.asked == []
    monkeypatch.setattr("tcache.autotuner._capturing", lambda: False)
    launch(tuned(bench))
    monkeypatch.setattr("tcache.autotuner._capturing", lambda: True)
    assert launch(tuned(bench)) == 32  # what is stored is used
