"""A bundle of an autotuned kernel: its best configs are part of the proof."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - call: kernels/vector_add.py:axpy
    args: {a: 2.0, x: {shape: [n], dtype: float32}, y: {shape: [n], dtype: float32}}
    cases: [{n: [4096, 1048576]}]
"""


@pytest.fixture
def project(tmp_path, tcache):
    root = tmp_path / "project"
    shutil.copytree(ROOT / "kernels", root / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "best_configs", root / "best_configs")
    (root / "pyproject.toml").write_text('[tool.tcache]\nstore = "best_configs"\n')
    (root / "m.yaml").write_text(MANIFEST)
    return root


def bundled(project, tcache):
    tcache("warmup", "m.yaml", cwd=project, check=0)
    tcache("pack", "m.yaml", "-o", "bundle", cwd=project, check=0)
    return next((project / "bundle" / "store").rglob("*.json"))


def test_only_the_winners_of_these_shapes_are_packed(project, tcache):
    record = json.loads(bundled(project, tcache).read_text())
    assert len(record["entries"]) == 2
    assert all(list(entry["timings"]) == [entry["config"]] for entry in record["entries"].values())
    tcache("verify", "bundle", cwd=project, check=0)


def test_a_losing_config_that_was_removed_after_tuning_changes_nothing(project, tcache):
    path = project / "kernels" / "vector_add.py"
    text = path.read_text()
    assert "        (16384, 16),\n" in text
    path.write_text(text.replace("        (16384, 16),\n", ""))
    bundled(project, tcache)
    tcache("verify", "bundle", cwd=project, check=0)


def test_best_configs_that_were_changed_in_the_bundle_are_not_used(project, tcache):
    path = bundled(project, tcache)
    for text in (path.read_text().replace("BLOCK=", "BLOCK= "), "{", path.read_text()[:-2]):
        path.write_text(text)
        done = tcache("verify", "bundle", cwd=project, check=1)
        assert "digest differs" in done.stderr or "bytes, expected" in done.stderr
        assert "never tuned" in done.stderr


PRUNED = """\
import triton
import triton.language as tl

import tcache


def prune(configs, named, **rest):
    return [config for config in configs if config.kwargs["BLOCK"] <= rest["n"]]


@tcache.autotune({"BLOCK": [64, 128]}, key=["n"], prune_configs_by={"early_config_prune": prune})
@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


def run(x):
    fill[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, n=x.numel())
    return x
"""


def test_a_shape_with_one_config_left_needs_no_winner(tmp_path, tcache):
    (tmp_path / "k.py").write_text(PRUNED)
    manifest = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - call: k.py:run
    args: {x: {shape: [n], dtype: float32}}
    cases: [{n: %s}]
"""
    (tmp_path / "one.yaml").write_text(manifest % "[64, 127]")
    tcache("warmup", "one.yaml", cwd=tmp_path, check=0)
    tcache("pack", "one.yaml", "-o", "bundle", cwd=tmp_path, check=0)
    tcache("verify", "bundle", cwd=tmp_path, check=0)
    (tmp_path / "two.yaml").write_text(manifest % "128")
    done = tcache("warmup", "two.yaml", cwd=tmp_path, check=1)
    assert "never tuned" in done.stderr
