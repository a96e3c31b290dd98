"""tcache.autotune on a driver that compiles for real and launches nothing."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

import tcache
from tcache.active import activate
from tcache.errors import CacheMiss, StoreError, TcacheError
from tcache.keys.config import config_key

sys.path.insert(0, str(Path(__file__).parent))
import null_driver

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32, 64)]
TIMES = {16: 3.0, 32: 1.0, 64: 2.0, 128: 0.5}


@triton.jit
def base(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@triton.jit
def edited(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32) + 1, mask=o < n)


edited.fn.__qualname__ = edited.__qualname__ = "base"  # the same kernel after an edit


@pytest.fixture(autouse=True)
def gpu(monkeypatch, triton_cache):
    monkeypatch.setenv("TCACHE_GPU_NAME", "NVIDIA H200")
    before = driver._active
    base.device_caches.clear()
    edited.device_caches.clear()
    yield null_driver.activate()
    base.device_caches.clear()
    edited.device_caches.clear()
    gc.collect()  # since 3.8 a kernel unloads its module when it goes: the driver must still be there
    driver._active = before


class Bench:
    """Stands for the benchmark: launches once, answers from TIMES, and notes what it was asked for."""

    def __init__(self, fails=()):
        self.asked = []
        self.fails = fails

    def __call__(self, call, quantiles):
        call()
        block = null_driver.driver.active.launches[-1][1][(2,)]
        self.asked.append(block)
        if block in self.fails:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return [TIMES[block] * factor for factor in (1.0, 0.9, 1.1)]


def tuned(bench, configs=CONFIGS, kernel=base, **more):
    return tcache.autotune(configs=configs, key=["n"], do_bench=bench, **more)(kernel)


def launch(kernel, n=16):
    x = torch.zeros(64)
    kernel[(1,)](x, n)
    return null_driver.driver.active.launches[-1][1][(2,)]


def test_tunes_once_and_then_never_again(tmp_path):
    activate(store=tmp_path, mode="tune")
    bench = Bench()
    kernel = tuned(bench)
    assert launch(kernel) == 32
    assert bench.asked == [16, 32, 64]
    assert launch(kernel) == 32
    again = Bench()
    assert launch(tuned(again)) == 32  # another process would see the same
    assert again.asked == []
    assert bench.asked == [16, 32, 64]
    assert kernel.best_config == CONFIGS[1]
    record = json.loads((tmp_path / "nvidia-h200" / "test_autotuner.base.json").read_text())
    [(shape, entry)] = record["entries"].items()
    assert shape == "n=16 | x_ptr=torch.float32"
    assert entry["config"] == config_key(CONFIGS[1])
    assert entry["timings"][config_key(CONFIGS[0])] == {"median_ms": 3.0, "p20_ms": 2.7, "p80_ms": 3.3}
    assert entry["triton"] == triton.__version__


def test_is_an_upstream_autotuner():
    assert isinstance(tuned(Bench()), triton.runtime.autotuner.Autotuner)


def test_only_what_is_new_is_benchmarked(tmp_path):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()))
    bench = Bench()
    more = [*CONFIGS, triton.Config({"BLOCK": 128}, num_warps=1)]
    assert launch(tuned(bench, more)) == 128
    assert bench.asked == [128]
    bench = Bench()
    assert launch(tuned(bench, [CONFIGS[0], CONFIGS[2]])) == 64  # the winner was removed: the next best
    assert bench.asked == []


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    activate(store=tmp_path, mode="tune")

    class Killed(BaseException):
        pass

    class Dying(Bench):
        def __call__(self, call, quantiles):
            if len(self.asked) == 2:
                raise Killed
            return super().__call__(call, quantiles)

    with pytest.raises(Killed):
        launch(tuned(Dying()))
    bench = Bench()
    assert launch(tuned(bench)) == 32
    assert bench.asked == [64]


def test_an_edited_kernel_is_stale(tmp_path):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()))
    activate(store=tmp_path, mode="frozen")
    with pytest.raises(CacheMiss, match="stale: the kernel's source changed"):
        launch(tuned(Bench(), kernel=edited))
    activate(store=tmp_path, mode="tune")
    bench = Bench()
    launch(tuned(bench, kernel=edited))
    assert bench.asked == [16, 32, 64]


def test_failures_are_recorded_with_their_reason_and_not_tried_again(tmp_path):
    activate(store=tmp_path, mode="tune")
    assert launch(tuned(Bench(fails=[32]))) == 64
    text = (tmp_path / "nvidia-h200" / "test_autotuner.base.json").read_text()
    assert (
        '{"failed": "OutOfResources: out of resource: shared memory, Required: 300000, Hardware limit: 232448' in text
    )
    bench = Bench()
    assert launch(tuned(bench)) == 64
    assert bench.asked == []


def test_every_config_failing_is_an_error_and_not_a_guess(tmp_path):
    activate(store=tmp_path, mode="tune")
    with pytest.raises(TcacheError, match="every config failed"):
        launch(tuned(Bench(fails=[16, 32, 64])))


def test_frozen_never_benchmarks_and_names_everything(tmp_path):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()), n=16)
    activate(store=tmp_path, mode="frozen")
    bench = Bench()
    with pytest.raises(CacheMiss) as error:
        launch(tuned(bench), n=4096)
    assert bench.asked == []
    text = str(error.value)
    for part in (
        "test_autotuner:base",
        "NVIDIA H200",
        "n=4096 | x_ptr=torch.float32",
        "nearest tuned shape: n=16",
        "tune",
    ):
        assert part in text


def test_lookup_uses_the_nearest_and_never_benchmarks(tmp_path, caplog):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()), n=16)
    activate(store=tmp_path, mode="lookup")
    bench = Bench()
    kernel = tuned(bench)
    assert launch(kernel, n=4096) == 32
    assert "uses [n=16 | x_ptr=torch.float32]'s config" in caplog.text
    activate(store=tmp_path / "empty", mode="lookup")
    assert launch(tuned(bench)) == 16
    assert bench.asked == []


def test_a_damaged_store_is_an_error_and_not_a_retune(tmp_path):
    activate(store=tmp_path, mode="tune")
    path = tmp_path / "nvidia-h200" / "test_autotuner.base.json"
    path.parent.mkdir()
    path.write_text("{")
    bench = Bench()
    with pytest.raises(StoreError, match="corrupt"):
        launch(tuned(bench))
    assert bench.asked == []


def test_without_a_writable_store_results_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("tcache.active.default_store", lambda: None)
    activate(mode="tune")
    bench = Bench()
    kernel = tuned(bench)
    assert launch(kernel) == 32
    assert launch(kernel) == 32
    assert bench.asked == [16, 32, 64]


def test_unpersistable_keys_are_tuned_in_memory_as_upstream_does(tmp_path, caplog):
    activate(store=tmp_path, mode="tune")

    bench = Bench()
    kernel = tcache.autotune(configs=CONFIGS, key=["x_ptr"], do_bench=bench)(base)  # a tensor as key
    x = torch.zeros(64)
    kernel[(1,)](x, 16)
    kernel[(1,)](x, 16)
    assert bench.asked == [16, 32, 64]
    assert kernel.best_config == CONFIGS[1]
    assert "tuned in memory only" in caplog.text
    assert not (tmp_path / "nvidia-h200").exists()


def hooks(seen):
    def pre(kwargs, reset_only=False):
        seen.append(("pre", reset_only))

    def post(kwargs, exception):
        seen.append(("post", exception))

    def own(kwargs):
        seen.append(("config", kwargs["BLOCK"]))

    configs = [triton.Config({"BLOCK": block}, num_warps=1, pre_hook=own) for block in (16, 32)]
    return {"configs": configs, "pre_hook": pre, "post_hook": post}


def test_a_hit_runs_upstreams_hook_sequence(tmp_path):
    activate(store=tmp_path, mode="tune")
    sequences = []
    for make in (triton.autotune, tcache.autotune, tcache.autotune):  # the third finds the second's winner
        seen = []
        kernel = make(key=["n"], do_bench=Bench(), **hooks(seen))(base)
        launch(kernel)
        first = list(seen)
        seen.clear()
        launch(kernel)
        sequences.append((first, list(seen)))
    upstream, cold, warm = sequences
    # compiling ahead runs a config's own hook once more, before binding; all else is upstream's order
    assert [step for step in cold[0] if step[0] != "config"] == [step for step in upstream[0] if step[0] != "config"]
    assert cold[1] == upstream[1]
    assert warm[1] == upstream[1]
    assert warm[0] == upstream[1]  # a first launch that hits equals upstream's launch with a known winner


def test_values_are_reset_and_restored_while_tuning(tmp_path):
    activate(store=tmp_path, mode="tune")
    x = torch.ones(64)
    seen = []

    class Looking(Bench):
        def __call__(self, call, quantiles):
            x.fill_(7)
            found = super().__call__(call, quantiles)
            seen.append(float(x.sum()))
            return found

    tuned(Looking(), reset_to_zero=["x_ptr"])[(1,)](x, 16)
    assert seen == [0.0, 0.0, 0.0]
    assert float(x.sum()) == 0.0
    seen.clear()
    tuned(Looking(), restore_value=["x_ptr"], kernel=edited)[(1,)](x, 16)
    assert seen == [7.0 * 64] * 3


def test_one_config_needs_no_store(tmp_path):
    activate(store=tmp_path, mode="lookup")
    assert launch(tcache.autotune(configs=CONFIGS[:1], key=["n"])(base)) == 16


def test_an_aged_winner_is_used_with_one_notice(tmp_path, caplog):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()))
    path = tmp_path / "nvidia-h200" / "test_autotuner.base.json"
    path.write_text(path.read_text().replace(f'"triton": "{triton.__version__}"', '"triton": "3.5.9"'))
    activate(store=tmp_path, mode="frozen")
    assert launch(tuned(Bench())) == 32
    assert launch(tuned(Bench())) == 32
    assert caplog.text.count("tuned under Triton 3.5.9") == 1
