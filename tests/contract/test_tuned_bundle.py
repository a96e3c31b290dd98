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
