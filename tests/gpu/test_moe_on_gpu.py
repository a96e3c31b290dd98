"""On an NVIDIA GPU: the kernels of a mixture of experts at small and at real sizes, every config of the matmuls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

import cases_moe
from cases_matmul import close, kernel
from cases_moe import *  # noqa: F403
from poisoning import device, poisoned, untuned  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]


@pytest.mark.parametrize("layout", ["stored", "transposed"])
@pytest.mark.parametrize("name", ["grouped_gemm_tma_kernel", "grouped_gemm_kernel"])
def test_every_grouped_config(name, layout, monkeypatch):
    tma = name == "grouped_gemm_tma_kernel"
    if tma and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older than Hopper")
    tuner = kernel(f"grouped_gemm.py:{name}")
    counts = [700, 0, 1, 129, 2000, 33, 512, 64]
    x = torch.randn(sum(counts), 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8, 1024, 1544, device="cuda", dtype=torch.bfloat16) / 32
    w = w if layout == "stored" else w.transpose(1, 2).contiguous().transpose(1, 2)
    offsets = cases_moe.offsets_of(counts, "cuda")
    wanted = cases_moe.grouped_reference(x, w, offsets)
    configs, launched = list(tuner.configs), 0
    for config in configs:
        monkeypatch.setattr(tuner, "configs", [config])
        try:
            got = cases_moe.grouped(x, w, offsets, tma=tma)
        except OutOfResources:  # a tuner passes over it
            continue
        close(got, wanted)
        launched += 1
    assert launched > len(configs) // 2


@pytest.mark.parametrize(("t", "e", "k"), [(4096, 8, 2), (8192, 64, 6), (64, 256, 8)])
def test_sorting_many_tokens(t, e, k):
    logits = torch.randn(t, e, device="cuda")
    weights, experts = cases_moe.route(logits, k)
    wanted, chosen = cases_moe.route_reference(logits, k)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)
    for got, reference in zip(cases_moe.align(experts, e), cases_moe.align_reference(experts, e), strict=True):
        assert torch.equal(got, reference)


def test_moe_mlp_in_a_graph():
    t, e, k, h, f = 512, 8, 2, 1024, 512
    x = torch.randn(t, h, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(t, e, device="cuda")
    gate_up = torch.randn(e, 2 * f, h, device="cuda", dtype=torch.bfloat16) / h**0.5
    down = torch.randn(e, h, f, device="cuda", dtype=torch.bfloat16) / f**0.5
    close(cases_moe.moe_mlp(x, logits, gate_up, down, k), cases_moe.moe_mlp_reference(x, logits, gate_up, down, k))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing waits for the host
        got = cases_moe.moe_mlp(x, logits, gate_up, down, k)
    logits.copy_(torch.randn(t, e, device="cuda"))
    graph.replay()
    close(got, cases_moe.moe_mlp_reference(x, logits, gate_up, down, k))
