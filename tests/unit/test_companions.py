"""Every wrapper that the library's manifests call has companions, and they can be asked without any memory."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import pytest

from tcache.errors import ManifestError
from tcache.manifest import CallItem, load_manifest
from tcache.replay.arguments import arguments, real
from tcache.replay.companions import KINDS, call_companion, companion
from tcache.replay.launches import load_target

ROOT = Path(__file__).parents[2]


def first_cases():
    """Return the first case of every ``call:`` item of the library's manifests."""
    found = {}
    for path in sorted((ROOT / "shape_manifests").glob("*.yaml")):
        for case in load_manifest(path).cases():
            if isinstance(case.item, CallItem):
                found.setdefault(f"{path.stem}-{case.ref_where.split(':')[-2]}-{case.ref.rpartition(':')[2]}", case)
    return found


CASES = first_cases()


@pytest.mark.parametrize("name", CASES)
def test_companions(name):
    case = CASES[name]
    wrapper = load_target(case)
    parameters = inspect.signature(wrapper).parameters
    present = {kind: companion(case, wrapper, kind) for kind in KINDS}
    assert present["reference"]
    assert present["flops"]
    assert present["bytes"]
    for kind, function in present.items():
        if function is not None:
            found = inspect.signature(function).parameters
            assert [(each.name, each.default) for each in found.values()] == [
                (each.name, each.default) for each in parameters.values()
            ], kind
    given = arguments(case, partial(real, device="meta"))  # shapes without values
    try:
        flops, moved = (call_companion(case, wrapper, kind, given) for kind in ("flops", "bytes"))
    except ManifestError as error:
        if not wrapper.__name__.startswith("sparse_conv") or "meta tensors" not in error.message:
            raise
        return  # only its neighbour table knows how much there is to do
    assert type(flops) is int
    assert type(moved) is int
    assert flops >= 0
    assert moved > 0
