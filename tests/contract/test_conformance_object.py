"""What tcache.autotune makes is what triton.autotune makes: to Python, to who listens, and to torch.compile."""

from __future__ import annotations

import copy as copying
import inspect
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs

import tcache

sys.path.insert(0, str(Path(__file__).parent))
from recording import X, configs, fill, launched, printed, simple, stage_of, staged, state, stock


def test_what_an_upstream_autotuner_has(both):
    def make(decorate):
        kernel = decorate(configs=CONFIGS, key=["n"], reset_to_zero=["x_ptr"])(fill)
        assert isinstance(kernel, triton.runtime.autotuner.Autotuner)
        return kernel

    CONFIGS = configs()
    upstream, found = make(stock), make(both.decorate)
    assert set(dir(upstream)) <= set(dir(found))
    for name, value in vars(upstream).items():
        if not inspect.isfunction(value):  # the hooks that upstream makes for each object
            assert vars(found)[name] == value, name
    assert found.configs is CONFIGS
    assert found.fn is found.base_fn.__globals__["fill"]
    for method in ("run", "warmup", "prune_configs", "check_disk_cache", "__getitem__"):
        assert inspect.signature(getattr(found, method)).parameters.keys() == (
            inspect.signature(getattr(upstream, method)).parameters.keys()
        )
    assert type(found).__name__ == "Autotuner"


@pytest.mark.parametrize("stored", [False, True])
def test_the_winner_is_the_object_that_was_given(both, stored):
    given = configs()
    for _ in range(1 + stored):
        with stage_of(both.decorate, both.store) as stage:
            kernel = simple(stage, given=given)
            kernel[(1,)](X, 16)
    assert len(launched(stage.events)) == (1 if stored else 4)
    assert kernel.best_config is given[1]
    assert all(any(config is each for each in given) for config in kernel.configs_timings)


def test_a_kernel_adopted_after_it_was_used(both):
    with stage_of(stock, both.store) as stage:
        kernel = simple(stage)
        stage.launch(kernel, X, 16)
        assert tcache.adopt(kernel) == ["recording:fill"]
        stage.launch(kernel, X, 16)  # upstream's winner of this process stays
        stage.launch(kernel, X, 17)
        stage.launch(kernel, X, 17)
    assert launched(stage.events) == [16, 32, 64, 32, 32, 16, 32, 64, 32, 32]
    with stage_of(both.decorate, both.store) as stage:
        stage.launch(simple(stage), X, 17)
        assert launched(stage.events) == [32]
        stage.launch(simple(stage), X, 16)  # what upstream tuned is not in the store
        assert launched(stage.events) == [32, 16, 32, 64, 32]


def test_what_people_do_to_an_autotuner(both):
    def scenario(stage):
        kernel = simple(stage)
        kernel.run(X, 16, grid=(1,), warmup=False)
        kernel.cache[(17, "torch.float32")] = kernel.configs[2]  # a winner of one's own
        stage.launch(kernel, X, 17)
        kernel.fn[(1,)](X, 16, BLOCK=16)  # without tuning
        kernel.configs = kernel.configs[:1]  # one config from now on
        stage.launch(kernel, X, 16)
        stage.launch(kernel, X, 18)

    assert launched(both.same(scenario)) == [16, 32, 64, 32, 64, 16, 16, 16]


def test_a_cleared_cache_is_filled_from_the_store(both):
    def scenario(stage):
        kernel = simple(stage)
        stage.launch(kernel, X, 16)
        kernel.cache.clear()
        stage.launch(kernel, X, 16)

    upstream, found = both.apart(scenario)
    # upstream tunes again; tcache does not benchmark what the store knows
    assert launched(upstream) == [16, 32, 64, 32] * 2
    assert launched(found) == [16, 32, 64, 32, 32]
    assert upstream[-1] == found[-1]


def test_cache_results_is_the_stores_business(both, monkeypatch):
    """Upstream's records know no GPU name: tcache neither reads nor writes them, whoever asks for them."""
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    for options in ({}, {"cache_results": True}):
        assert stock(configs=configs(), key=["n"], **options)(fill).cache_results is True
        assert both.decorate(configs=configs(), key=["n"], **options)(fill).cache_results is False


