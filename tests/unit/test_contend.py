from __future__ import annotations

import random
import statistics

import pytest

from tcache.contend import PASSES, contenders, indistinguishable, summary


def race(true, noise, seed):
    """Run the passes on made-up timings; return the winner and how many launches it took."""
    rng = random.Random(seed)
    samples = {key: [] for key in true}
    live = list(true)
    for number, reps in enumerate(PASSES, 1):
        for key in live:
            samples[key] += [true[key] * max(0.5, rng.gauss(1, noise)) for _ in range(reps)]
        live = contenders(samples, number)
        if len(live) == 1 and number > 1:
            break
    return indistinguishable(samples), sum(map(len, samples.values()))


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.05])
def test_the_winner_is_within_one_percent_of_the_best(noise):
    good = 0
    for seed in range(200):
        rng = random.Random(1000 + seed)
        true = {f"c{number}": 1.0 + rng.expovariate(3) for number in range(24)}
        found, spent = race(true, noise, seed)
        good += true[found[0]] <= 1.01 * min(true.values())
        assert spent < 0.6 * 24 * sum(PASSES)
    assert good >= 190 if noise <= 0.01 else good >= 170


def test_equal_configs_are_said_to_be_indistinguishable():
    found, _ = race({"a": 1.0, "b": 1.0, "c": 1.5}, 0.01, 0)
    assert sorted(found) == ["a", "b"]


def test_clearly_different_configs_are_told_apart():
    found, _ = race({"a": 1.0, "b": 1.04}, 0.005, 0)
    assert found == ["a"]


def test_summary():
    timing = summary([3.0, 1.0, 2.0, 4.0, 5.0])
    assert (timing.median, timing.p20, timing.p80, timing.reps) == (3.0, 1.8, 4.2, 5)
    assert summary([2.0]).median == 2.0
    values = [random.Random(1).random() for _ in range(99)]
    assert summary(values).median == statistics.median(values)
