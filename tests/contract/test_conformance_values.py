"""What a kernel finds and leaves in its tensors, and what heuristics see, is as under triton.autotune."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
from recording import META, X, absent, configs, fill, heuristic, hooked, kinds, launched, stage_of, staged


def values(stage, kernel=fill, x=None, n=16, launches=2, **options):
    """Launch a kernel that adds one, and note what it finds and what it leaves."""
    x = torch.full((64,), 5.0) if x is None else x

    def effect(tensor):
        stage.note("found", stage.block, float(tensor[0]))
        tensor.add_(1)

    stage.effect = effect
    kernel = stage.autotune(configs=configs(), key=["n"], do_bench=stage.bench, **options)(kernel)
    for _ in range(launches):
        stage.launch(kernel, x, n)
        stage.note("left", float(x[0]))


def seen(events):
    return [event[-1] for event in events if event[0] in ("found", "left")]


def test_values_without_any_care(both):
    assert seen(both.same(values)) == [5, 6, 7, 8, 9, 9, 10]


def test_reset_to_zero(both):
    found = both.same(lambda stage: values(stage, reset_to_zero=["x_ptr"]))
    assert seen(found) == [0, 0, 0, 0, 1, 1, 2]  # zero for the launch after tuning too, not for later ones
    with stage_of(both.decorate, both.store) as stage:
        values(stage, reset_to_zero=["x_ptr"])
        assert seen(stage.events) == [5, 6, 6, 7]  # a stored winner: as every later launch of upstream


def test_restore_value(both):
    found = both.same(lambda stage: values(stage, restore_value=["x_ptr"]))
    assert seen(found) == [5, 5, 5, 5, 6, 6, 7]


def test_reset_and_restore(both):
    found = both.same(lambda stage: values(stage, reset_to_zero=["x_ptr"], restore_value=["x_ptr"]))
    assert seen(found) == [0, 0, 0, 0, 1, 1, 2]


def test_restore_without_a_do_bench(both):
    def scenario(stage):
        x = torch.full((64,), 5.0)

        def effect(tensor):
            stage.note("found", float(tensor[0]))
            tensor.add_(1)

        stage.effect = effect
        stage.launch(stage.autotune(configs=configs(), key=["n"], restore_value=["x_ptr"])(fill), x, 16)
        stage.note("left", float(x[0]))

    upstream, found = both.apart(scenario)
    assert set(seen(upstream)[:-1]) == set(seen(found)[:-1]) == {5}
    assert seen(upstream)[-1] == seen(found)[-1] == 6
    assert len(seen(found)) > len(seen(upstream))  # launched more often, restored each time


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_a_restored_argument_that_is_none(both, option):
    def scenario(stage):
        kernel = stage.autotune(configs=configs(), key=["n"], do_bench=stage.bench, **{option: ["x_ptr"]})(absent)
        stage.launch(kernel, None, 16)

    found = both.same(scenario)
    if triton.__version__ < "3.8":  # 3.8 skips what is None
        assert found[-1][1] is AttributeError
    else:
        assert launched(found) == [16, 32, 64, 32]


@pytest.mark.parametrize("hook", ["pre_hook", "post_hook"])
def test_a_hook_of_the_users_replaces_one_of_upstreams(both, hook):
    def scenario(stage):
        def mine(kwargs, **rest):
            stage.note("mine", sorted(rest))

        values(stage, restore_value=["x_ptr"], reset_to_zero=["x_ptr"], **{hook: mine})

    found = both.same(scenario)
    if hook == "pre_hook" and not triton.__version__.startswith("3.9"):
        assert found[-2][1] in (AttributeError, KeyError)  # nothing was saved that could be restored; 3.9 restores none
    else:
        assert [event for event in found if event[0] == "mine"]
        assert launched(found)[-2:] == [32, 32]


# heuristics


def test_heuristics_under_the_autotuner(both):
    def prepare(stage):
        kernel = hooked(stage, kernel=heuristic(stage)(staged))
        return lambda: stage.launch(kernel, X, n=16)

    def scenario(stage):
        launch = prepare(stage)
        launch()
        launch()

    upstream, found = both.apart(scenario)
    assert kinds(upstream) == ["pre", "width", "launch", "post"] * 3 + ["pre", "width", "launch"] + ["width", "launch"]
    assert [dict(event[3])["WIDTH"] for event in upstream if event[0] == "launch"] == ["2", "4", "8", "4", "4"]
    assert found == [("width", META)] * 3 + upstream  # ahead
    assert kinds(both.same_hit(prepare)) == ["width", "launch"]


def test_heuristics_over_the_autotuner(both):
    def prepare(stage):
        kernel = heuristic(stage)(stage.autotune(configs=configs(), key=["n", "WIDTH"], do_bench=stage.bench)(staged))
        return lambda: stage.launch(kernel, X, n=16)

    def scenario(stage):
        launch = prepare(stage)
        launch()
        launch()

    found = both.same(scenario)
    assert kinds(found) == ["width", *["launch"] * 4, "width", "launch"]
    assert list(found[-1][2]) == [(16, 1, "torch.float32")]
    assert kinds(both.same_hit(prepare)) == ["width", "launch"]
