"""On an NVIDIA GPU: the matmuls' numbers at small and at real sizes, every config of every one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

import cases_matmul
from cases_matmul import *  # noqa: F403
from poisoning import device, poisoned, untuned  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]


def product(m, n, k, layout="columns"):
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = cases_matmul.matrix(k, n, torch.bfloat16, "cuda", layout) / k**0.5
    return a, b, (a.float() @ b.float()).bfloat16()


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("name", ["matmul_tma_kernel", "matmul_persistent_kernel"])
def test_every_persistent_config(name, layout, monkeypatch):
    if name == "matmul_tma_kernel" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older than Hopper")
    tuner = cases_matmul.kernel(f"matmul_persistent.py:{name}")
    for config in list(tuner.configs):
        monkeypatch.setattr(tuner, "configs", [config])
        for m, n, k in [(4096, 4096, 1024), (1000, 1032, 520)]:  # several tiles a program; ragged edges
            a, b, wanted = product(m, n, k, layout)
            got = cases_matmul.persistent(a, b, tma=name == "matmul_tma_kernel")
            cases_matmul.close(got, wanted)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096)])
def test_every_decode_config(n, k, layout, monkeypatch):
    tuner = cases_matmul.decode_kernel
    products = {m: product(m, n, k, layout) for m in (1, 16)}
    configs, launched = list(tuner.configs), set()
    for m, (a, b, wanted) in products.items():
        for config in cases_matmul.prune(configs, {"M": m, "stride_bk": b.stride(0)}):
            monkeypatch.setattr(tuner, "configs", [config])  # alone, it is launched unpruned
            cases_matmul.close(cases_matmul.decode(a, b), wanted)
            launched.add(config)
    assert len(launched) == len(configs) or layout == "rows"  # without tensor cores: contiguous columns only


def test_decode_in_graphs_that_run_at_once():
    a, b, wanted = product(16, 4096, 4096)
    cases_matmul.decode(a, b)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [cases_matmul.decode(a, b) for _ in range(8)]
        graphs.append((graph, outputs))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, outputs in graphs:
        for got in outputs:
            cases_matmul.close(got, wanted)


def test_beyond_31_bits():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    a = torch.randn(8, 40960, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(65536, 40960, device="cuda", dtype=torch.bfloat16).t()  # 2.7e9 elements
    wanted = (a @ b)[:, -64:]
    cases_matmul.close(cases_matmul.decode(a, b)[:, -64:] / 200, wanted / 200)
    cases_matmul.close(cases_matmul.persistent(a, b, tma=False)[:, -64:] / 200, wanted / 200)
