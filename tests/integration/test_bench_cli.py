"""`tcache bench` where there is no GPU: bad input first, then a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tcache.keys import find_gpu
from tcache.manifest import load_manifest
from tcache.replay import launches, machine

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def test_a_refusal_without_a_gpu(tcache):
    done = tcache("bench", "shape_manifests/quickstart.yaml", check=2)
    assert (
        done.stderr
        == "error: no GPU here: bench times kernels on one\nhint: run it on the GPU that the service runs on\n"
    )
    assert done.stdout == ""
    done = tcache("bench", "shape_manifests/quickstart.yaml", "--json", check=2)
    assert json.loads(done.stdout)["error"] == "no GPU here: bench times kernels on one"


def test_bad_input_comes_first(tcache, tmp_path):
    (tmp_path / "m.yaml").write_text("version: 1\nkernel: []\n")
    assert "m.yaml:2:1: unknown key 'kernel'" in tcache("bench", "m.yaml", cwd=tmp_path, check=2).stderr
    assert (
        "no such directory"
        in tcache(
            "bench", ROOT / "shape_manifests" / "quickstart.yaml", "--plot", "no/r.svg", cwd=tmp_path, check=2
        ).stderr
    )


OPS = """\
import torch
import triton
import triton.language as tl


@triton.jit
def k(x, index, n, BLOCK: tl.constexpr):
    pass


def f(x, index):
    k[(1,)](x, index, x.numel(), BLOCK=64)


def f_inputs(x, index):
    raise RuntimeError("called with ghosts")
"""


def test_inputs_are_never_called_with_ghosts(tmp_path):
    (tmp_path / "ops.py").write_text(OPS)
    (tmp_path / "m.yaml").write_text("""\
version: 1
kernels:
  - call: ops.py:f
    args: {x: {shape: [n], dtype: float32}, index: {shape: [n], dtype: int64}}
    cases: [{n: 10}]
""")
    [case] = load_manifest(tmp_path / "m.yaml").cases()
    with machine(find_gpu("NVIDIA H200")):
        [launch] = launches(case)
    assert launch.kernel.fn.__name__ == "k"
