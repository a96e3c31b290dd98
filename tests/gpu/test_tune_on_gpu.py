"""On an NVIDIA GPU: `tcache tune` goes on past a config that faults the GPU, does not fit, or never ends."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.gpu

KERNEL = """\
import triton
import triton.language as tl

import tcache

CONFIGS = [triton.Config({"BLOCK": 1024, "KIND": kind}) for kind in ("fine", "fault", "assert", "endless", "also fine")]
CONFIGS.append(triton.Config({"BLOCK": 1024, "KIND": "huge"}, num_stages=8))


@tcache.autotune(configs=CONFIGS, key=["n"], restore_value=["y_ptr"])
@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, KIND: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n)
    if KIND == "fault":
        tl.store(y_ptr + o.to(tl.int64) + (1 << 44), x)
    elif KIND == "assert":
        tl.static_assert(BLOCK < 0, "not this one")
    elif KIND == "endless":
        zero = tl.load(x_ptr, volatile=True) * 0
        while zero == 0:
            zero = tl.load(x_ptr, volatile=True) * 0
    elif KIND == "huge":
        rows = tl.arange(0, 256)
        a = tl.load(x_ptr + rows[:, None] + rows[None, :]).to(tl.float16)
        acc = tl.zeros((256, 256), dtype=tl.float32)
        for step in range(0, n, 256):
            acc = tl.dot(tl.load(x_ptr + step + rows[:, None] * 2 + rows[None, :]).to(tl.float16), a, acc)
        tl.store(y_ptr + rows[:, None] + rows[None, :], acc)
    tl.store(y_ptr + o, x + tl.load(y_ptr + o, mask=o < n), mask=o < n)
"""
MANIFEST = """\
version: 1
kernels:
  - kernel: bad.py:kernel
    args:
      x_ptr: {shape: [n], dtype: float32}
      y_ptr: {shape: [n], dtype: float32}
      n: n
    grid: [cdiv(n, BLOCK)]
    cases: [{n: [65536, 131072]}]
"""


def test_tuning_goes_on(tmp_path, tcache):
    (tmp_path / "bad.py").write_text(KERNEL)
    (tmp_path / "m.yaml").write_text(MANIFEST)
    done = tcache("tune", "m.yaml", "--store", "store", "--timeout", "10", "--json", cwd=tmp_path, check=0)
    found = json.loads(done.stdout)
    assert found["failed"] == []
    assert len(found["shapes"]) == 2
    [record] = (tmp_path / "store").glob("*/*.json")
    for entry in json.loads(record.read_text())["entries"].values():
        reasons = {key.split('KIND="')[1].split('"')[0]: row.get("failed") for key, row in entry["timings"].items()}
        assert reasons["fine"] is None
        assert reasons["also fine"] is None
        assert "illegal memory access" in reasons["fault"]
        assert "not this one" in reasons["assert"]
        assert reasons["endless"] == "hung: no result after 10 s"
        assert reasons["huge"] is None or "out of resource" in reasons["huge"].lower()
        assert 'KIND="fine"' in entry["config"] or 'KIND="also fine"' in entry["config"] or reasons["huge"] is None
    again = tcache("tune", "m.yaml", "--store", "store", "--json", cwd=tmp_path, check=0)
    assert not any(row["new"] for row in json.loads(again.stdout)["shapes"])
