"""On an NVIDIA GPU: what was preloaded launches at once, and computes what it should.

Packs its own bundle for this machine, so it needs a C compiler and Python's headers, and a GPU of compute capability
9.0, for which the project of the contract tests is packed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
import bundle_project

pytestmark = pytest.mark.gpu

SERVICE = """
import time
import torch, triton
import tcache, loadables

torch.zeros(1, device="cuda")
tcache.activate()
done = tcache.preload()
assert done.failed == (), done.failed
assert len(done.loaded) == 3, done
events = []
triton.knobs.compilation.listener = lambda **event: events.append(event["src"].name)
loads, load = [], triton.runtime.driver.active.utils.load_binary
triton.runtime.driver.active.utils.load_binary = lambda name, *rest: (loads.append(name), load(name, *rest))[1]
x, y = torch.randn(4096, device="cuda"), torch.empty(4096, device="cuda")
begin = time.perf_counter()
loadables.scale[(64,)](x, y, 4096, BLOCK=64)
torch.cuda.synchronize()
first = (time.perf_counter() - begin) * 1e3
torch.testing.assert_close(y, 2 * x)
z = torch.zeros(64, device="cuda", dtype=torch.bfloat16)
loadables.increment(z)
assert z.sum().item() == 64
w = torch.zeros(16, device="cuda")
loadables.tuned[(1,)](w, 16)
torch.testing.assert_close(w, torch.arange(16.0, device="cuda"))
assert events == [] and loads == [], (events, loads)
print(f"preloaded in {done.seconds * 1e3:.0f} ms, first launch {first:.2f} ms")
assert first < 50
"""


def test_the_first_launch_after_preloading_compiles_and_loads_nothing(tmp_path):
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the project is packed for compute capability 9.0")
    bundle_project.make(tmp_path)
    environment = {
        **os.environ, "TCACHE_BUNDLES": "bundle", "TCACHE_GPU_NAME": "NVIDIA H200", "TRITON_CACHE_DIR": "never",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SERVICE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "never").exists()
    print(done.stdout)
