"""Bundles that come as wheels into a clean environment, on a driver that launches nothing: the proof that a GPU repeats
(``tests/gpu/test_wheel_on_gpu.py``), but for the results.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import wheel_project

ROOT = Path(__file__).parents[2]
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - call: ../kernels/matmul.py:matmul
    args:
      a: {shape: [M, K], dtype: bfloat16}
      b: {shape: [K, N], dtype: bfloat16}
    cases:
      - {M: 16, N: 4096, K: 4096}
  - call: ../kernels/vector_add.py:axpy
    args: {a: 2.0, x: {shape: [n], dtype: bfloat16}, y: {shape: [n], dtype: bfloat16}}
    cases:
      - {n: [1, 4096, 4097]}
"""


@pytest.fixture(scope="module")
def place():
    """A directory that another user may look into."""
    folder = Path(tempfile.mkdtemp(prefix="tcache-wheels-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(bool(os.environ.get("TCACHE_TEST_OFFLINE")), reason="TCACHE_TEST_OFFLINE is set")
def test_wheels_in_a_clean_environment(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    root = place / "project"
    for name in ("kernels", "best_configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "shape_manifests").mkdir()
    (root / "shape_manifests" / "quickstart.yaml").write_text(MANIFEST)
    wheels = place / "wheels"
    built = [path.name.split("-")[0] for path in wheel_project.build(wheels, root, dependencies=False)]
    assert built == ["tcache_bundle_loadables", "tcache_bundle_quickstart", "triton_tcache"]
    python = wheel_project.install(wheels, place)
    found = wheel_project.serve(python, root, "null", place)
    other = wheel_project.serve(python, root, "null", place, NVPTX_ENABLE_DUMP="1")
    assert (found["launches"], found["checked"], found["others"]) == (4, 0, 3)
    assert found["tcache"].startswith(str(place / "venv"))
    assert found["compiled"] == other["compiled"] == []
    assert found["prebaked"] == 5  # axpy in three specializations, matmul, tuned
    assert found["tools"] == [None] * 5
    assert found["home"] == []
    wheel_project.check_outcomes({**found["outcomes"], **other["outcomes"]})
