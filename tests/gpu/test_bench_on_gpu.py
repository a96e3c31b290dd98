"""On an NVIDIA GPU: `tcache bench` with the clock that production figures come from."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from tcache.bench.timing import Plan, interleave

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MANIFEST = """\
version: 1
kernels:
  - call: {root}/kernels/matmul.py:matmul
    args: {{a: {{shape: [M, K], dtype: bfloat16}}, b: {{shape: [K, N], dtype: bfloat16}}}}
    cases: [{{M: [16, 2048], N: 4096, K: 4096}}]
  - call: ops.py:faulting
    args: {{x: {{shape: [n], dtype: float32}}}}
    cases: [{{n: 4096}}]
  - call: {root}/kernels/matmul.py:matmul
    args: {{a: {{shape: [M, K], dtype: float32}}, b: {{shape: [K, N], dtype: float32}}}}
    cases: [{{M: 64, N: 64, K: 64}}]
"""
OPS = """\
import triton
import triton.language as tl


@triton.jit
def far(x_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(x_ptr + o + (1 << 44), 1.0)


def faulting(x):
    far[(1,)](x, BLOCK=128)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "m.yaml").write_text(MANIFEST.format(root=ROOT))
    (tmp_path / "ops.py").write_text(OPS)
    return tmp_path


def test_rows_that_agree_with_physics(tcache, folder):
    done = tcache(
        "bench", "m.yaml", "--case", "K=4096 ", "--quick", "--json", "--plot", "r.svg", cwd=folder, check=0
    )  # fmt: skip
    found = json.loads(done.stdout)
    used = found["peaks"]["used"]
    assert found["machine"]["driver"]
    assert used["gbps"] > 100
    assert used["tflops"]["bfloat16"] > 1
    assert len(found["rows"]) == 2
    for row in found["rows"]:
        assert row["error"] is None
        assert row["largest_error"] < 2.0
        assert row["compared_with"] == "reference"
        assert set(row["times"]) == {"tcache", "torch", "compiled"}
        own = row["times"]["tcache"]
        assert own["gpu_only"]
        assert 0 < own["p20_ms"] <= own["median_ms"] <= own["p80_ms"] <= own["p95_ms"]
        assert 0 < row["percent_of_bandwidth"] < 130
        assert 0 < row["percent_of_flops"] < 110
        [launch] = row["launches"]
        assert launch["registers"] >= 16
        assert launch["shared"] > 0
        assert launch["config"]
    assert [row["verdict"] for row in found["rows"]] == ["memory", "compute"]
    ET.parse(folder / "r.svg")


def test_a_fault_ends_the_run_and_keeps_the_rows(tcache, folder):
    done = tcache("bench", "m.yaml", "--quick", "--no-compile", "--json", cwd=folder)
    assert done.returncode == 1
    first, second, faulted, after = json.loads(done.stdout)["rows"]
    assert first["error"] is second["error"] is None
    assert "the GPU faulted" in faulted["error"]
    assert after["error"] == "not run: the GPU faulted before"


def test_the_clock_measures_the_gpu_alone():
    """A spinning kernel of a known length, made by a host that dawdles: the host's time must not be in it."""
    import time

    from tcache.bench.timing import CudaClock

    clock = CudaClock(50 << 20)

    def short():
        torch.cuda._sleep(200_000)  # about 0.1 ms

    def dawdling():
        time.sleep(0.0005)
        torch.cuda._sleep(200_000)

    one, other = interleave([[short], [dawdling]], clock, Plan(fewest=40, most=40, batch=10))
    assert one.ahead
    assert other.ahead
    a, b = (sorted(series.times())[len(series.times()) // 2] for series in (one, other))
    assert b == pytest.approx(a, rel=0.1)
    assert sorted(sample.host_ms for sample in other.samples)[20] > 0.5


def test_the_clock_knows_when_the_host_was_late():
    from tcache.bench.timing import CudaClock

    x = torch.ones(4, device="cuda")
    [series] = interleave([[lambda: x.sum().item()]], CudaClock(50 << 20), Plan(fewest=10, most=10))
    assert not series.ahead  # it waits for its own result, so the GPU is never behind


def test_the_cache_is_cold():
    """A tensor that fits the L2 cache is read at the memory's pace: slower than when it is read again at once."""
    from tcache.bench.timing import CudaClock

    x = torch.randn(4 << 20, device="cuda")  # 16 MiB
    out = torch.empty((), device="cuda")
    clock = CudaClock(torch.cuda.get_device_properties().L2_cache_size)

    def cold():
        torch.sum(x, 0, out=out)

    warm_up = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    [series] = interleave([[cold]], clock, Plan(fewest=20, most=20))
    torch.cuda._sleep(4_000_000)
    cold()
    warm_up[0].record()
    for _ in range(20):
        cold()
    warm_up[1].record()
    torch.cuda.synchronize()
    warm = warm_up[0].elapsed_time(warm_up[1]) / 20
    assert sorted(series.times())[len(series.times()) // 2] > 1.1 * warm
