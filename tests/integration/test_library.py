"""The kernel library and its best configs belong together: no launch of its manifests is untuned or stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["quickstart", "llama", "moe", "vit", "sparse_unet", "attention", "rowwise"])
def test_every_launch_has_a_winner(name, tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TCACHE_", "TRITON_"))}
    command = [sys.executable, "-m", "tcache", "resolve", f"shape_manifests/{name}.yaml", "--json"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"retune on the GPU: tcache tune shape_manifests/{name}.yaml\n{done.stderr}"
    rows = json.loads(done.stdout)["launches"]
    untuned = [row for row in rows if row.get("notice") and not row["notice"].startswith("tuned under Triton")]
    assert rows
    assert not untuned
