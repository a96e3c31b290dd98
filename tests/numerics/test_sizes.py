"""Sizes at which 32 bits or a grid's axes end: refused, split, or counted in 64. Run with TRITON_INTERPRET=1.

Kernels count rows, columns and blocks in 32 bits; CUDA allows 2**31 - 1 programs along a grid's first axis and 65,535
along the others. Tensors of such sizes have no memory here (the meta device): their launches are looked at, not made.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

import torch
from argument_cases import MODULE_OF, ROOT, calls, values, wrapper
from poisoning import device, poisoned, untuned  # noqa: F401

from tcache.autotuner import Autotuner
from tcache.replay import KernelRef, load

pytestmark = pytest.mark.usefixtures("untuned")
HALF, I32 = torch.float16, torch.int32
MOST, MOST_ACROSS = (load(KernelRef.parse(f"kernels/_check.py:{name}"), ROOT) for name in ("MOST", "MOST_ACROSS"))


def meta(*shape, dtype=HALF):
    return torch.empty(shape, dtype=dtype, device="meta")


def part(text):
    return load(KernelRef.parse(f"kernels/{text}"), ROOT)


@pytest.fixture
def grids(monkeypatch):
    """Collect the grid of every launch, with every config that the kernel has, instead of launching."""
    found = []

    def item(kernel, grid):
        def launch(*_args, **_kwargs):
            for config in kernel.configs:
                size = grid(config.kwargs) if callable(grid) else grid
                found.append((kernel.base_fn.__name__, *size, *[1] * (3 - len(size))))

        return launch

    monkeypatch.setattr(Autotuner, "__getitem__", item)
    for name in MODULE_OF:
        wrapper(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.") and hasattr(module, "on_device_of"):
            monkeypatch.setattr(module, "on_device_of", lambda _x: nullcontext())
    return found


def illegal(found):
    return [grid for grid in found if not (grid[1] < 2**31 and max(grid[2:]) <= 65535 and min(grid[1:]) > 0)]


ORDINARY = calls("cpu")
WIDE = 256 * 65535
ACCEPTED = {
    "softmax of two rows": ("softmax", meta(2, MOST)),
    "softmax of many rows": ("softmax", meta(MOST, 1)),
    "rmsnorm of many rows": ("rmsnorm", meta(MOST, 1)),
    "layernorm's gradients of wide rows": (
        "layernorm_backward", meta(2, MOST), meta(2, MOST), meta(MOST), *meta(2, 2, dtype=torch.float32),
    ),
    "rmsnorm's gradients of wide rows": (
        "rmsnorm_backward", meta(65, 10**7), meta(65, 10**7), meta(10**7), meta(65, dtype=torch.float32),
    ),
    "gather": ("gather", meta(2, WIDE), meta(2, dtype=I32), 1),
    "combine": ("combine", meta(2, WIDE), meta(2, 1, dtype=I32), meta(2, 1)),
    "gate": ("silu_gate", meta(2, 2 * WIDE)),
    "a sparse convolution's weight": (
        "sparse_conv_weight_gradient", meta(4, 8192), meta(4, 8192), meta(4, 27, dtype=I32),
    ),
    "a weight of many inputs": (
        "sparse_conv_weight_gradient", meta(4, 5_000_000), meta(4, 33), meta(4, 27, dtype=I32),
    ),
    "quantised blocks": ("quantize_fp8", meta(2**24, 1024), 16),
    "columns of b": ("matmul_decode", meta(1, 64), meta(64, MOST)),
    "pairs": ("align", meta(MOST, 1, dtype=I32), 8),
    "sequences": (
        "decode_attention", meta(65536, 8, 64), meta(64, 16, 8, 64), meta(64, 16, 8, 64), meta(65536, 64, dtype=I32),
        meta(65536, dtype=I32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_what_is_accepted_has_a_legal_grid(name, grids):
    function, *arguments = ACCEPTED[name]
    wrapper(function)(*arguments)
    assert grids
    assert not illegal(grids)


@pytest.mark.parametrize("name", sorted(set(MODULE_OF) - {"fill_map", "neighbour_map", "sort_rows"}))
def test_ordinary_grids_are_legal(name, grids):
    wrapper(name)(**values(ORDINARY[name]))
    assert grids
    assert not illegal(grids)


def test_an_illegal_grid_is_found():
    assert illegal([("kernel", 1, 65536, 1), ("kernel", 2**31, 1, 1), ("kernel", 1, 1, 0)])
    assert not illegal([("kernel", 2**31 - 1, 65535, 65535)])


Q = meta(2**20, 2**11, 1, 16)
REFUSED = {
    "rows": ("x", "softmax", meta(2**31, 1)),
    "columns": ("x", "softmax", meta(1, 2**31 - 100)),
    "rows of three dimensions": ("x", "softmax", meta(2**16, 2**15, 1)),
    "rows of rmsnorm": ("x", "rmsnorm", meta(2**31, 1)),
    "rows of layernorm": ("x", "layernorm", meta(2**31, 1)),
    "rows of factors": ("x", "affine_relu", meta(2**16, 2**15, 2), meta(2), 1.0),
    "rows to quantise": ("x", "quantize_int8", meta(2**31, 1)),
    "blocks to quantise": ("x", "quantize_fp8", meta(2**27, 256), 16),
    "static blocks": ("x", "quantize_int8", meta(2**27, 2**14), meta(2**27, dtype=torch.float32)),
    "blocks to multiply": (
        "q", "dequantize", meta(2**27, 256, dtype=torch.int8), meta(2**27, 16, dtype=torch.float32), 16,
    ),
    "rows of a": ("a", "matmul", meta(2**31, 1), meta(1, 1)),
    "columns of b": ("b", "matmul_decode", meta(1, 1), meta(1, 2**31)),
    "products": ("a", "matmul_persistent", meta(1, 2**31), meta(2**31, 1)),
    "rows of a layer": ("x", "linear", meta(2**16, 2**15, 1), meta(1, 1)),
    "weights": ("w", "dequant_matmul", meta(1, 1), meta(1, 2**31, dtype=torch.int8), meta(2**31, dtype=torch.float32)),
    "tokens": ("logits", "route", meta(2**31, 2), 1),
    "pairs": ("experts", "align", meta(2**31 - 64, 1, dtype=I32), 4),
    "tokens of experts": ("x", "grouped_gemm", meta(2**31, 1), meta(1, 1, 1), meta(2, dtype=I32)),
    "columns to gather": ("x", "gather", meta(1, WIDE + 1), meta(1, dtype=I32), 1),
    "columns to combine": ("y", "combine", meta(1, WIDE + 1), meta(1, 1, dtype=I32), meta(1, 1)),
    "columns to gate": ("x", "silu_gate", meta(1, 2 * WIDE + 2)),
    "heads": ("q", "attention", Q, Q, Q),
    "keys of a table": (
        "block_table", "decode_attention", meta(1, 1, 16), meta(4, 16, 1, 16), meta(4, 16, 1, 16),
        meta(1, 2**27, dtype=I32), meta(1, dtype=I32),
    ),
    "a weight": (
        "weight", "sparse_conv", meta(2, 2**16), meta(27, 2**16, 2**15), meta(2, 27, dtype=I32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_32_bits_do_not_count_is_refused(name):
    argument, function, *arguments = REFUSED[name]
    with pytest.raises(ValueError, match=rf"\b{argument}\b.*at most|at most .*\b{argument}\b"):
        wrapper(function)(*arguments)


def test_one_number_for_each_element_counts_in_64_bits(grids):
    wrapper("axpy")(1.0, meta(2**33), meta(2**33))
    wrapper("affine_relu")(meta(2**33), 2.0, 1.0)
    assert {grid[0] for grid in grids} == {"axpy_kernel", "affine_relu_kernel"}


def test_gradients_of_columns_in_several_launches(monkeypatch):
    backward, reference = part("layernorm.py:layernorm_backward"), part("layernorm.py:layernorm_backward_reference")
    n = 16384 + 300
    dy, x, weight = torch.randn(3, n), torch.randn(3, n), torch.randn(n)
    mean, rstd = x.mean(1), x.std(1).reciprocal()
    whole = backward(dy, x, weight, mean, rstd)
    monkeypatch.setattr(sys.modules["kernels._norm_launches"], "WIDEST_COLUMNS", 4096)
    split = backward(dy, x, weight, mean, rstd)
    for got, one, wanted in zip(split, whole, reference(dy, x, weight, mean, rstd), strict=True):
        assert torch.equal(got, one)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cin", "cout"), [(200, 40), (40, 200), (130, 130)])
def test_a_weights_gradient_in_several_launches(cin, cout, monkeypatch):
    gradient_of, reference = (
        part(f"sparse_conv_backward.py:sparse_conv_weight_gradient{suffix}") for suffix in ("", "_reference")
    )
    features, gradient = torch.randn(5, cin), torch.randn(5, cout)
    neighbours = torch.randint(-1, 5, (5, 3), dtype=I32)
    monkeypatch.setattr(sys.modules["kernels.sparse_conv_backward"], "MOST_ACROSS", 6)
    found, wanted = gradient_of(features, gradient, neighbours), reference(features, gradient, neighbours)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def far(*shape, strides):
    """Return a float16 tensor of elements that far apart; of the gigabytes of addresses little is touched."""
    last = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 2 * (last + 1), flags=flags), dtype=HALF).as_strided(shape, strides)


def test_a_weight_that_reaches_far_is_copied():
    conv, reference = part("sparse_conv.py:sparse_conv"), part("sparse_conv.py:sparse_conv_reference")
    weight = far(2, 10, 4, strides=(4, 1 << 28, 1))
    weight.copy_(torch.randn(2, 10, 4))
    features, neighbours = torch.randn(3, 10).half(), torch.tensor([[0, 1], [-1, 2], [1, -1]], dtype=I32)
    torch.testing.assert_close(
        conv(features, weight, neighbours), reference(features, weight, neighbours), rtol=1e-2, atol=1e-2
    )


def test_pages_beyond_32_bits_of_tokens():
    decode, reference = (
        part("decode_attention.py:decode_attention"),
        part("decode_attention.py:decode_attention_reference"),
    )
    pages = 2**27 + 2
    cache = far(pages, 16, 1, 16, strides=(256, 16, 16, 1))
    table = torch.tensor([[pages - 1, 3]], dtype=I32)
    for page in (pages - 1, 3):
        cache[page] = torch.randn(16, 1, 16).half()
    q, lengths = torch.randn(1, 2, 16).half(), torch.tensor([30], dtype=I32)
    found, wanted = decode(q, cache, cache, table, lengths), reference(q, cache, cache, table, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_coordinates_that_keys_cannot_tell_apart_are_refused():
    """Two voxels ``2**63`` keys apart were neighbours of each other's neighbours, by wrapping around."""
    neighbour_map = part("voxels.py:neighbour_map")
    side = 2**21
    for high in ([0, side, side, side], [0, 2**62, 0, 0], [2**61, 1, 1, 1]):
        with pytest.raises(ValueError, match=r"coordinates: expected ranges whose product"):
            neighbour_map(torch.tensor([[0, 0, 0, 0], high]))
    with pytest.raises(ValueError, match="coordinates"):
        neighbour_map(torch.tensor([[-(2**63), 0], [2**63 - 1, 0]]))
    near = neighbour_map(torch.tensor([[16383, 0, 0, 0], [16383, 0, 0, 1], [0, 60000, 60000, 60000]]))
    assert near[:, 13].tolist() == [0, 1, 2]
    assert (near >= 0).sum() == 5
