"""On an NVIDIA GPU: the bundle that was built without one launches, with nothing to compile with and nothing to write.

``TCACHE_TEST_BUNDLE`` names a bundle of ``shape_manifests/quickstart.yaml`` that a machine without a GPU packed for
this Python and Triton. ``TCACHE_TEST_REPORT`` names a file to write the result to.
"""

# ruff: noqa: E501 - the service is one text

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

SERVICE = """
import json, os, shutil, sys, time
from pathlib import Path

started = time.perf_counter()
import torch
import triton
from tcache.errors import CacheMiss
from tcache.manifest import KernelItem, load_manifest
from tcache.replay.arguments import arguments as _arguments, real as _real
from tcache.replay.launches import _grid, kernel_of as _kernel, load_target as _load
from tcache.replay import KernelRef, load

root = Path(os.environ["ROOT"])
compiled, hits, native = [], [], []
triton.knobs.compilation.listener = lambda **event: (hits if event["cache_hit"] else compiled).append(event["src"].name)
def would_tune(*_, **__):
    raise AssertionError("benchmarked")
triton.testing.do_bench = would_tune

torch.cuda.init(); torch.zeros(1, device="cuda"); torch.cuda.synchronize()
modules = {name: load(KernelRef.parse(f"kernels/{name}.py:{name if name == 'matmul' else 'axpy'}"), root) for name in ("matmul", "vector_add")}
first = time.perf_counter()
references = {"matmul": load(KernelRef.parse("kernels/matmul.py:matmul_reference"), root),
              "axpy": load(KernelRef.parse("kernels/vector_add.py:axpy_reference"), root)}
checked, launches, first_ms = 0, 0, None
for case in load_manifest(root / "shape_manifests" / "quickstart.yaml").cases():
    target, arguments = _load(case), _arguments(case, _real)
    torch.cuda.synchronize(); begin = time.perf_counter()
    if isinstance(case.item, KernelItem):
        _kernel(case, target)[_grid(case, arguments)](**arguments)
        got = arguments["z_ptr"]
        wanted = references["axpy"](arguments["a"], arguments["x_ptr"], arguments["y_ptr"])
    else:
        got = target(**arguments)
        torch.cuda.synchronize()
        wanted = references["matmul" if "b" in arguments else "axpy"](*arguments.values())
    torch.cuda.synchronize()
    if first_ms is None:
        first_ms = (time.perf_counter() - begin) * 1e3
    launches += 1
    rtol, atol = (1e-5, 1e-6) if got.dtype == torch.float32 else (1e-2, 1e-2)
    if got.dim() == 2:  # the products of K random numbers, rounded to bfloat16 at the end
        atol = 1e-2 * arguments["a"].shape[1] ** 0.5
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)
    checked += 1
torch.cuda.synchronize()
misses = {}
def expect_miss(name, call):
    try:
        call()
    except CacheMiss as miss:
        misses[name] = str(miss)
    else:
        misses[name] = None
axpy, matmul = modules["vector_add"], modules["matmul"]
bf16 = dict(device="cuda", dtype=torch.bfloat16)
expect_miss("unseen shape", lambda: matmul(torch.randn(64, 4096, **bf16), torch.randn(4096, 4096, **bf16)))
expect_miss("unaligned", lambda: axpy(2.0, torch.randn(4097, **bf16)[1:], torch.randn(4097, **bf16)[1:]))
print(json.dumps({
    "launches": launches, "checked": checked, "entries": len(hits), "compiled": compiled, "misses": misses,
    "compiler": [shutil.which(name) for name in ("gcc", "cc", "clang", "file", "ldconfig")],
    "uid": os.getuid(), "home": sorted(os.listdir(os.environ["HOME"])), "first_launch_ms": round(first_ms, 1),
}))
"""


@pytest.fixture(scope="module")
def report():
    bundle = os.environ.get("TCACHE_TEST_BUNDLE")
    if not bundle:
        pytest.skip("TCACHE_TEST_BUNDLE is not set: pack one on a machine without a GPU")
    home = Path(tempfile.mkdtemp(prefix="tcache-home-"))
    home.chmod(0o555)
    environment = {
        "HOME": str(home), "TRITON_HOME": str(home), "TRITON_CACHE_DIR": str(home / "cache"), "ROOT": str(ROOT),
        "PATH": "/nonexistent", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""), "TCACHE_BUNDLES": bundle, "TCACHE_MODE": "frozen",
        "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager",
    }  # fmt: skip
    before = sorted((str(path), path.stat().st_mtime_ns) for path in Path(bundle).rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", SERVICE], env=environment, capture_output=True, text=True, check=False, cwd="/",
        **({"user": 65534, "group": 65534} if os.getuid() == 0 else {}),  # read-only means nothing to root
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    found["bundle_untouched"] = before == sorted(
        (str(path), path.stat().st_mtime_ns) for path in Path(bundle).rglob("*")
    )
    place = os.environ.get("TCACHE_TEST_REPORT")
    if place:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from _machine import describe

        Path(place).write_text(json.dumps({"machine": describe(), **found}, indent=1) + "\n")
    return found


def test_every_launch_of_the_manifest_ran_and_is_right(report):
    assert report["launches"] == report["checked"] == 52


def test_nothing_was_compiled(report):
    assert report["compiled"] == []
    assert report["entries"] > 0
    assert report["compiler"] == [None] * 5


def test_nothing_was_written(report):
    assert report["home"] == []
    assert report["bundle_untouched"]


def test_what_is_not_packed_is_a_miss_that_says_why(report):
    assert "M=64 N=4096 K=4096" in report["misses"]["unseen shape"]
    assert "nearest tuned shape: M=" in report["misses"]["unseen shape"]
    assert "alignment x_ptr: not divisible by 16, packed tt.divisibility=16" in report["misses"]["unaligned"]
