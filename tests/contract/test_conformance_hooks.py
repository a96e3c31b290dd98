"""tcache.autotune runs hooks, heuristics and launches as triton.autotune does.

tcache compiles ahead of benchmarking. To know what to compile it binds every config once, and so runs the config's own
hook, the heuristics below the autotuner and the kernel's pre-run hooks once more than upstream, before anything else.
Tests call these calls *ahead* and state each of them. A launch whose winner is stored has none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs

from tcache._triton.cache import set_cache_directory

sys.path.insert(0, str(Path(__file__).parent))
from recording import BLOCKS, META, X, asserting, configs, fill, hooked, kinds, launched, stage_of


@pytest.mark.parametrize("by_name", [False, True])
def test_hooks_around_every_benchmarked_launch(both, by_name):
    def scenario(stage):
        kernel = hooked(stage)
        for n in (16, 16, 17):
            stage.launch(kernel, x_ptr=X, n=n) if by_name else stage.launch(kernel, X, n)

    found = both.same(scenario)
    tuning = ["pre", "launch", "post"] * 3 + ["pre", "launch"]
    assert kinds(found) == [*tuning, "launch", *tuning]
    pre = [event[1:] for event in found if event[0] == "pre"]
    assert pre[:4] == [(META, block, 16, (1,), False) for block in BLOCKS] + [(META, 32, 16, (1,), True)]
    post = [event[1:] for event in found if event[0] == "post"]
    assert post[:3] == [(META, block, type(None), "None") for block in BLOCKS]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_stored_winner_launches_without_hooks(both, by_name):
    def prepare(stage):
        kernel = hooked(stage, reset_to_zero=["x_ptr"])
        return lambda: stage.launch(kernel, x_ptr=X, n=16) if by_name else stage.launch(kernel, X, 16)

    assert kinds(both.same_hit(prepare)) == ["launch"]


def test_a_winner_that_another_process_found_meanwhile_is_a_stored_one(both):
    with stage_of(both.decorate, both.store) as stage:
        twin = hooked(stage)

        def prune(given, *_, **__):  # between looking and tuning
            if not stage.events:
                stage.launch(twin, X, 16)
                stage.note("meanwhile")
            return given

        kernel = hooked(stage, prune_configs_by={"early_config_prune": prune})
        stage.launch(kernel, X, 16)
    at = stage.events.index(("meanwhile",))
    assert launched(stage.events[:at]) == [16, 32, 64, 32]
    assert kinds(stage.events[at:]) == ["meanwhile", "launch"]
    assert launched(stage.events) == [16, 32, 64, 32, 32]
    assert not hasattr(kernel, "bench_time")


def test_a_configs_own_hook(both):
    def scenario(stage):
        kernel = hooked(stage, own=True)
        stage.launch(kernel, X, 16)
        stage.launch(kernel, X, n=16)

    upstream, found = both.apart(scenario)
    assert kinds(upstream) == ["own", "pre", "launch", "post"] * 3 + ["pre", "own", "launch"] + ["own", "launch"]
    assert [event[1:] for event in upstream if event[0] == "own"][:3] == [(META, block, 16, (1,)) for block in BLOCKS]
    ahead = [("own", META, block, 16, (1,)) for block in BLOCKS]
    assert found == ahead + upstream


def test_a_stored_winners_own_hook_runs_once(both):
    def prepare(stage):
        kernel = hooked(stage, own=True)
        return lambda: stage.launch(kernel, X, 16)

    found = both.same_hit(prepare)
    assert kinds(found) == ["own", "launch"]
    assert found[0] == ("own", META, 32, 16, (1,))


def test_a_configs_own_hook_may_change_what_is_bound(both):
    def scenario(stage):
        def own(kwargs):
            kwargs["x_ptr"].resize_(kwargs["BLOCK"])

        stage.effect = lambda x: stage.note("seen", x.numel())
        stage.launch(hooked(stage, configs=configs(pre_hook=own)), torch.zeros(64), 16)

    found = both.same(scenario)
    assert [event[1] for event in found if event[0] == "seen"] == [16, 32, 64, 32]


def test_nothing_runs_for_arguments_that_conflict(both):
    found = both.same(lambda stage: stage.launch(hooked(stage, own=True), X, 16, BLOCK=16))
    assert [event[0] for event in found] == ["raised"]


def test_what_cannot_be_bound_is_told_to_the_hooks(both):
    def scenario(stage):
        def pre(kwargs, reset_only=False):
            stage.note("pre", reset_only)

        def post(kwargs, exception):
            stage.note("post", type(exception), str(exception))

        stage.launch(hooked(stage, pre_hook=pre, post_hook=post), X)

    found = both.same(scenario)
    assert [event[0] for event in found] == ["pre", "post", "raised"]
    assert found[1][1:] == found[2][1:]
    assert found[1][1] is TypeError


def test_a_launch_that_raises(both):
    def scenario(stage):
        def effect(x):
            if stage.block == 32:
                raise ValueError("boom")

        stage.effect = effect
        stage.launch(hooked(stage), X, 16)

    found = both.same(scenario)
    assert kinds(found) == ["pre", "launch", "post", "pre", "launch", "post", "raised"]
    assert found[-2][3:] == found[-1][1:] == (ValueError, "boom")


@pytest.mark.parametrize("which", ["pre_hook", "post_hook"])
def test_a_hook_that_raises(both, which):
    def scenario(stage):
        def hook(kwargs, **_):
            raise LookupError(which)

        stage.launch(hooked(stage, **{which: hook}), X, 16)

    found = both.same(scenario)
    assert found[-1] == ("raised", LookupError, which)
    assert kinds(found) == (["raised"] if which == "pre_hook" else ["pre", "launch", "raised"])


def test_a_config_that_does_not_compile_is_known_before_hooks_run(both, triton_cache):
    def scenario(stage):
        set_cache_directory(str(triton_cache / stage.autotune.__name__))
        stage.launch(hooked(stage, kernel=asserting), X, 16)

    upstream, found = both.apart(scenario)
    at = kinds(upstream).index("launch") + 2
    assert kinds(upstream)[at : at + 2] == ["pre", "post"]  # the config with BLOCK=32 fails between them
    [failed] = [event for event in upstream if event[0] == "post" and event[2] == 32]
    assert failed[3] is triton.compiler.errors.CompileTimeAssertionFailure
    # tcache compiled it ahead in a child process and does not try to launch it
    rest = [event for event in upstream if event[0] not in ("pre", "post") or event[2] != 32]
    assert found == rest


# launches


def test_a_grid_that_is_a_function(both):
    def scenario(stage):
        def grid(meta):
            stage.note("grid", sorted(meta), meta["BLOCK"])
            return (triton.cdiv(64, meta["BLOCK"]), 2)

        kernel = stage.autotune(configs=configs(), key=["n"], do_bench=stage.bench)(fill)
        stage.launch(kernel, X, 16, grid=grid)

    found = both.same(scenario)
    assert [event[2] for event in found if event[0] == "grid"] == [16, 32, 64, 32]
    assert [event[2] for event in found if event[0] == "launch"] == [(4, 2, 1), (2, 2, 1), (1, 2, 1), (2, 2, 1)]


def test_launch_hooks(both):
    def prepare(stage):
        def enter(metadata):
            stage.note("enter", metadata.get()["name"])

        def leave(metadata):
            stage.note("exit", metadata.get()["name"])

        kernel = hooked(stage)

        def launch():
            knobs.runtime.launch_enter_hook.add(enter)
            knobs.runtime.launch_exit_hook.add(leave)
            try:
                stage.launch(kernel, X, 16)
            finally:
                knobs.runtime.launch_enter_hook.remove(enter)
                knobs.runtime.launch_exit_hook.remove(leave)

        return launch

    found = both.same(lambda stage: prepare(stage)())
    assert kinds(found) == ["pre", "enter", "launch", "exit", "post"] * 3 + ["pre", "enter", "launch", "exit"]
    assert kinds(both.same_hit(prepare)) == ["enter", "launch", "exit"]


def test_compile_hooks(both, monkeypatch):
    def scenario(stage):
        for name in ("jit_cache_hook", "jit_post_compile_hook"):

            def hook(*, _name=name, **rest):
                stage.note(_name, rest["repr"])

            monkeypatch.setattr(knobs.runtime, name, hook)
        kernel = hooked(stage)
        stage.launch(kernel, X, 16)
        stage.launch(kernel, X, 16)

    found = both.same(scenario)
    assert kinds(found).count("jit_cache_hook") == kinds(found).count("jit_post_compile_hook") == 3


def test_pre_run_hooks(both):
    def prepare(stage):
        kernel = stage.autotune(configs=configs(), key=["n"], do_bench=stage.bench)(fill)

        def launch():
            fill.add_pre_run_hook(lambda *args, **kwargs: stage.note("run", len(args), kwargs["BLOCK"]))
            try:
                stage.launch(kernel, X, 16)
            finally:
                fill.pre_run_hooks.clear()

        return launch

    upstream, found = both.apart(lambda stage: prepare(stage)())
    assert kinds(upstream) == ["run", "launch"] * 4
    assert found == [("run", 2, block) for block in BLOCKS] + upstream  # ahead
    assert kinds(both.same_hit(prepare)) == ["run", "launch"]
