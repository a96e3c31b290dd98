"""The persistent and the few-rows matmul against torch, on the device that the importing module's fixture names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tcache.replay import KernelRef, load

ROOT = Path(__file__).parents[2]


def kernel(text):
    return load(KernelRef.parse(f"kernels/{text}"), ROOT)


persistent, persistent_reference = (
    kernel(f"matmul_persistent.py:{name}") for name in ("matmul_persistent", "matmul_persistent_reference")
)
decode, decode_reference = (kernel(f"matmul_decode.py:{name}") for name in ("matmul_decode", "matmul_decode_reference"))
decode_kernel = kernel("matmul_decode.py:matmul_decode_kernel")
prune = kernel("matmul_decode.py:_prune")


def close(got, wanted):
    assert got.dtype == wanted.dtype
    assert got.device == wanted.device
    if wanted.dtype == torch.float32:  # TF32 on a GPU; on the CPU sums of products in another order
        tolerance = 1e-4 if wanted.device.type == "cpu" else 2e-2
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().clamp(min=1).item())
    else:
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


def matrix(rows, columns, dtype, device, layout="rows"):
    """A random matrix: by rows, by columns, or with a stride other than 1 in both dimensions."""
    if layout == "rows":
        return torch.randn(rows, columns, device=device).to(dtype)
    if layout == "columns":
        return torch.randn(columns, rows, device=device).to(dtype).t()
    return torch.randn(rows * 2, columns * 3, device=device).to(dtype)[::2, 1::3]


def dtypes(device):
    # the interpreter multiplies bfloat16 as the integers it stores them in
    return [torch.float32, torch.float16] + ([torch.bfloat16] if device == "cuda" else [])


SIZES = [(1, 1, 1), (130, 264, 72), (33, 100, 70)]


@pytest.mark.parametrize("right", ["rows", "columns", "steps"])
@pytest.mark.parametrize("left", ["rows", "columns", "steps"])
def test_persistent(left, right, device):
    for dtype in dtypes(device):
        for m, n, k in SIZES:
            a, b = matrix(m, k, dtype, device, left), matrix(k, n, dtype, device, right)
            wanted = persistent_reference(a, b)
            close(persistent(a, b), wanted)
            close(persistent(a, b, tma=False), wanted)


@pytest.mark.parametrize("right", ["rows", "columns"])
@pytest.mark.parametrize("left", ["rows", "columns"])
def test_persistent_through_descriptors(left, right, device):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older than Hopper")
    a, b = matrix(136, 72, torch.float16, device, left), matrix(72, 264, torch.float16, device, right)
    close(persistent(a, b, tma=True), persistent_reference(a, b))
    wide = matrix(136, 144, torch.float16, device)[:, 64:136]  # rows apart, and starting inside
    close(persistent(wide, b, tma=True), persistent_reference(wide, b))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, under the interpreter
def test_persistent_of_special_values(device):
    a, b = matrix(40, 64, torch.float16, device), matrix(64, 48, torch.float16, device)
    a[3, 5], a[7, 0] = float("nan"), float("inf")
    got = persistent(a, b)
    assert got[3].isnan().all()
    assert (~got[7].isfinite()).all()
    assert got[[0, 1, 2, 4, 5, 6, 8, 39]].isfinite().all()


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (torch.zeros(16, 16), torch.zeros(16, 16), "4 bytes"),
        (torch.zeros(16, 16).half()[:, ::2], torch.zeros(8, 16).half(), "no dimension has stride 1"),
        (torch.zeros(16, 9).half(), torch.zeros(9, 16).half(), "multiples of 16 bytes"),
        (torch.zeros(1, 16).half().expand(16, 16), torch.zeros(16, 16).half(), "overlap"),
        (torch.zeros(16 * 16 + 1).half()[1:].view(16, 16), torch.zeros(16, 16).half(), "does not start"),
        (torch.zeros(16, 16).half(), torch.zeros(12, 16).half().t(), "multiple of 8"),
    ],
)
def test_persistent_says_why_tma_cannot(a, b, why, device):
    a, b = (
        torch.as_strided(
            torch.zeros(4096, dtype=one.dtype, device=device), one.shape, one.stride(), one.storage_offset()
        )
        for one in (a, b)
    )
    if a.shape[1] != b.shape[0]:
        b = b[: a.shape[1]] if b.shape[0] > a.shape[1] else b
        a = a[:, : b.shape[0]]
    with pytest.raises(ValueError, match=why):
        persistent(a, b, tma=True)
    close(persistent(a, b), persistent_reference(a, b))


@pytest.mark.parametrize("right", ["rows", "columns", "steps"])
@pytest.mark.parametrize("m", [1, 2, 16, 17, 128])
def test_decode(m, right, device):
    for dtype in dtypes(device):
        for n, k in [(1, 1), (33, 130), (128, 512)]:
            a, b = matrix(m, k, dtype, device), matrix(k, n, dtype, device, right)
            close(decode(a, b), decode_reference(a, b))


@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_every_way_to_split(split, device, monkeypatch):
    configs = [
        config for config in decode_kernel.configs if config.kwargs["SPLIT_K"] == split and config.kwargs["WAYS"] == 1
    ]
    assert configs
    for config in configs if device == "cuda" else configs[:1]:
        monkeypatch.setattr(decode_kernel, "configs", [config])
        for m, n, k in [
            (3, 130, 1000),
            (16, 256, 2048),
            (40, 100, 300),
            (1, 64, 64),
        ]:  # the last: parts without any work
            a, b = matrix(m, k, torch.float16, device), matrix(k, n, torch.float16, device, "columns")
            got = [decode(a, b) for _ in range(3)]  # counters are left as they were found
            close(got[0], decode_reference(a, b))
            assert torch.equal(got[0], got[1])
            assert torch.equal(got[0], got[2])


OTHER_CONFIGS = [config for config in decode_kernel.configs if config.kwargs["WAYS"] != 1]


@pytest.mark.parametrize("config", OTHER_CONFIGS, ids=str)
def test_other_ways_to_multiply(config, device, monkeypatch):
    monkeypatch.setattr(decode_kernel, "configs", [config])
    m = 1 if config.kwargs["WAYS"] == 0 else 5
    for n, k in [(1, 1), (33, 130), (9, 5000), (32, 4096)]:
        for dtype in dtypes(device) if k == 130 else [torch.float16]:
            a, b = matrix(m, k, dtype, device, "steps"), matrix(k, n, dtype, device, "columns")
            got = decode(a, b)
            close(got, decode_reference(a, b))
            assert torch.equal(got, decode(a, b))  # counters are left as they were found


def test_what_is_for_few_rows_only():
    def left(**named):
        return {config.kwargs["WAYS"] for config in prune(decode_kernel.configs, named)}

    assert left(M=1, stride_bk=1) == {0, 1, 4, 8}
    assert left(M=2, stride_bk=1) == {1, 4, 8}
    assert left(M=1, stride_bk=64) == {1, 4, 8}
    assert left(M=17, stride_bk=1) == {1}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_decode_of_special_values(device):
    a, b = matrix(4, 64, torch.float16, device), matrix(64, 48, torch.float16, device)
    a[1, 5], a[2, 0] = float("nan"), float("inf")
    got = decode(a, b)
    assert got[1].isnan().all()
    assert (~got[2].isfinite()).all()
    assert got[[0, 3]].isfinite().all()


@pytest.mark.parametrize("function", [persistent, decode], ids=["persistent", "decode"])
def test_of_nothing(function, device):
    def zeros(*shape):
        return torch.zeros(*shape, device=device)

    assert function(zeros(0, 4), zeros(4, 3)).shape == (0, 3)
    assert function(zeros(2, 4), zeros(4, 0)).shape == (2, 0)
    assert torch.equal(function(zeros(2, 0), zeros(0, 3)), zeros(2, 3))


@pytest.mark.parametrize("function", [persistent, decode], ids=["persistent", "decode"])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 2)),
        (torch.zeros(2), torch.zeros(2, 2)),
        (torch.zeros(2, 3), torch.zeros(3)),
        (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)),
        (torch.zeros(2, 3, dtype=torch.int8), torch.zeros(3, 2, dtype=torch.int8)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2, device="meta")),
    ],
)
def test_refuses(function, a, b):
    with pytest.raises(ValueError, match="expected"):
        function(a, b)


def test_decode_refuses_many_rows():
    with pytest.raises(ValueError, match="at most 128 rows, got 129"):
        decode(torch.zeros(129, 3), torch.zeros(3, 2))


linear, linear_reference = (kernel(f"linear.py:{name}") for name in ("linear", "linear_reference"))


@pytest.mark.parametrize("shape", [(40,), (0, 40), (3, 40), (2, 65, 40), (2, 3, 0)])
def test_linear(shape, device):
    x = torch.randn(*shape, device=device).half()
    weight = torch.randn(24, shape[-1], device=device).half()
    bias = torch.randn(24, device=device).half()
    close(linear(x, weight), linear_reference(x, weight))
    close(linear(x, weight, bias), linear_reference(x, weight, bias))


def test_linear_has_no_gradient_not_even_of_its_bias(device):
    x, weight, bias = (torch.randn(*size, device=device, requires_grad=True) for size in ((2, 8), (4, 8), (4,)))
    with pytest.warns(UserWarning, match=r"^(x|weight|bias) requires a gradient, and the result has none"):
        assert not linear(x, weight, bias).requires_grad


def test_linear_refuses():
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    for arguments in [(x, weight.t()), (x, weight, torch.zeros(3)), (x, weight, torch.zeros(4).half()), (x, weight[0])]:
        with pytest.raises(ValueError, match="expected"):
            linear(*arguments)
