"""What a bench says of launches, with each Triton release: resources, the winner, and how it came to be chosen."""

from __future__ import annotations

import gc

import null_driver
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

import tcache
from tcache._triton.launched import launched_kernels
from tcache.active import activate
from tcache.bench.cases import _described

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=2) for block in (16, 32, 64)]


@triton.jit
def plain(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@pytest.fixture(autouse=True)
def gpu(monkeypatch, triton_cache):
    monkeypatch.setenv("TCACHE_GPU_NAME", "NVIDIA H200")
    before = driver._active
    plain.device_caches.clear()
    yield null_driver.activate()
    plain.device_caches.clear()
    gc.collect()  # since 3.8 a kernel unloads its module when it goes: the driver must still be there
    driver._active = before


def bench(call, quantiles):
    call()
    block = driver.active.launches[-1][1][(2,)]
    return [{16: 3.0, 32: 1.0, 64: 2.0}[block]] * 3


def described(kernel, *sizes):
    with launched_kernels() as noted:
        for n in sizes:
            kernel[(1,)](torch.zeros(64), n)
    return [_described(launch) for launch in noted.found]


def tuned(configs=CONFIGS, **more):
    return tcache.autotune(configs=configs, key=["n"], do_bench=bench, **more)(plain)


def test_a_winner_and_its_resources(tmp_path, gpu):
    activate(bundles=[], mode="tune", store=tmp_path)
    tuned()[(1,)](torch.zeros(64), 16)
    activate(bundles=[], mode="lookup", store=tmp_path)
    kernel = tuned()
    before = len(gpu.launches)
    first, again, near = described(kernel, 16, 16, 48)  # the second is a launch that was learnt
    assert len(gpu.launches) - before == 3
    assert first == again == {
        "kernel": "plain", "registers": 32, "spills": 0, "shared": 0, "warps": 2, "stages": 3,
        "config": "BLOCK=32 | num_warps=2 num_stages=3 num_ctas=1", "chosen": "tuned",
    }  # fmt: skip
    assert (near["chosen"], near["config"]) == ("nearest", first["config"])
    assert described(kernel, 16) == [first]  # and once there are learnt launches from the beginning


def test_without_a_store(tmp_path):
    activate(bundles=[], mode="lookup", store=tmp_path)
    [first] = described(tuned(), 16)
    assert (first["chosen"], first["config"]) == ("first", "BLOCK=16 | num_warps=2 num_stages=3 num_ctas=1")
    [only] = described(tuned(CONFIGS[2:]), 16)
    assert (only["chosen"], only["config"][:8]) == ("only", "BLOCK=64")


def test_kernels_that_are_not_tcaches(tmp_path):
    activate(bundles=[], mode="lookup", store=tmp_path)
    with launched_kernels() as noted:
        plain[(1,)](torch.zeros(64), 16, BLOCK=16, num_warps=1)
    [bare] = map(_described, noted.found)
    assert (bare["chosen"], bare["config"], bare["warps"], bare["registers"]) == (None, None, 1, 32)
    stock = triton.autotune(configs=CONFIGS[:2], key=["n"], do_bench=bench)(plain)
    [row] = described(triton.heuristics({})(stock), 16)
    assert (row["chosen"], row["config"][:8]) == ("triton", "BLOCK=32")


def test_nothing_is_left_behind():
    from triton.runtime.jit import KernelInterface

    before = KernelInterface.__getitem__, tcache.autotuner.Autotuner.__getitem__
    with pytest.raises(ZeroDivisionError), launched_kernels():
        raise ZeroDivisionError
    assert (KernelInterface.__getitem__, tcache.autotuner.Autotuner.__getitem__) == before
