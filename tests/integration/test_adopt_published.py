"""Kernels of published libraries under ``tcache.adopt``: tune, restart, zero tuning. Real compiler, null driver.

Each process imports fla-core and liger-kernel as they are on the package index, launches some of their operators and
says what it launched, benchmarked and counted. The GPU's part is in ``benchmarks/adopted.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("fla", "liger_kernel")),
    reason="fla-core and liger-kernel are not installed: pip install -e .[test]",
)

PROCESS = """
import hashlib, json, sys
sys.path.insert(0, "tests/contract")
import torch, triton, triton.testing
import null_driver
import tcache

null = null_driver.activate()  # before fla looks for a driver
torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
torch.cuda.get_device_capability = lambda *_: (9, 0)

def upstream():
    owners = [triton.runtime.autotuner.Autotuner, triton.runtime.jit.JITFunction, triton.runtime.jit.KernelInterface]
    found = {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}
    return {**found, "autotune": triton.autotune, "inner": triton.runtime.autotuner.autotune, "class": owners[0]}

import fla.modules, fla.ops, liger_kernel.ops, liger_kernel.ops.dyt, liger_kernel.ops.mlp
from fla.modules.norm import l2norm, layernorm
from fla.ops.utils.cache import CachedAutotuner
from liger_kernel.ops import dyt, mlp

benchmarks = 0

def bench(call, quantiles):
    global benchmarks
    benchmarks += 1
    call()
    name, constants = null.launches[-1]  # one config is always the same, whatever the process
    text = json.dumps([name, sorted((str(key), str(value)) for key, value in constants.items())])
    return [1 + int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32] * 3

before = upstream()
names = tcache.adopt("fla") + tcache.adopt("liger_kernel")
after = upstream()
fused = l2norm.l2norm_fwd_kernel
kernels = [fused, l2norm.l2norm_bwd_kernel, layernorm.layer_norm_fwd_kernel]
kernels = [tuner if isinstance(tuner, triton.runtime.autotuner.Autotuner) else tuner.fn for tuner in kernels]
kernels += [dyt._dyt_fwd_kernel, mlp._swiglu_kernel_forward]
for tuner in kernels:
    tuner._do_bench = bench
for tuner in [*kernels[:2], mlp._swiglu_kernel_forward]:
    tuner.configs = tuner.configs[:2]  # 25 to 32 take the compiler a minute

width = int(sys.argv[1])
x = torch.zeros(4, 64, width, dtype=torch.bfloat16, requires_grad=True)
l2norm.l2norm(x).sum().backward()
weight, bias = (torch.zeros(width, dtype=torch.bfloat16) for _ in range(2))
layernorm.layer_norm(x.detach(), weight, bias)
row = torch.zeros(width)
dyt.liger_dyt_fwd(torch.zeros(8, width), torch.zeros(1), row, row)
up = torch.zeros(256, width, dtype=torch.bfloat16)
_, config = mlp.gemm_swiglu(x.detach(), up, up, 1.0)

fresh = triton.autotune(kernels[0].configs, key=[])(kernels[0].fn)
print(json.dumps({
    "adopted": len(names),
    "own_class": isinstance(fused if isinstance(fused, CachedAutotuner) else fused.fn, CachedAutotuner),
    "upstream": before.keys() == after.keys() and all(before[key] is after[key] for key in before),
    "fresh": type(fresh) is triton.runtime.autotuner.Autotuner,
    "benchmarks": benchmarks,
    "stats": {name: value for name, value in tcache.stats().items() if value},
    "best": [str(tuner.best_config) for tuner in kernels],
    "handed_on": config is mlp._swiglu_kernel_forward.best_config,
}))
"""


@pytest.fixture
def process(tmp_path):
    def run(width=256, mode="tune", seed="0", place=tmp_path):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        environment |= {
            "PYTHONHASHSEED": seed,
            "TCACHE_MODE": mode,
            "TCACHE_STORE": str(place / "store"),
            "TCACHE_TUNE_JOBS": "2",
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        }
        command = [sys.executable, "-W", "ignore", "-c", PROCESS, str(width)]  # warnings of the libraries are theirs
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_tune_restart_zero_tuning(process):
    first = process(seed="1")
    assert first["adopted"] > 200
    assert first["own_class"]  # fla's subclass of Autotuner stays in place
    assert first["upstream"]
    assert first["fresh"]
    assert first["stats"] == {"tuned": 5}
    assert first["benchmarks"] > 30
    assert first["handed_on"]
    second = process(seed="2")
    assert second["stats"] == {"hits": 5}
    assert second["benchmarks"] == 0
    assert second["best"] == first["best"]
    assert second["upstream"]
    assert second["fresh"]
    third = process(mode="lookup", width=512)
    assert third["benchmarks"] == 0
    assert third["stats"].get("tuned", 0) == 0
    assert third["stats"]["nearest"] > 0
