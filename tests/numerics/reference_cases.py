"""Where references end: tensors of nothing, rows without a finite score, maps with what is no row.

On the device that the importing module's fixture names.
"""

from __future__ import annotations

import pytest
import torch
from argument_cases import wrapper as of
from rowwise_cases import kernel

HALF, I32, I64 = torch.float16, torch.int32, torch.int64


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


NO_MAP, MAP = zeros(0, 27, dtype=I32), zeros(1, 27, dtype=I32)
CACHE, TABLE, LENGTHS = zeros(4, 16, 1, 16), zeros(2, 3, dtype=I32), zeros(2, dtype=I32)
EMPTY = {
    "affine_relu": [(zeros(0, 4), 2.0, zeros(4)), (zeros(3, 0), 2.0, zeros(0)), (zeros(0), 2.0, 1.0)],
    "align": [(zeros(0, 2, dtype=I32), 3), (zeros(3, 0, dtype=I32), 3)],
    "attention": [
        (zeros(0, 2, 3, 16), zeros(0, 1, 3, 16), zeros(0, 1, 3, 16)),
        (zeros(1, 2, 0, 16), zeros(1, 1, 3, 16), zeros(1, 1, 3, 16)),
        (zeros(1, 2, 3, 16), zeros(1, 1, 0, 16), zeros(1, 1, 0, 16)),
        (zeros(1, 0, 3, 16), zeros(1, 1, 3, 16), zeros(1, 1, 3, 16)),
        (zeros(1, 0, 3, 16), zeros(1, 0, 3, 16), zeros(1, 0, 3, 16)),
    ],
    "axpy": [(2.0, zeros(0), zeros(0))],
    "combine": [
        (zeros(0, 4), zeros(2, 0, dtype=I32), zeros(2, 0)), (zeros(3, 0), zeros(2, 1, dtype=I32), zeros(2, 1)),
        (zeros(0, 4), zeros(0, 2, dtype=I32), zeros(0, 2)), (zeros(0, 4), -1 - zeros(2, 1, dtype=I32), zeros(2, 1)),
    ],
    "decode_attention": [
        (zeros(0, 2, 16), CACHE, CACHE, TABLE[:0], LENGTHS[:0]), (zeros(2, 0, 16), CACHE, CACHE, TABLE, LENGTHS),
        (zeros(2, 2, 16), CACHE[:0], CACHE[:0], TABLE, LENGTHS + 2),
        (zeros(2, 2, 16), CACHE, CACHE, TABLE[:, :0], LENGTHS + 2), (zeros(2, 2, 16), CACHE, CACHE, TABLE, LENGTHS),
    ],
    "dequant_matmul": [
        (zeros(*a, dtype=HALF), zeros(*w, dtype=torch.int8), zeros(w[1]))
        for a, w in [((0, 4), (4, 3)), ((2, 0), (0, 3)), ((2, 4), (4, 0))]
    ],
    "dequantize": [
        (zeros(0, 4, dtype=torch.int8), zeros(0)), (zeros(3, 0, dtype=torch.int8), zeros(3)),
        (zeros(0, 40, dtype=torch.int8), zeros(0, 3), 16), (zeros(3, 0, dtype=torch.int8), zeros(3, 0), 16),
    ],
    "gather": [(zeros(0, 4), zeros(0, dtype=I32), 2), (zeros(3, 0), zeros(6, dtype=I32), 2)],
    "grouped_gemm": [
        (zeros(0, 4), zeros(2, 4, 3), zeros(3, dtype=I32)),
        (zeros(2, 0), zeros(2, 0, 3), torch.tensor([0, 1, 2])), (zeros(2, 4), zeros(2, 4, 0), torch.tensor([0, 1, 2])),
    ],
    "layernorm": [(zeros(0, 4), zeros(4), zeros(4)), (zeros(2, 0, 4),), (zeros(3, 0), zeros(0), zeros(0))],
    "layernorm_backward": [
        (zeros(0, 4), zeros(0, 4), zeros(4), zeros(0), zeros(0)),
        (zeros(3, 0), zeros(3, 0), zeros(0), zeros(3), zeros(3)),
        (zeros(0, 4), zeros(0, 4), None, zeros(0), zeros(0), False),
    ],
    "linear": [(zeros(0, 4), zeros(3, 4), zeros(3)), (zeros(2, 0), zeros(3, 0)), (zeros(2, 0, 4), zeros(3, 4))],
    **{
        name: [(zeros(0, 4), zeros(4, 3)), (zeros(2, 0), zeros(0, 3)), (zeros(2, 4), zeros(4, 0))]
        for name in ("matmul", "matmul_decode", "matmul_persistent")
    },
    "moe_mlp": [(zeros(0, 8), zeros(0, 3), zeros(3, 4, 8), zeros(3, 8, 2), 2)],
    "quantize_fp8": [
        (zeros(0, 40), 16), (zeros(3, 0), 16), (zeros(3, 0), None), (zeros(0, 0),), (zeros(3, 0), 16, zeros(3, 0)),
    ],
    "quantize_int8": [(zeros(0, 4),), (zeros(3, 0),), (zeros(0, 0),), (zeros(3, 0), zeros(3)), (zeros(0, 4), zeros(0))],
    "rmsnorm": [(zeros(0, 4), zeros(4)), (zeros(2, 0, 4),), (zeros(3, 0), zeros(0))],
    "rmsnorm_backward": [
        (zeros(0, 4), zeros(0, 4), zeros(4), zeros(0)), (zeros(3, 0), zeros(3, 0), zeros(0), zeros(3)),
        (zeros(0, 4), zeros(0, 4), None, zeros(0)),
    ],
    "route": [(zeros(0, 4), 2)],
    "silu_gate": [(zeros(0, 4),), (zeros(3, 0),)],
    "softmax": [(zeros(0, 4),), (zeros(3, 0),), (zeros(0),), (zeros(2, 0, 4),)],
    "sparse_conv": [
        (zeros(0, 4), zeros(27, 4, 8), NO_MAP), (zeros(1, 4), zeros(27, 4, 0), MAP),
        (zeros(1, 0), zeros(27, 0, 3), MAP),
        (zeros(1, 4), zeros(0, 4, 3), MAP[:, :0]),
    ],
    "sparse_conv_features_gradient": [(zeros(0, 8), zeros(27, 4, 8), NO_MAP), (zeros(1, 0), zeros(27, 3, 0), MAP)],
    "sparse_conv_weight_gradient": [
        (zeros(0, 4), zeros(0, 8), NO_MAP), (zeros(1, 0), zeros(1, 8), MAP), (zeros(1, 4), zeros(1, 0), MAP),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), [(name, each) for name in EMPTY for each in EMPTY[name]])
