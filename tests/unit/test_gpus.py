"""The catalogue of GPUs, and what torch and Triton answer for one of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime import driver

from tcache.keys import GPU, catalogue, find_gpu
from tcache.keys.gpu import Hardware
from tcache.replay import machine

STORE = Path(__file__).parents[2] / "best_configs"


def test_every_figure_has_a_source():
    for gpu in catalogue().values():
        assert gpu.hardware.sources, gpu.name
        assert all(len(source) > 20 for source in gpu.hardware.sources)


def test_figures_are_plausible():
    for gpu in catalogue().values():
        facts = gpu.hardware
        assert facts.memory is None or 20e9 < facts.memory < 310e9, gpu.name
        assert facts.bandwidth is None or 250 < facts.bandwidth <= 8000, gpu.name
        assert facts.l2_cache is None or 4 << 20 <= facts.l2_cache <= 128 << 20, gpu.name
        if facts.bandwidth and facts.bus_width and facts.memory_clock and "GeForce" not in gpu.name:
            rate = 2 * facts.memory_clock * facts.bus_width / 8 / 1000
            assert abs(rate / facts.bandwidth - 1) < 0.01, gpu.name  # two transfers per clock


def test_targets_of_the_catalogue():
    targets = {str(gpu.target) for gpu in catalogue().values()}
    for target in ("cuda:80:32", "cuda:86:32", "cuda:89:32", "cuda:90:32", "cuda:100:32", "cuda:120:32",
                   "hip:gfx90a:64", "hip:gfx942:64", "hip:gfx950:64"):  # fmt: skip
        assert target in targets


def test_the_catalogue_agrees_with_the_store():
    for path in STORE.rglob("*.json"):
        head = json.loads(path.read_text())["gpu"]
        assert find_gpu(head["name"]).identity() == head


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA A30", "AMD Instinct MI300X"])
def test_torch_and_triton_answer_for_the_gpu(name):
    gpu = find_gpu(name)
    with machine(gpu):
        properties = torch.cuda.get_device_properties(torch.device("cuda"))
        assert properties.name == torch.cuda.get_device_name() == name
        assert properties.multi_processor_count == gpu.multiprocessors
        assert properties.warp_size == gpu.warp_size
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability(0) == gpu.capability
        assert properties.shared_memory_per_block_optin == gpu.max_shared_mem
        assert getattr(properties, "L2_cache_size", None) == gpu.hardware.l2_cache
        assert getattr(properties, "total_memory", None) == gpu.hardware.memory
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.is_bf16_supported()
        assert torch.accelerator.current_accelerator().type == "cuda"
        assert (torch.version.hip is not None) == (gpu.backend == "hip")
        of_triton = driver.active.utils.get_device_properties(0)
        assert of_triton["max_shared_mem"] == gpu.max_shared_mem
        assert of_triton["multiprocessor_count"] == gpu.multiprocessors
        assert of_triton["warpSize"] == gpu.warp_size
        target = triton.runtime.driver.active.get_current_target()
        assert (target.backend, target.arch) == (gpu.backend, gpu.arch)
        assert driver.active.get_device_capability() == gpu.capability


def test_a_gpu_outside_the_catalogue():
    gpu = GPU("My GPU", "cuda", 90, 32, 0)
    assert gpu.hardware == Hardware()
    with machine(gpu):
        assert torch.cuda.get_device_name() == "My GPU"
        assert not hasattr(torch.cuda.get_device_properties(0), "multi_processor_count")
        assert torch.cuda.mem_get_info() == (0, 0)


def test_functions_that_were_imported_before_answer_the_same():
    from torch.cuda import current_device, get_device_capability, is_available

    with machine(find_gpu("NVIDIA A100-SXM4-40GB")):
        assert is_available()
        assert current_device() == 0
        assert get_device_capability() == (8, 0)


ASKS = """\
import functools
import torch
import triton
import triton.language as tl

AT_IMPORT = torch.cuda.get_device_capability()[0]

@functools.cache
def cached():
    return triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"]

@triton.jit
def k(x, n, A: tl.constexpr):
    tl.store(x, n)

def wrapper(x):
    k[(1,)](x, cached(), A=AT_IMPORT)
"""


def test_modules_that_kept_an_answer_are_imported_anew_for_another_gpu(kernel_file, tmp_path):
    from tcache.manifest import load_manifest
    from tcache.replay import launches

    kernel_file("asks.py", ASKS)
    path = tmp_path / "m.yaml"
    path.write_text(
        "version: 1\nkernels:\n  - call: asks.py:wrapper\n    args: {x: {shape: [n], dtype: float32}}\n"
        "    cases: [{n: 16}]\n"
    )
    found = []
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-40GB", "NVIDIA H200", "NVIDIA H200"):
        with machine(find_gpu(name)):
            (launch,) = launches(next(iter(load_manifest(path).cases())))
            found.append((launch.args[1], launch.kwargs["A"]))
    assert found == [(132, 9), (108, 8), (132, 9), (132, 9)]


def test_the_command_prints_what_is_known(tcache):
    text = tcache("gpus", check=0).stdout
    assert "NVIDIA H200" in text
    assert "cuda:100:32" in text  # not drawn as an emoji
    rows = json.loads(tcache("gpus", "--json", check=0).stdout)
    assert rows["version"] == 1
    by_name = {row["name"]: row for row in rows["gpus"]}
    assert set(by_name) == set(catalogue())
    assert by_name["NVIDIA H200"]["multiprocessors"] == 132
    assert by_name["NVIDIA A30"]["bandwidth"] is None
    assert "programming-guide" in tcache("gpus", "--sources", check=0).stdout


GOOD = {"name": "NVIDIA H200", "backend": "cuda", "arch": 90, "warp_size": 32, "multiprocessors": 132}


def test_a_gpu_as_documents_describe_it():
    assert GPU.parse(GOOD) == GPU("NVIDIA H200", "cuda", 90, 32, 132)
    assert GPU.parse({**GOOD, "max_shared_mem": 232448}).max_shared_mem == 232448
    for gpu in catalogue().values():
        assert GPU.parse(asdict(gpu)) == gpu


@pytest.mark.parametrize(
    "change",
    [
        {"name": None}, {"name": 3}, {"backend": "rocm"}, {"backend": None}, {"arch": "sm90"}, {"arch": "90"},
        {"arch": -90}, {"arch": True}, {"arch": 9.0}, {"arch": None}, {"arch": [90]}, {"warp_size": 31},
        {"warp_size": "32"}, {"warp_size": None}, {"multiprocessors": "132"}, {"multiprocessors": -1},
        {"multiprocessors": True}, {"max_shared_mem": None}, {"max_shared_mem": -1}, {"backend": "hip"},
    ],
    ids=str,
)  # fmt: skip
def test_a_gpu_that_there_cannot_be_is_refused(change):
    with pytest.raises((TypeError, ValueError), match="gpu"):
        GPU.parse({**GOOD, **change})


def test_a_document_without_a_target():
    for name in GOOD:
        with pytest.raises(KeyError):
            GPU.parse({key: value for key, value in GOOD.items() if key != name})