def test_the_signature_is_upstreams_and_more():
    upstream = list(inspect.signature(triton.autotune).parameters.values())
    found = list(inspect.signature(tcache.autotune).parameters.values())
    assert len(upstream) == 12
    for theirs, mine in zip(upstream, found, strict=False):
        assert (theirs.name, theirs.default, theirs.kind) == (mine.name, mine.default, mine.kind)
    assert all(more.kind is inspect.Parameter.KEYWORD_ONLY for more in found[len(upstream) :])


@pytest.mark.parametrize("how", [pickle.dumps, copying.copy, copying.deepcopy])
@pytest.mark.parametrize("tuned", [False, True])
def test_copies_and_pickles(both, how, tuned):
    def scenario(stage):
        kernel = simple(stage)
        if tuned:
            stage.launch(kernel, X, 16)
        try:
            again = how(kernel)
        except Exception as error:
            stage.note("refused", type(error), str(error).partition(" at 0x")[0].partition("<")[0])
            return
        assert type(again) is type(kernel)
        stage.note("copied")
        stage.launch(again, X, 16)
        stage.note("shared", kernel.cache is again.cache)

    found = both.same(scenario)
    assert [event[0] for event in found if event[0] in ("copied", "refused")]
    if how is copying.copy:
        assert found[-1] == ("shared", True)
        assert launched(found)[-1] == 32


def test_warmup_compiles_every_config_and_launches_none(both):
    def scenario(stage):
        kernel = simple(stage, prune_configs_by={"early_config_prune": lambda given, *_, **__: given[1:]})
        made = kernel.warmup(X, 16, grid=(1,))
        stage.note("made", [(each.src.constants[(2,)], each.metadata.num_warps) for each in made])
        stage.note("after", kernel.cache, kernel.nargs, hasattr(kernel, "best_config"))

    found = both.same(scenario)
    assert found == [("made", [(32, 1), (64, 1)]), ("after", {}, None, False)]
    assert not both.store.exists()


@pytest.mark.parametrize("how", ["warmup", "launch"])
def test_compiling_asynchronously(both, how, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)

    def scenario(stage):
        kernel = simple(stage)
        with ThreadPoolExecutor(2) as pool, triton.AsyncCompileMode(pool):
            if how == "warmup":
                made = kernel.warmup(X, 16, grid=(1,))
                stage.note("made", [type(each).__name__ for each in made])
            else:
                stage.launch(kernel, X, 16)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    if how == "warmup":
        assert found[0] == ("made", ["FutureKernel"] * 3)
    assert launched(found) == [16, 32, 64, 32] + [32] * (how == "launch")


def test_an_autotuner_over_an_autotuner(both):
    def scenario(stage):
        widths = [triton.Config({"WIDTH": width}, num_warps=1) for width in (2, 4)]
        inner = stage.autotune(configs=widths, key=["n"], do_bench=stage.bench)(staged)
        outer = stage.autotune(configs=configs(16, 32), key=["n"], do_bench=stage.bench)(inner)
        stage.launch(outer, X, 16)

    found = both.same(scenario)  # upstream: each would pass num_warps
    assert found[-1][:2] == ("raised", TypeError)
    assert "multiple values for keyword argument" in found[-1][2]


def test_what_is_printed(both, monkeypatch):
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")

    def scenario(stage):
        given = [triton.Config({"BLOCK": 32}, num_warps=64), *configs(16, 64)]
        kernel = simple(stage, given=given)
        with printed(stage):
            stage.launch(kernel, X, 16)
            stage.launch(kernel, X, 16)

    found = both.same(scenario)
    lines = [event[1] for event in found if event[0] == "printed"]
    assert lines[0].startswith("Autotuning kernel fill with config BLOCK: 32")
    assert lines[1].startswith("Autotuning failed with out of resource: threads")
    assert lines[4:6] == ["Triton autotuning for function fill,", "with key as (16, 'torch.float32'),"]
    assert lines[6].startswith("finished after TIME,best config") or lines[6] == "finished after TIME,"
    assert lines[7].startswith("best config selected: BLOCK: 64")
    assert len(lines) == 8
    with stage_of(both.decorate, both.store) as stage:  # nothing was tuned, nothing is said
        scenario(stage)
        assert not stage.named("printed")