def test_of_nothing_a_wrapper_and_its_reference_make_the_same(name, arguments, device):
    given = [each.to(device) if isinstance(each, torch.Tensor) else each for each in arguments]
    module = of(name).__module__.removeprefix("kernels.")
    found, wanted = of(name)(*given), kernel(module, f"{name}_reference")(*given)
    found, wanted = (each if isinstance(each, tuple) else (each,) for each in (found, wanted))
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            assert torch.equal(one.float(), other.float())


def test_decode_of_scores_that_are_all_infinite(device):
    """Nothing has a weight then: 0, as where there is no key; torch's softmax makes NaN of it."""
    cache = torch.randn(4, 16, 1, 16, device=device)
    cache[1] = -torch.inf
    table = torch.tensor([[1, 1], [1, 2], [0, 3]], device=device, dtype=I32)
    lengths = torch.tensor([20, 20, 0], device=device, dtype=I32)
    q = torch.rand(3, 2, 16, device=device) + 0.1
    values = torch.randn(4, 16, 1, 16, device=device)
    decode, reference = of("decode_attention"), kernel("decode_attention", "decode_attention_reference")
    found, wanted = decode(q, cache, values, table, lengths), reference(q, cache, values, table, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert wanted.isfinite().all()
    assert not wanted[[0, 2]].any()
    assert wanted[1].any()


@pytest.mark.parametrize("nobody", [-1, -2, -5, -(1 << 31), 5, 1 << 30])
def test_maps_with_numbers_that_are_no_row(nobody, device):
    """Python counts rows from the end where they are negative; in a map they are nobody."""
    plain = torch.randint(-1, 5, (5, 27), device=device, dtype=I32)
    neighbours = torch.where(plain < 0, nobody, plain)
    features, weight = torch.randn(5, 16, device=device), torch.randn(27, 16, 8, device=device) / 16
    gradient = torch.randn(5, 8, device=device)
    for name, arguments in [
        ("sparse_conv", (features, weight)),
        ("sparse_conv_features_gradient", (gradient, weight)),
        ("sparse_conv_weight_gradient", (features, gradient)),
    ]:
        module = of(name).__module__.removeprefix("kernels.")
        reference = kernel(module, f"{name}_reference")
        found, wanted = of(name)(*arguments, neighbours), reference(*arguments, plain)
        torch.testing.assert_close(reference(*arguments, neighbours), wanted)
        torch.testing.assert_close(found, wanted, rtol=2e-2 if device == "cuda" else 1e-4, atol=2e-2)
        flops = kernel(module, f"{name}_flops")
        assert flops(*arguments, neighbours) == flops(*arguments, plain)
    in_torch = kernel("sparse_conv", "sparse_conv_torch")
    torch.testing.assert_close(in_torch(features, weight, neighbours), in_torch(features, weight, plain))
