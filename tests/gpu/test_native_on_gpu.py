"""On an NVIDIA GPU: stock Triton launches from a native cache that was packed without one, and from an image's layer.

Needs gcc for packing (it is hidden from the service), or ``TCACHE_TEST_NATIVE``: a native cache of the project of
``tests/integration/projects.py`` that a machine without a GPU packed for this GPU, Python, Triton and path.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

SERVICE = """
import json, os, shutil, sys
import torch
import triton

def refuse(*_, **__):
    raise SystemExit("went to benchmark or to build a native helper")

compiled, hits = [], []
triton.knobs.compilation.listener = lambda **event: (hits if event["cache_hit"] else compiled).append(event["src"].name)
triton.knobs.build.impl = refuse
triton.testing.do_bench = refuse
sys.path.insert(0, "src")
import kernels

for n in (4096, 4097):
    x = torch.randn(n, device="cuda"); y = torch.empty_like(x)
    kernels.plain[(triton.cdiv(n, 64),)](x, y, n, BLOCK=64)
    torch.testing.assert_close(y, 2 * x)
x = torch.randn(4096, device="cuda"); y = torch.empty_like(x)
kernels.tuned[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](x, y, 4096)
torch.testing.assert_close(y, x + 1)
torch.cuda.synchronize()
assert "tcache" not in sys.modules
print(json.dumps({"hits": len(hits), "compiled": compiled, "block": kernels.tuned.best_config.kwargs["BLOCK"],
                  "compiler": [shutil.which(name) for name in ("gcc", "cc", "clang", "file")]}))
"""


@pytest.mark.parametrize("form", ["native", "oci"])
def test_stock_triton_launches_and_compiles_nothing(tmp_path, form):
    import torch
    from projects import batch, make_project, python

    name = torch.cuda.get_device_name()
    given = os.environ.get("TCACHE_TEST_NATIVE")
    if not given and not shutil.which("gcc"):
        pytest.skip("no gcc here: pack elsewhere and set TCACHE_TEST_NATIVE")
    root = make_project(tmp_path / "project", gpus=(name,))
    mount = Path(given) if given else tmp_path / "mount"
    if not given:
        options = ["--gpu", name, "--warmup", "--format", form, "--mount-path", mount]
        out = mount if form == "native" else tmp_path / "image"
        [answer] = batch(root, ["pack", "shapes/m.yaml", "-o", out, *options], CUDA_VISIBLE_DEVICES="")
        answer.ok()
        if form == "oci":
            import tarfile

            from tcache.layout import read_layout

            with tarfile.open(read_layout(out).layers[0].path) as archive:
                archive.extractall(tmp_path / "unpacked", filter="data")
            (tmp_path / "unpacked" / "io.triton.cache").rename(mount)
    done = python(root, "-c", SERVICE, TRITON_CACHE_DIR=str(mount), PATH="/nonexistent")
    found = json.loads(done.stdout)
    assert found == {"hits": 3, "compiled": [], "block": 128, "compiler": [None] * 4}
