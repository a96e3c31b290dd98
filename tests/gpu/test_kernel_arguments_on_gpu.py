"""On an NVIDIA GPU: wrappers refuse tensors of several devices, read negated ones, and split what no grid takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
from argument_cases import MODULE_OF, ROOT, Tensor, calls, values, wrapper
from reference_cases import *  # noqa: F403 - the cases, run here
from rowwise_cases import kernel

pytestmark = pytest.mark.gpu
NAMES = sorted(MODULE_OF)


@pytest.fixture(autouse=True)
def first_configs(monkeypatch):
    """Nothing is tuned here: what the project's store does not know runs with the nearest or the first config."""
    monkeypatch.setenv("TCACHE_MODE", "lookup")
    monkeypatch.setenv("TCACHE_STORE", str(ROOT / "best_configs"))
    torch.manual_seed(0)


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def arguments(first_configs):
    return calls("cuda")


def clones(given):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def results(found, given):
    found = list(given.values()) if found is None else found
    return [
        each for each in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(each, torch.Tensor)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_device_is_refused(name, arguments):
    tensors = [argument for argument, each in arguments[name].items() if isinstance(each, Tensor)]
    for argument in tensors if len(tensors) > 1 else []:
        given = clones(values(arguments[name]))
        given[argument] = given[argument].cpu()
        with pytest.raises(ValueError, match=rf"expected one device, got .*\b{argument} on cpu"):
            wrapper(name)(**given)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fill_map", "neighbour_map", "sort_rows")])
def test_tensors_of_the_cpu_are_refused(name, arguments):
    """All of them: the addresses would go to the GPU, those of descriptors without a question by Triton."""
    given = {
        argument: value.cpu() if isinstance(value, torch.Tensor) else value
        for argument, value in values(arguments[name]).items()
    }
    with pytest.raises(ValueError, match="expected tensors on a GPU, got one on the CPU"):
        wrapper(name)(**given)


@pytest.mark.parametrize("name", NAMES)
def test_lazily_negated_tensors_are_read_as_what_they_are(name, arguments):
    plain = clones(values(arguments[name]))
    wanted = results(wrapper(name)(**plain), plain)
    for argument, each in arguments[name].items():
        if not isinstance(each, Tensor):
            continue
        given = clones(values(arguments[name]))
        given[argument] = torch.neg(each.good)._neg_view()
        if each.written:
            with pytest.raises(ValueError, match="in place"):
                wrapper(name)(**given)
            continue
        for got, right in zip(results(wrapper(name)(**given), given), wanted, strict=True):
            # sums by atomic additions differ in their last bits
            torch.testing.assert_close(got.float(), right.float(), rtol=1e-4, atol=1e-4)


def test_a_weights_gradient_of_more_tiles_than_a_grid_has_along_its_second_axis():
    channels = 8192 + 32  # 257 by 257 tiles of the smallest size
    features, gradient = torch.randn(4, channels, device="cuda").half(), torch.randn(4, channels, device="cuda").half()
    neighbours = torch.tensor([[0, -1], [1, 0], [2, 1], [-1, 3]], device="cuda", dtype=torch.int32)
    found = wrapper("sparse_conv_weight_gradient")(features, gradient, neighbours)
    wanted = kernel("sparse_conv_backward", "sparse_conv_weight_gradient_reference")(features, gradient, neighbours)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_gradients_of_more_columns_than_a_grid_has_along_its_second_axis():
    columns = 64 * 65535 + 1000
    x, dy, weight = (torch.randn(*shape, device="cuda").half() for shape in [(3, columns), (3, columns), (columns,)])
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
    found = wrapper("rmsnorm_backward")(dy, x, weight, rstd)
    wanted = kernel("rmsnorm", "rmsnorm_backward_reference")(dy, x, weight, rstd)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-2, atol=1e-2)


def test_pages_beyond_32_bits_of_tokens():
    if torch.cuda.mem_get_info()[0] < 72 << 30:
        pytest.skip("needs 72 GiB")
    pages = 2**27 + 2
    cache = torch.empty(pages, 16, 1, 16, device="cuda", dtype=torch.float16)
    table = torch.tensor([[pages - 1, 3]], device="cuda", dtype=torch.int32)
    for page in (pages - 1, 3):
        cache[page] = torch.randn(16, 1, 16, device="cuda").half()
    q, lengths = torch.randn(1, 2, 16, device="cuda").half(), torch.tensor([30], device="cuda", dtype=torch.int32)
    found = wrapper("decode_attention")(q, cache, cache, table, lengths)
    wanted = kernel("decode_attention", "decode_attention_reference")(q, cache, cache, table, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", ["matmul", "matmul_decode", "matmul_persistent", "linear"])
def test_products_of_float8(name, dtype):
    """Rounded to 3 or 2 bits after the first: up to 2**-4 or 2**-3 off."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8_e4m3fn")
    a, b = torch.randn(40, 256, device="cuda").to(dtype), torch.randn(256, 64, device="cuda").to(dtype)
    right = b.float().t().contiguous().to(dtype) if name == "linear" else b
    found = wrapper(name)(a, right)
    assert found.dtype == dtype
    rtol = 0.07 if dtype == torch.float8_e4m3fn else 0.14
    torch.testing.assert_close(found.float(), a.float() @ b.float(), rtol=rtol, atol=0.1)


def test_a_product_on_the_per_thread_default_stream():
    """Its handle is the same for all threads, its streams are not: each launch has counters of its own."""
    a, b = torch.randn(1, 4096, device="cuda").half(), torch.randn(4096, 64, device="cuda").half()
    counters = sys.modules["kernels.matmul_decode"]._arrived
    wrapper("matmul_decode")(a, b)
    torch.cuda.synchronize()
    before = set(counters)
    with torch.cuda.stream(torch.cuda.ExternalStream(2)):
        found = wrapper("matmul_decode")(a, b)
    torch.cuda.synchronize()
    assert set(counters) == before
    torch.testing.assert_close(found, (a.float() @ b.float()).half(), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(("high", "fails"), [(60000, False), (2**22, True)])
def test_coordinates_that_keys_cannot_tell_apart_stop_the_gpu(high, fails):
    """In a process of its own: after an assertion that failed, its GPU computes nothing more."""
    program = (
        "import torch; from pathlib import Path; from tcache.replay import KernelRef, load\n"
        f"neighbour_map = load(KernelRef.parse('kernels/voxels.py:neighbour_map'), Path({str(ROOT)!r}))\n"
        f"neighbour_map(torch.tensor([[0, 0, 0, 0], [0, {high}, {high}, {high}]], device='cuda'))\n"
        "torch.cuda.synchronize(); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stderr
    said = done.stderr + done.stdout
    assert ("64 bits" in said or "device-side assert" in said) == fails, said
