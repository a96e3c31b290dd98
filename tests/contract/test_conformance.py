"""tcache.autotune takes arguments and benchmarks as triton.autotune does.

The scenarios of ``test_conformance*.py`` follow the behaviour that upstream's
``python/test/unit/runtime/test_autotuner.py`` covers in 3.6 to 3.9. Each runs under upstream's decorator, under
tcache's, and under upstream's adopted by tcache. Where tcache differs on purpose, the test says so and states how.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton

from tcache.active import activate
from tcache.errors import UnsupportedValue

sys.path.insert(0, str(Path(__file__).parent))
from recording import BLOCKS, QUANTILES, TIMES, X, configs, copy, fill, labelled, launched, simple, stage_of, staged

# arguments


def test_positional_and_keyword_arguments_in_any_order(both):
    def scenario(stage):
        kernel = stage.autotune(configs=configs(), key=["n"], do_bench=stage.bench)(copy)
        grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)  # noqa: E731
        stage.launch(kernel, X, X, 16, 1024, 16, grid=grid)
        stage.launch(kernel, COLUMNS=16, src=X, n=512, stride=16, dst=X, grid=grid)
        stage.launch(kernel, X, X, n=512, COLUMNS=16, stride=16, grid=grid)

    found = both.same(scenario)
    assert launched(found) == [16, 32, 64, 32, 16, 32, 64, 32, 32]
    assert [event[2] for event in found if event[0] == "launch"][3] == (1024 // 32, 1, 1)
    dtypes = ("torch.float32", "torch.float32")
    keys = list(found[-1][2])
    assert keys == [(1024, *dtypes), (512, *dtypes)]


def test_the_key_counts_values_and_dtypes(both):
    def scenario(stage):
        kernel = simple(stage)
        for x, n in ((X, 16), (X, 17), (X.to(torch.float16), 16), (X, 16)):
            stage.launch(kernel, x, n)

    found = both.same(scenario)
    assert list(found[-1][2]) == [(16, "torch.float32"), (17, "torch.float32"), (16, "torch.float16")]
    assert len(launched(found)) == 3 * 4 + 1


def test_a_constexpr_may_be_a_key(both):
    def scenario(stage):
        kernel = stage.autotune(configs=configs(), key=["WIDTH"], do_bench=stage.bench)(staged)
        stage.launch(kernel, X, 16, triton.language.float32.primitive_bitwidth)
        stage.launch(kernel, X, 17, WIDTH=32)
        stage.launch(kernel, X, 17, WIDTH=triton.language.constexpr(16))

    found = both.same(scenario)
    assert len(launched(found)) == 4 + 1 + 4


@pytest.mark.parametrize("names", [["n", "nothing"], ["nothing"]])
@pytest.mark.parametrize("where", ["key", "reset_to_zero", "restore_value"])
def test_names_that_are_no_arguments(both, names, where):
    def scenario(stage):
        options = {"key": ["n"], where: names}
        try:
            kernel = stage.autotune(configs=configs(), do_bench=stage.bench, **options)(fill)
        except ValueError as error:
            stage.note("raised", type(error), str(error))
            return
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    raised = [event for event in found if event[0] == "raised"]
    if where == "key" and not triton.__version__.startswith("3.9"):
        assert not raised
        assert launched(found) == [16, 32, 64, 32]
    else:
        assert len(raised) == 1
    if triton.__version__.startswith("3.9"):
        assert f"{where} contains names that are not kernel arguments: nothing" in raised[0][2]


@pytest.mark.parametrize("given", [None, [], ()])
def test_no_configs_is_one_default_config(both, given):
    def scenario(stage):
        kernel = stage.autotune(configs=given, key=["n"], do_bench=stage.bench)(fill)
        stage.launch(kernel, X, 16, BLOCK=16)

    [launch, stated] = both.same(scenario)
    assert launch[4:] == (4, 3)
    assert stated[1:3] == (str(triton.Config({}, num_warps=4, num_stages=3)), {})


def test_configs_may_be_a_tuple(both):
    found = both.same(lambda stage: stage.launch(simple(stage, given=tuple(configs())), X, 16))
    assert launched(found) == [16, 32, 64, 32]


def test_one_config_is_launched_without_a_benchmark(both):
    found = both.same(lambda stage: stage.launch(simple(stage, given=configs(64)), X, 16))
    assert [event[0] for event in found] == ["launch", "state"]
    assert not both.store.exists()


def test_arguments_that_upstream_refuses(both):
    def scenario(stage):
        stage.launch(simple(stage), X, 16, BLOCK=16)  # defined by caller and configs
        stage.launch(simple(stage, given=configs(64)), X, 16, BLOCK=16)
        stage.launch(simple(stage), X)
        stage.launch(simple(stage), X, 16, nothing=1)
        stage.launch(simple(stage), X, [16])  # a list cannot be in a key

    found = both.same(scenario)
    first, *rest = [event[1:] for event in found if event[0] == "raised"]
    assert first[0] is ValueError
    assert first[1].startswith("Conflicting meta-parameters: BLOCK.")
    assert len(rest) == 4
    assert not launched(found)


def test_launch_options_of_the_caller_meet_the_winner_as_upstream(both):
    def scenario(stage):
        stage.launch(simple(stage), X, 16, num_warps=2)

    found = both.same(scenario)
    assert launched(found) == [16, 32, 64]  # the config's own num_warps while benchmarking
    assert found[-1][1] is TypeError
    assert "multiple values for keyword argument 'num_warps'" in found[-1][2]


@pytest.mark.parametrize("label", [triton.language.float16, fill, ("a", 1), 1.5, None, frozenset({1})])
def test_meta_parameters_of_any_kind(both, label):
    def scenario(stage):
        given = [triton.Config({"BLOCK": block, "LABEL": label}, num_warps=1) for block in BLOCKS]
        stage.launch(simple(stage, labelled, given), X, 16)

    found = both.same(scenario)
    assert launched(found) == [16, 32, 64, 32]
    with stage_of(both.decorate, both.store) as stage:  # what has no text of its own cannot be stored: as upstream
        scenario(stage)
        assert launched(stage.events) == ([16, 32, 64, 32] if isinstance(label, frozenset) else [32])


@pytest.mark.parametrize("mode", ["tune", "lookup", "frozen"])
def test_a_key_without_a_text_in_every_mode(both, mode):
    with stage_of(both.decorate, both.store) as stage:
        activate(store=both.store, mode=mode)
        kernel = stage.autotune(configs=configs(), key=["x_ptr"], do_bench=stage.bench)(fill)
        stage.launch(kernel, X, 16)  # the tensor itself, which upstream allows
    if mode == "frozen":
        assert stage.events[0][1] is UnsupportedValue
    else:
        assert launched(stage.events) == ([16, 32, 64, 32] if mode == "tune" else [16])


# benchmarks


def test_do_bench_is_called_as_upstream_calls_it(both):
    found = both.same(lambda stage: stage.launch(simple(stage), X, 16))
    assert [event[1:] for event in found if event[0] == "bench"] == [(block, QUANTILES) for block in BLOCKS]
    assert found[-1][3] == {
        str(config): [t, t / 2, t * 2] for config in configs() for t in [TIMES[config.kwargs["BLOCK"]]]
    }


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        ({16: 3.0, 32: 1.0, 64: 2.0}, 32),  # one number instead of three
        ({16: (3.0, 1.0), 32: (3.0, 0.5), 64: (3.0, 2.0)}, 32),  # equal medians: the quantiles decide
        ({16: [5.0, 5.0, 5.0], 32: [5.0, 5.0, 5.0], 64: [5.0, 5.0, 5.0]}, 16),  # all equal: the first
        ({16: 1.0, 32: 0.0, 64: 2.0}, 32),  # faster than the clock ticks
        ({16: [float("inf")] * 3, 32: [2.0, 2.0, 2.0], 64: [1.0, 1.0, 1.0]}, 64),
    ],
)
def test_what_do_bench_answers_decides(both, answers, winner):
    def scenario(stage):
        def bench(call, quantiles):
            call()
            return answers[stage.block]

        given = configs(32, 16, 64) if winner == 32 else configs()
        kernel = stage.autotune(configs=given, key=["n"], do_bench=bench)(fill)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    assert launched(found)[-1] == winner
    with stage_of(both.decorate, both.store) as stage:  # and the store, read by another process, says the same
        scenario(stage)
        assert launched(stage.events) == [winner]


def test_do_bench_may_launch_often_and_raise(both):
    def scenario(stage):
        def thrice(call, quantiles):
            for _ in range(3):
                call()
            if stage.block == 64:
                raise KeyError("mine")
            return [TIMES[stage.block]] * 3

        kernel = stage.autotune(configs=configs(), key=["n"], do_bench=thrice)(fill)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    assert launched(found) == [16] * 3 + [32] * 3 + [64] * 3
    assert found[-1] == ("raised", KeyError, "'mine'")


def test_without_do_bench(both):
    def scenario(stage):
        kernel = stage.autotune(configs=configs(), key=["n"])(fill)
        stage.launch(kernel, X, 16)
        stage.launch(kernel, X, 16)

    upstream, found = both.apart(scenario)
    # upstream asks the driver's benchmarker; tcache launches in passes and repeats only what may still win
    assert launched(upstream) == [16, 32, 64, 32, 32]
    assert upstream[-1][1:3] == found[-1][1:3]
    assert launched(found)[-2:] == [32, 32]
    assert {block: launched(found).count(block) for block in BLOCKS} == {16: 5, 32: 5 + 8 + 2, 64: 5}
    assert found[-1][3] == {str(config): [TIMES[config.kwargs["BLOCK"]]] * 3 for config in configs()}


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"warmup": 7}, ("do_bench", {"warmup": 7, "rep": 100})),
        ({"rep": 9}, ("do_bench", {"warmup": 25, "rep": 9})),
        ({"warmup": 7, "rep": 9}, ("do_bench", {"warmup": 7, "rep": 9})),
        ({"use_cuda_graph": True, "rep": 9}, ("do_bench_cudagraph", {"rep": 9})),
        ({"use_cuda_graph": True}, ("do_bench_cudagraph", {"rep": 100})),
    ],
)
def test_deprecated_ways_to_benchmark(both, monkeypatch, options, asked):
    def scenario(stage):
        for name in ("do_bench", "do_bench_cudagraph"):

            def bench(call, quantiles, _name=name, **rest):
                stage.note("asked", _name, rest)
                return stage.bench(call, quantiles)

            monkeypatch.setattr(triton.testing, name, bench)
        kernel = stage.autotune(configs=configs(), key=["n"], **options)(fill)
        stage.note("kept", kernel.num_warmups, kernel.num_reps, kernel.use_cuda_graph)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    assert [event[1:] for event in found if event[0] == "asked"] == [asked] * 3
    assert launched(found) == [16, 32, 64, 32]
    assert found[-1][:2] == ("warned", DeprecationWarning)
