"""On an NVIDIA GPU: ghosts have the shapes, strides, dtypes and alignments that its real tensors have.

What the GPU answered at its last run is in ``tests/unit/gpu_layouts.json``, with which ghosts are compared elsewhere;
``TCACHE_TEST_GHOSTS_REPORT`` names a file to write it to.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from ghost_operations import EVERY, INVENTED, STEPS, facts, plain

from tcache.keys import find_gpu
from tcache.replay import machine

pytestmark = pytest.mark.gpu


def both(make, ones=True):
    """Return what there is of a real result, and what of a ghost's."""
    torch.manual_seed(0)
    real = facts(make(torch.device("cuda")), ones)
    with machine(find_gpu(torch.cuda.get_device_name())):
        return real, facts(make(torch.device("cuda")), ones)


@pytest.mark.parametrize("name", EVERY)
def test_like_the_gpus_own_tensors(name):
    real, ghosts = both(EVERY[name], ones=name not in INVENTED)
    assert ghosts == real


def test_what_ghosts_are_compared_with_elsewhere():
    found = {name: plain(facts(make(torch.device("cuda")))) for name, make in EVERY.items()}
    target = os.environ.get("TCACHE_TEST_GHOSTS_REPORT")
    if target:
        sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
        from _machine import describe

        rows = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in found.items()
        )
        Path(target).write_text(f'{{\n"machine": {json.dumps(describe())},\n"operations": {{\n{rows}\n}}\n}}\n')
    known = json.loads((Path(__file__).parents[1] / "unit" / "gpu_layouts.json").read_text())
    assert found == known["operations"]


def test_chains_of_operations():
    """Alike; along sizes of 1 in all but a few, for which torch's meta functions have a rule of their own."""
    chance = random.Random(0)
    apart, made = [], 0
    for _ in range(400):
        shape = [chance.randint(1, 6) for _ in range(chance.randint(1, 4))]
        chain = [chance.randrange(len(STEPS)) for _ in range(chance.randint(1, 7))]

        def make(device, shape=shape, chain=chain):
            found = [torch.empty(shape, device=device)]
            for step in chain:
                if found[-1].dim() > 6 or found[-1].numel() > 100_000:
                    break
                found.append(STEPS[step](found[-1]))
            return found

        real, ghosts = both(make, ones=False)
        assert ghosts == real, (shape, chain)
        real, ghosts = both(make)
        made += len(real)
        apart += [(shape, chain, one, other) for one, other in zip(real, ghosts, strict=True) if one != other]
    assert len(apart) <= made // 20, apart[:3]
