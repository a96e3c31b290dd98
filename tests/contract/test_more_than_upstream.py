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
from tcache.errors import CacheMiss, KernelError

sys.path.insert(0, str(Path(__file__).parent))
from test_autotuner import CONFIGS, Bench, base, edited, gpu, launch, tuned  # noqa: F401 - gpu is a fixture


@triton.jit
def other(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32) * 3, mask=o < n)


@pytest.fixture(autouse=True)
def clean_other(gpu):  # noqa: F811 - before the null driver goes, as its own kernels do
    other.device_caches.clear()
    yield
    other.device_caches.clear()
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
    assert after.pop("reasons")["untuned"] == before.pop("reasons").get("untuned", 0) + 1
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    compiled = changed.pop("compiled", 0)  # by the overlay's writable layer, of kernels that earlier tests did not run
    assert changed == {"tuned": 2, "hits": 1, "stale": 1, "misses": 1}
    assert compiled >= 0


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