@pytest.mark.skipif(not hasattr(knobs.autotuning, "listener"), reason="since 3.8")
def test_the_listener_hears_of_tuning_and_of_stored_results(both, monkeypatch):
    def scenario(stage):
        def listen(*, fn, key, best_config, configs_timings, duration, cache_hit):
            timings = {str(config): times for config, times in configs_timings.items()}
            stage.note("heard", fn, key, str(best_config), timings, duration is None, cache_hit)

        monkeypatch.setattr(knobs.autotuning, "listener", listen)
        kernel = simple(stage)
        stage.launch(kernel, X, 16)
        stage.launch(kernel, X, 16)
        monkeypatch.setattr(knobs.autotuning, "listener", None)

    found = both.same(scenario)
    [heard] = [event for event in found if event[0] == "heard"]
    assert heard[1:4] == (fill, (16, "torch.float32"), str(configs()[1]))
    assert heard[5:] == (False, False)
    assert found.index(heard) == len(found) - 5  # before the launch
    with stage_of(both.decorate, both.store) as stage:  # as upstream says it of its own record of results
        scenario(stage)
        assert stage.named("heard") == [(*heard[1:5], True, True)]


def test_bench_time_and_timings_are_set(both):
    def scenario(stage):
        kernel = simple(stage)
        stage.note("before", hasattr(kernel, "bench_time"), hasattr(kernel, "configs_timings"))
        stage.launch(kernel, X, 16)
        stage.note("after", 0 < kernel.bench_time < 60, state(kernel)[2])

    found = both.same(scenario)
    assert found[0] == ("before", False, False)
    assert found[-1][1] is True
    with stage_of(both.decorate, both.store) as stage:
        kernel = simple(stage)
        kernel[(1,)](X, 16)
        assert state(kernel)[2] == found[-1][2]


# torch.compile


@pytest.fixture
def dynamo(monkeypatch):
    """Let dynamo look for Triton kernels although there is no GPU: the one thing in it that asks for one."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    yield
    torch._dynamo.reset()


def traced(stage, kernel):
    """Return what dynamo makes of a function that launches the kernel, and note what running it does."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel_side_table.reset_table()
    torch._dynamo.reset()
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    def caller(x):
        kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, 16)
        return x + 1

    try:
        torch.compile(caller, backend=backend, fullgraph=True)(torch.zeros(64))
    except Exception as error:
        stage.note("refused", type(error), " ".join(str(error).split()))
    for graph in graphs:
        for node in graph.graph.nodes:
            arguments = {name: value for name, value in node.kwargs.items() if name != "kernel_idx"}
            stage.note("node", node.op, node.name, str(node.args), str(arguments))
            if "kernel_idx" in node.kwargs:
                known = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                stage.note("kernel", [str(config) for config in known.configs], known.keys, known.fn)
    return graphs


@pytest.mark.parametrize("kind", ["plain", "reset", "heuristics", "pruned", "hook", "warmup"])
def test_torch_compile_traces_the_same(both, dynamo, kind):
    options, kernel = {
        "plain": ({}, fill),
        "reset": ({"reset_to_zero": ["x_ptr"], "restore_value": ["x_ptr"]}, fill),
        "heuristics": ({}, triton.heuristics({"WIDTH": lambda arguments: arguments["BLOCK"] // 8})(staged)),
        "pruned": ({"prune_configs_by": {"early_config_prune": lambda given, *_, **__: given[1:]}}, fill),
        "hook": ({"pre_hook": lambda *_, **__: None}, fill),
        "warmup": ({"warmup": 7}, fill),
    }[kind]

    def scenario(stage):
        traced(stage, stage.autotune(configs=configs(), key=["n"], **options)(kernel))
        stage.events[:] = [event for event in stage.events if event[0] in ("node", "kernel", "refused")]

    found = both.same(scenario)
    if kind == "hook":
        [refused] = found
        assert refused[0] == "refused"
        assert "pre_hook and post_hook are not supported" in refused[2]
        return
    [known] = [event for event in found if event[0] == "kernel"]
    assert len(known[1]) == (2 if kind == "pruned" else 3)
    assert any("triton_kernel_wrapper" in event[2] for event in found if event[0] == "node")


def test_a_compiled_caller_tunes_and_then_does_not(both, dynamo):
    def scenario(stage):
        kernel = stage.autotune(configs=configs(), key=["n"], do_bench=stage.bench)(fill)
        assert traced(stage, kernel)
        stage.events[:] = [event for event in stage.events if event[0] in ("launch", "bench")]

    found = both.same(scenario)
    assert launched(found) == [16, 32, 64, 32]
    with stage_of(both.decorate, both.store) as stage:
        scenario(stage)
        assert launched(stage.events) == [32]
    with stage_of(stock, both.store) as stage:
        scenario(stage)
        assert launched(stage.events) == [16, 32, 64, 32]
