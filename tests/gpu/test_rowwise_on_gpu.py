"""On an NVIDIA GPU: the kernels over rows, every case of the interpreter and real sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
from norm_cases import *  # noqa: F403 - the cases, run here
from norm_cases import sums
from quantize_cases import *  # noqa: F403
from quantize_cases import same
from rowwise_cases import *  # noqa: F403
from rowwise_cases import DTYPES, ROOT, close, kernel, pair

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def first_configs(monkeypatch):
    """Nothing is tuned here: what the project's store does not know runs with the nearest or the first config."""
    monkeypatch.setenv("TCACHE_MODE", "lookup")
    monkeypatch.setenv("TCACHE_STORE", str(ROOT / "best_configs"))


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def half(request):
    return request.param


@pytest.fixture
def fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8_e4m3fn")


def make(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


SIZES = pytest.mark.parametrize(
    "shape",
    [(16, 4096), (2048, 8192), (50432, 768), (300, 14336), (300, 32768), (1, 128256), (300, 65536), (65, 131072)],
    ids=str,
)


@DTYPES
@SIZES
def test_real_sizes(shape, dtype):
    x, weight, bias = make(*shape, dtype=dtype), make(shape[1], dtype=dtype), make(shape[1], dtype=dtype)
    for module, name, arguments in [
        ("softmax", "softmax", (x,)), ("rmsnorm", "rmsnorm", (x, weight)),
        ("layernorm", "layernorm", (x, weight, bias)),
        ("elementwise", "affine_relu", (x, weight, bias)), ("elementwise", "affine_relu", (x, 1.5, -0.5)),
    ]:  # fmt: skip
        function, reference = pair(module, name)
        loose = (1e-5, 1e-5) if dtype == torch.float32 else (None, None)  # sums of up to 131072 in another order
        close(function(*arguments), reference(*arguments), *loose)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("shape", [(2048, 4096), (2048, 8192), (50432, 768), (1024, 16384), (70, 20000)], ids=str)
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_real_sizes_backward(name, shape, deterministic):
    backward, reference = pair(name, f"{name}_backward")
    x, dy, weight = make(*shape), make(*shape), make(shape[1])
    statistics = kernel(name, f"{name}_forward")(x, weight)[1:]
    got = backward(dy, x, weight, *statistics, deterministic=deterministic)
    wanted = reference(dy, x, weight, *statistics)
    close(got[0], wanted[0])
    close(tuple(got[1:]), tuple(wanted[1:]), *sums(torch.bfloat16, shape[0]))
    if deterministic:
        again = backward(dy, x, weight, *statistics)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True) if one is not None)


@pytest.mark.parametrize("shape", [(16, 4096), (8192, 14336), (300, 32768), (9, 131072)], ids=str)
def test_real_sizes_quantized(shape, fp8):
    x = make(*shape)
    quantize, reference = pair("quantize", "quantize_int8")
    same(quantize(x), reference(x))
    quantize, reference = pair("quantize", "quantize_fp8")
    for block in (None, 128):
        q, scale = quantize(x, block)
        same((q, scale), reference(x, block))
        dequantize, wanted = pair("quantize", "dequantize")
        close(dequantize(q, scale, block), wanted(q, scale, block))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (16, 4096, 14336), (300, 6144, 4096), (2048, 4096, 4096)])
def test_real_sizes_dequantized_in_a_matmul(m, n, k, half, fp8):
    matmul, reference = pair("dequant_matmul", "dequant_matmul")
    a = make(m, k, dtype=half)
    for quantize in ("quantize_int8", "quantize_fp8"):
        w, scale = kernel("quantize", quantize)(make(n, k, dtype=half) * 0.02)
        close(matmul(a, w.t(), scale), reference(a, w.t(), scale))


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.zeros(2**31 // 4096 + 8, 4096, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.arange(4096, device="cuda") / 512
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    for module, name, arguments in [
        ("softmax", "softmax", ()), ("rmsnorm", "rmsnorm", (weight,)), ("elementwise", "affine_relu", (2.0, 1.0)),
        ("elementwise", "affine_relu", (weight, 1.0)),
    ]:  # fmt: skip
        function, reference = pair(module, name)
        close(function(x, *arguments)[-1:], reference(x[-1:], *arguments))
        torch.cuda.empty_cache()
    q, scale = kernel("quantize", "quantize_int8")(x)
    same((q[-1:], scale[-1:]), kernel("quantize", "quantize_int8_reference")(x[-1:]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu_than_the_current_one():
    x = torch.randn(33, 100, device="cuda:1")
    for module, name in (("softmax", "softmax"), ("rmsnorm", "rmsnorm"), ("layernorm", "layernorm")):
        function, reference = pair(module, name)
        close(function(x), reference(x), 1e-5, 1e-5)
    assert torch.cuda.current_device() == 0
