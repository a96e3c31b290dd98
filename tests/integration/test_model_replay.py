"""A 70B model's forward and backward pass replays in under 1 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_70b_model_replays_in_under_1_gb():
    command = [sys.executable, ROOT / "benchmarks" / "ghosts.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["parameters"] > 70e9
    assert report["launches"] == 80 * 6  # three kernels a layer, forward and backward
    assert report["peak_rss_mb"] < 1000
    assert report["peak_rss_mb"] - report["before_mb"] < 200
