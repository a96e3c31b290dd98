"""tcache.autotune prunes, and meets configs that fail, as triton.autotune does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import triton

from tcache.active import activate
from tcache.errors import TcacheError

sys.path.insert(0, str(Path(__file__).parent))
from recording import SINGLE_IS_BENCHMARKED, TIMES, X, asserting, broken, configs, launched, simple, stage_of


def test_early_config_prune_sees_what_upstream_shows_it(both):
    def scenario(stage):
        def prune(given, named, **kwargs):
            stage.note("prune", [str(config) for config in given], sorted(named), sorted(kwargs), kwargs["grid"])
            return given[1:]

        kernel = simple(stage, prune_configs_by={"early_config_prune": prune})
        stage.launch(kernel, X, n=16)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    listed = [str(config) for config in configs()]
    assert found[0] == ("prune", listed, ["x_ptr"], ["grid", "n", "warmup"], (1,))
    assert [event[0] for event in found].count("prune") == 1
    assert launched(found) == [32, 64, 32, 32]


@pytest.mark.parametrize("left", [[], None, ()])
def test_pruning_everything(both, left):
    def scenario(stage):
        kernel = simple(stage, prune_configs_by={"early_config_prune": lambda *_, **__: left})
        stage.launch(kernel, X, 16)

    [raised] = both.same(scenario)
    assert raised[1] is triton.runtime.errors.AutotunerError
    assert "`early_config_prune` should return at least one config" in raised[2]


@pytest.mark.parametrize("mode", ["lookup", "frozen"])
def test_pruning_everything_in_other_modes(both, mode):
    with stage_of(both.decorate, both.store) as stage:
        activate(store=both.store, mode=mode)
        kernel = simple(stage, prune_configs_by={"early_config_prune": lambda *_, **__: []})
        stage.launch(kernel, X, 16)
    assert stage.events[0][1] is triton.runtime.errors.AutotunerError


@pytest.mark.parametrize(
    ("top_k", "benchmarked"),
    [
        (2, [32, 64]),
        (0.7, [32, 64]),
        (1.0, [16, 32, 64]),
        (5, [16, 32, 64]),
        (1, [32]),
        (0.3, None),
        (1.5, None),
        ("2", None),
    ],
)
def test_perf_model_and_top_k(both, top_k, benchmarked):
    def scenario(stage):
        def model(**kwargs):
            stage.note("model", sorted(kwargs), kwargs["grid"])
            return TIMES[kwargs["BLOCK"]]

        kernel = simple(stage, prune_configs_by={"perf_model": model, "top_k": top_k})
        stage.launch(kernel, X, n=16)

    if top_k == 0.3 and not triton.__version__.startswith("3.9"):
        # up to 3.8 a fraction that rounds down to nothing ends in min() of nothing; tcache says what is wrong
        upstream, found = both.apart(scenario)
        assert upstream[-1][1] is ValueError
        assert issubclass(found[-1][1], ValueError)
        assert "pruning left no config" in found[-1][2]
        assert upstream[:-1] == found[:-1]
        return
    found = both.same(scenario)
    if not isinstance(top_k, (int, float)) or top_k == 1.5:
        assert found[-1][1] is TypeError
        return
    pruned = benchmarked or [32]
    if len(pruned) == 1 and not SINGLE_IS_BENCHMARKED:
        assert launched(found) == [32]
        assert [event[0] for event in found].count("bench") == 0
    else:
        assert launched(found) == [*pruned, 32]
    model = ("model", ["BLOCK", "grid", "n", "num_ctas", "num_stages", "num_warps", "warmup", "x_ptr"], (1,))
    assert found.count(model) == (0 if len(pruned) == 3 else 3)


def test_top_k_counts_what_early_pruning_left(both):
    def scenario(stage):
        prune = {
            "early_config_prune": lambda given, *_, **__: given[:3],
            "perf_model": lambda **kwargs: TIMES[kwargs["BLOCK"]],
            "top_k": 0.7,
        }
        stage.launch(simple(stage, given=configs(16, 32, 64, 128), prune_configs_by=prune), X, 16)

    found = both.same(scenario)  # 3.9 takes the fraction of what is left, releases before it of all configs
    assert launched(found) == [32, 64, 32]


@pytest.mark.parametrize("kind", ["early_config_prune", "perf_model"])
def test_one_config_left(both, kind, monkeypatch):
    def scenario(stage):
        prune = {
            "early_config_prune": {"early_config_prune": lambda given, *_, **__: given[2:]},
            "perf_model": {"perf_model": lambda **kwargs: -kwargs["BLOCK"], "top_k": 1},
        }[kind]
        kernel = simple(stage, prune_configs_by=prune, pre_hook=lambda *_, **rest: stage.note("pre", rest))
        stage.launch(kernel, X, 16)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    assert launched(found) == ([64] if SINGLE_IS_BENCHMARKED else []) + [64, 64]
    # there is nothing to choose: no mode needs a stored winner for it
    for mode in ("lookup", "frozen"):
        with stage_of(both.decorate, both.store.with_name("empty")) as stage:
            activate(store=both.store.with_name("empty"), mode=mode)
            scenario(stage)
        if mode == "lookup":
            assert launched(stage.events) == [64, 64]
            assert [event[0] for event in stage.events] == ["launch", "state"] * 2
        else:  # no bundle is active: what is missed is the compiled kernel, of this config
            assert all("fill is not prebaked for this launch" in event[2] for event in stage.events)
            assert all("with BLOCK=64" in event[2] for event in stage.events)


def test_pruning_may_make_configs_of_its_own(both):
    def scenario(stage):
        def prune(given, *_, **__):
            return [triton.Config(dict(config.kwargs), num_warps=2) for config in given]

        kernel = simple(stage, prune_configs_by={"early_config_prune": prune})
        stage.launch(kernel, X, 16)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    assert [event[4] for event in found if event[0] == "launch"] == [2] * 5
    assert launched(found) == [16, 32, 64, 32, 32]
    with stage_of(both.decorate, both.store) as stage:
        scenario(stage)
        assert stage.events == found[-4:-2] + found[-2:]
        assert launched(stage.events) == [32, 32]


def test_the_nearest_shapes_winner_is_used_only_where_pruning_leaves_it(both):
    def kernel(stage):
        def prune(given, named, **kwargs):
            return [config for config in given if config.kwargs["BLOCK"] <= kwargs["n"]]

        return simple(stage, prune_configs_by={"early_config_prune": prune})

    with stage_of(both.decorate, both.store) as stage:
        stage.launch(kernel(stage), X, n=64)
        assert launched(stage.events)[-1] == 32
    with stage_of(both.decorate, both.store) as stage:
        activate(store=both.store, mode="lookup")
        for n in (33, 32, 31):
            stage.launch(kernel(stage), X, n=n)
        assert launched(stage.events) == [32, 32, 16]


# failures


def test_a_config_with_too_many_threads_is_skipped(both):
    def scenario(stage):
        def post(kwargs, exception):
            stage.note("post", type(exception), str(exception))

        given = [triton.Config({"BLOCK": 32}, num_warps=64), *configs(16, 64)]
        stage.launch(simple(stage, given=given, post_hook=post), X, 16)

    found = both.same(scenario)
    assert launched(found) == [16, 64, 64]
    assert found[0][:2] == ("post", triton.runtime.errors.OutOfResources)
    assert "out of resource: threads, Required: 2048" in found[0][2]
    assert next(iter(found[-1][3].values())) == [float("inf")] * 3


def test_an_assertion_of_the_kernel_skips_a_config(both):
    def scenario(stage):
        stage.launch(simple(stage, asserting), X, 16)

    found = both.same(scenario)
    assert launched(found) == [16, 64, 64]
    assert found[-1][3][str(configs()[1])] == [float("inf")] * 3


def test_a_compile_error_costs_its_config_only(both):
    def scenario(stage):
        stage.launch(simple(stage, broken), X, 16)

    upstream, found = both.apart(scenario)
    # upstream lets it out; tcache records it as this config's failure and chooses among the others
    assert issubclass(upstream[-1][1], triton.compiler.errors.CompilationError)
    assert launched(upstream) == [16]
    assert launched(found) == [16, 64, 64]
    assert found[-1][3][str(configs()[1])] == [float("inf")] * 3
    text = next(both.store.glob("*/*.json")).read_text()
    assert "arange's range must be a power of 2" in text


def test_when_every_config_fails(both):
    def scenario(stage):
        given = [triton.Config({"BLOCK": block}, num_warps=64) for block in (16, 32)]
        stage.launch(simple(stage, given=given), X, 16)

    upstream, found = both.apart(scenario)
    # upstream launches the first of them all the same; tcache says that none of them ran
    assert upstream[-1][1] is triton.runtime.errors.OutOfResources
    assert found[-1][1] is TcacheError
    assert "every config failed" in found[-1][2]
    assert upstream[:-1] == found[:-1] == []
