"""Operators that nobody here wrote: their wrappers replay without a GPU, are warmed up for three targets and proven.

The libraries are installed once into ``.compat/published`` without their dependencies.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "shape_manifests" / "third_party"
LIBRARIES = [
    "fla-core==0.6.0", "liger-kernel==0.8.5", "conch-triton-kernels==1.3", "cut-cross-entropy==25.1.1",
    "einops==0.8.2", "packaging==26.0",
]  # fmt: skip
GPUS = ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X"]
PROVEN = {
    "fla.yaml": ["passes.py:fla_cross_entropy",
                 "fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule"],
    "liger.yaml": ["passes.py:rms_norm", "passes.py:swiglu", "passes.py:rope", "passes.py:layer_norm"],
    "more.yaml": ["conch.ops.normalization.rms_norm:rms_norm", "conch.ops.activation.silu_and_mul:silu_and_mul",
                  "conch.ops.attention.paged_attention:paged_attention", "passes.py:cut_cross_entropy"],
}  # fmt: skip
"""Calls whose kernels have no autotuner: they can be packed without best configs."""

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def libraries():
    place = ROOT / ".compat" / "published"
    done = place / "installed.txt"
    if not done.exists() or done.read_text().split() != LIBRARIES:
        shutil.rmtree(place, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), *LIBRARIES]
        subprocess.run(command, check=True)
        done.write_text("\n".join(LIBRARIES))
    return place


def run(place, cwd, cache, *args):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {"PYTHONPATH": str(place), "TRITON_CACHE_DIR": str(cache), "HOME": str(cwd)}
    command = [sys.executable, "-m", "tcache", *map(str, args), "--json"]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout), done.stderr[-4000:]


def first(case):
    return {name: value[0] if isinstance(value, list) else value for name, value in case.items()}


def test_warmed_up_and_proven_for_three_targets(libraries, tmp_path):
    kernels = []
    for name, calls in PROVEN.items():
        items = yaml.safe_load((MANIFESTS / name).read_text())["kernels"]
        chosen = [item for item in items if item["call"] in calls]
        assert {item["call"] for item in chosen} == set(calls)
        kernels += [{**item, "cases": [first(item["cases"][0])]} for item in chosen]
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({"version": 1, "gpus": GPUS, "kernels": kernels}, sort_keys=False))
    shutil.copy(MANIFESTS / "passes.py", tmp_path)
    cache = tmp_path / "cache"

    code, warmed, stderr = run(libraries, tmp_path, cache, "warmup", "m.yaml")
    assert (code, warmed["failed"], warmed["untuned"]) == (0, [], []), stderr
    names = {row["kernel"] for row in warmed["kernels"]}
    assert len(names) >= 15
    assert {name.partition(".")[0] for name in names} == {"fla", "liger_kernel", "conch", "cut_cross_entropy"}

    code, resolved, stderr = run(libraries, tmp_path, cache, "resolve", "m.yaml")
    assert code == 0, stderr
    assert all(row["present"] for row in resolved["launches"])
    assert {row["gpu"] for row in resolved["launches"]} == set(GPUS)

    code, _, stderr = run(libraries, tmp_path, cache, "pack", "m.yaml", "-o", "bundle")
    assert code == 0, stderr
    shutil.rmtree(cache)
    code, report, stderr = run(libraries, tmp_path, cache, "verify", "bundle")
    assert code == 0, f"{report}\n{stderr}"
    assert report["proven"]
    assert report["misses"] == []
    assert report["hits"] == report["launches"] == len(resolved["launches"])
    assert report["entries"] == len({row["entry"] for row in resolved["launches"]})


@pytest.mark.parametrize("name", ["fla.yaml", "liger.yaml", "more.yaml"])
def test_every_published_case_resolves(libraries, tmp_path, name):
    """All of a manifest, forward and backward: order and company of GPUs change no entry."""
    path = MANIFESTS / name
    together = [argument for gpu in GPUS[1:] for argument in ("--gpu", gpu)]
    options = ["--untuned", "default"]
    code, both, stderr = run(libraries, tmp_path, tmp_path / "cache", "resolve", path, *together, *options)
    assert code == 0, stderr
    calls = {item["call"] for item in yaml.safe_load(path.read_text())["kernels"]}
    assert len(calls) >= 9
    code, alone, stderr = run(libraries, tmp_path, tmp_path / "cache", "resolve", path, "--gpu", GPUS[-1], *options)
    assert code == 0, stderr
    wanted = [row["entry"] for row in both["launches"] if row["gpu"] == GPUS[-1]]
    assert [row["entry"] for row in alone["launches"]] == wanted
