"""Attention's numbers under Triton's interpreter, against torch. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

import attention_cases as cases
import torch
from attention_cases import attention, attention_backward, attention_forward, decode_attention, kernel

# The interpreter multiplies bfloat16 as the integers it stores them in; tests/gpu has bfloat16.
DTYPES = [torch.float32, torch.float16]
# numpy warns of log2(0), of sequences and rows without keys, and of NaN in the cases that have it
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|All-NaN slice):RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN: what a kernel does not write shows."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_forward(shape, dtype):
    o, lse = cases.check_forward(shape, dtype, "cpu")
    blind = max(shape[3] - shape[4], 0) if shape[-1] else 0
    assert not o[:, :, :blind].any()
    assert (lse[:, :, :blind] == -float("inf")).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_backward(shape, dtype):
    cases.check_backward(shape, dtype, "cpu")


@pytest.mark.parametrize(("name", "number"), cases.CONFIGS)
def test_every_config(name, number):
    cases.check_config(name, number, torch.float32, "cpu", 16, (75, 140), (number % 2 == 0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
def test_configs_that_are_left(dim, dtype):
    for name, tuner in cases.KERNELS.items():
        tensor = torch.empty(1, device="meta", dtype=dtype)
        prune = tuner.early_config_prune or (lambda configs, _, **_launch: configs)
        left = prune(tuner.configs, {"q_ptr": tensor, "k_ptr": tensor}, HEAD_DIM=dim)
        assert [config for config in tuner.configs if config in left] == left, "in order"
        assert left, name
        if dtype == torch.bfloat16 and dim == 64:
            assert len(left) == len(tuner.configs), "a config that never fits is of no use"
        if dtype == torch.float32 and dim == 256 and tuner.early_config_prune:
            assert len(left) < len(tuner.configs)


def test_scale():
    cases.check_forward(cases.SHAPES[1], torch.float32, "cpu", scale=0.3)
    cases.check_backward(cases.SHAPES[3], torch.float32, "cpu", scale=0.3)


def test_scores_too_large_for_their_powers():
    q, k, v = cases.inputs((1, 1, 1, 20, 20, 16, True), torch.float32, "cpu")
    o, lse = attention_forward(100 * q, 100 * k, v)
    wanted, sums = cases.attention_forward_reference(100 * q, 100 * k, v)
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-6)
    # scores of 10,000 have a resolution of 1e-3 in float32, and so have the logarithms of the weights
    torch.testing.assert_close(o, wanted, rtol=5e-3, atol=5e-3)


def test_layouts():
    cases.check_layouts(torch.float32, "cpu")


def test_windows():
    cases.check_windows(torch.float32, "cpu")


def test_special_values():
    cases.check_special_values(torch.float32, "cpu")


@pytest.mark.parametrize("shape", [s for s in cases.SHAPES if s[3] <= s[4]], ids=str)
def test_gradient_and_references_are_those_of_torch(shape):
    q, k, v = (x.requires_grad_() for x in cases.inputs(shape, torch.float32, "cpu"))
    do = torch.randn_like(q)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, wanted = attention(q, k, v, shape[-1]), cases.attention_torch(*wide, shape[-1])
    cases.close(o, wanted.float())
    got = torch.autograd.grad(o, (q, k, v), do)
    plain = [x.detach() for x in (q, k, v)]
    reference = cases.attention_backward_reference(do, *plain, None, None, shape[-1])
    for mine, own, theirs in zip(got, reference, torch.autograd.grad(wanted, wide, do.double()), strict=True):
        cases.close(mine, theirs.float(), cases.GRADIENT_TOLERANCE)
        cases.close(own, theirs.float())
    cases.close(cases.attention_forward_reference(*plain, shape[-1])[0], wanted.detach().float())


def test_references_in_chunks(monkeypatch):
    module = __import__("sys").modules[cases.attention_forward_reference.__module__]
    backward = __import__("sys").modules[cases.attention_backward_reference.__module__]
    q, k, v = cases.inputs((1, 4, 2, 50, 60, 16, True), torch.float32, "cpu")
    do = torch.randn_like(q)

    def everything():
        found = [*cases.attention_forward_reference(q, k, v)]
        return [*found, *cases.attention_backward_reference(do, q, k, v, None, None)]

    whole = everything()
    pieces = [(0, 7), (7, 20), (20, 50)]
    assert len(module.row_chunks(q, k)) == 1
    monkeypatch.setattr(module, "row_chunks", lambda *_: pieces)
    monkeypatch.setattr(backward, "row_chunks", lambda *_: pieces)
    for one, other in zip(whole, everything(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 4, 4, 16), (1, 0, 0, 4, 4, 16), (1, 2, 1, 0, 4, 16), (1, 2, 1, 4, 0, 16)], ids=str
)
def test_nothing(shape):
    q, k, v = (x.requires_grad_() for x in cases.inputs((*shape, True), torch.float32, "cpu"))
    o, lse = attention_forward(q.detach(), k.detach(), v.detach())
    assert o.shape == q.shape
    assert not o.any()
    assert lse.shape == q.shape[:3]
    assert (lse == -float("inf")).all()
    out = attention(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]
    assert not any(g.any() for g in gradients)
    assert [x.shape for x in cases.attention_forward_reference(q.detach(), k.detach(), v.detach())] == [
        o.shape,
        lse.shape,
    ]


def test_no_gradient_of_gradients():
    q, k, v = (x.requires_grad_() for x in cases.inputs(cases.SHAPES[0], torch.float32, "cpu"))
    for factor in (q, 1.0):  # with a number the gradient that comes in depends on nothing
        (once,) = torch.autograd.grad((attention(q, k, v) * factor).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (q.sum() + once.square().sum()).backward()


def _zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = _zeros(1, 2, 4, 16)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        (_zeros(2, 4, 16), GOOD, GOOD),
        (GOOD, _zeros(2, 2, 4, 16), _zeros(2, 2, 4, 16)),
        (GOOD, GOOD, _zeros(1, 2, 5, 16)),
        (GOOD, _zeros(1, 2, 4, 32), _zeros(1, 2, 4, 32)),
        (_zeros(1, 2, 4, 48), _zeros(1, 2, 4, 48), _zeros(1, 2, 4, 48)),
        (_zeros(1, 3, 4, 16), GOOD, GOOD),
        (GOOD, _zeros(1, 0, 4, 16), _zeros(1, 0, 4, 16)),
        (GOOD, GOOD.half(), GOOD.half()),
        (GOOD.double(), GOOD.double(), GOOD.double()),
        (GOOD.int(), GOOD.int(), GOOD.int()),
        (GOOD, GOOD, _zeros(1, 2, 4, 16, device="meta")),
        (GOOD, GOOD, _zeros(1, 2, 4, 32)[..., ::2]),
        (_zeros(1, 2, 16, 4).transpose(2, 3), GOOD, GOOD),
    ],
)
def test_attention_refuses(q, k, v):
    with pytest.raises(ValueError, match="expected"):
        attention(q, k, v)
    with pytest.raises(ValueError, match="expected"):
        attention_backward(q, q, k, v, q, _zeros(*q.shape[:3]))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_attention_refuses_a_scale(scale):
    with pytest.raises(ValueError, match="expected a finite scale above 0"):
        attention(GOOD, GOOD, GOOD, scale=scale)


@pytest.mark.parametrize(
    ("do", "o", "lse"),
    [
        (_zeros(1, 2, 5, 16), GOOD, _zeros(1, 2, 4)),
        (GOOD, GOOD.half(), _zeros(1, 2, 4)),
        (GOOD, _zeros(1, 2, 4, 16, device="meta"), _zeros(1, 2, 4)),
        (GOOD, GOOD, _zeros(1, 2, 5)),
        (GOOD, GOOD, _zeros(1, 2, 4, dtype=torch.float16)),
        (GOOD, GOOD, _zeros(1, 2, 4, device="meta")),
        (GOOD, GOOD, _zeros(1, 4, 2).transpose(1, 2)),
    ],
)
def test_backward_refuses(do, o, lse):
    with pytest.raises(ValueError, match="expected"):
        attention_backward(do, GOOD, GOOD, GOOD, o, lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.PAGED, ids=str)
def test_decode(case, dtype):
    cases.check_decode(case, dtype, "cpu")


def test_decode_like_torch():
    arguments, got = cases.check_decode(cases.PAGED[3], torch.float32, "cpu", scale=0.4)
    q, k, v, table, lengths = arguments
    wanted = cases.decode_attention_torch(q, k.nan_to_num(), v.nan_to_num(), table, lengths, 0.4)
    cases.close(got[lengths > 0], wanted[lengths > 0])


def test_decode_of_wrong_indices():
    cases.check_decode_of_wrong_indices("cpu")


def test_decode_of_strided_caches():
    cases.check_decode_of_strided_caches(torch.float32, "cpu")


def test_decode_of_nothing():
    table, lengths = _zeros(2, 3, dtype=torch.int32), _zeros(2, dtype=torch.int32)
    q, cache = torch.randn(2, 4, 16), torch.randn(6, 16, 2, 16)
    assert decode_attention(q[:0], cache, cache, table[:0], lengths[:0]).shape == (0, 4, 16)
    for caches, tables in ((cache[:0], table), (cache, table[:, :0]), (cache, table)):
        got = decode_attention(q, caches, caches, tables, lengths)
        assert got.shape == q.shape
        assert not got.any()


CACHE, TABLE, LENGTHS = _zeros(6, 16, 2, 16), _zeros(2, 3, dtype=torch.int32), _zeros(2, dtype=torch.int32)
QUERY = _zeros(2, 4, 16)


@pytest.mark.parametrize(
    ("q", "k", "v", "table", "lengths"),
    [
        (_zeros(2, 4, 1, 16), CACHE, CACHE, TABLE, LENGTHS),
        (QUERY, CACHE, _zeros(5, 16, 2, 16), TABLE, LENGTHS),
        (_zeros(2, 4, 32), CACHE, CACHE, TABLE, LENGTHS),
        (QUERY, _zeros(6, 8, 2, 16), _zeros(6, 8, 2, 16), TABLE, LENGTHS),
        (_zeros(2, 4, 24), _zeros(6, 16, 2, 24), _zeros(6, 16, 2, 24), TABLE, LENGTHS),
        (_zeros(2, 3, 16), CACHE, CACHE, TABLE, LENGTHS),
        (QUERY, _zeros(6, 16, 0, 16), _zeros(6, 16, 0, 16), TABLE, LENGTHS),
        (QUERY.half(), CACHE, CACHE, TABLE, LENGTHS),
        (QUERY.double(), CACHE.double(), CACHE.double(), TABLE, LENGTHS),
        (QUERY, CACHE, CACHE, TABLE[:1], LENGTHS),
        (QUERY, CACHE, CACHE, TABLE, LENGTHS[:1]),
        (QUERY, CACHE, CACHE, TABLE[0], LENGTHS),
        (QUERY, CACHE, CACHE, TABLE.long(), LENGTHS),
        (QUERY, CACHE, CACHE, TABLE, LENGTHS.long()),
        (QUERY, CACHE, CACHE, TABLE.to("meta"), LENGTHS),
        (QUERY, CACHE, CACHE, _zeros(2, 6, dtype=torch.int32)[:, ::2], LENGTHS),
        (QUERY, CACHE, _zeros(6, 16, 2, 32)[..., ::2], TABLE, LENGTHS),
    ],
)
def test_decode_refuses(q, k, v, table, lengths):
    with pytest.raises(ValueError, match="expected"):
        decode_attention(q, k, v, table, lengths)


def test_decode_refuses_tokens_that_overlap():
    q, table, lengths = torch.zeros(1, 2, 16), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    shared = torch.zeros(2, 16, 1, 16)[:, :1].expand(2, 16, 1, 16)
    assert decode_attention(q, shared, shared, table, lengths).shape == q.shape
    for stride in (1, 8, 15):
        windows = torch.zeros(600).as_strided((2, 16, 1, 16), (256, stride, 16, 1))
        for caches in ((windows, shared), (shared, windows)):
            with pytest.raises(ValueError, match="expected tokens that do not overlap"):
                decode_attention(q, *caches, table, lengths)


@pytest.mark.parametrize("scale", [0.0, float("inf")])
def test_decode_refuses_a_scale(scale):
    with pytest.raises(ValueError, match="expected a finite scale above 0"):
        decode_attention(QUERY, CACHE, CACHE, TABLE, LENGTHS, scale)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (5, 5), (3, 9), (9, 3), (4, 0)])
def test_operations_and_bytes(q_len, kv_len, causal):
    q = torch.empty(2, 6, q_len, 32, device="meta", dtype=torch.float16)
    k = torch.empty(2, 3, kv_len, 32, device="meta", dtype=torch.float16)
    pairs = sum(not causal or j <= i + kv_len - q_len for i in range(q_len) for j in range(kv_len))
    products = 2 * 2 * 6 * pairs * 32  # operations of one product
    lse = torch.empty(2, 6, q_len, device="meta")
    size = 2 * 2 * 32 * (6 * q_len + 2 * 3 * kv_len)  # q, k and v
    for module, name in (("attention", "attention"), ("attention_forward", "attention_forward")):
        assert kernel(module, f"{name}_flops")(q, k, k, causal) == 2 * products
        assert kernel(module, f"{name}_bytes")(q, k, k, causal) == size + 2 * q.numel() + 4 * lse.numel()
    whole = (q, q, k, k, q, lse, causal)
    assert kernel("attention_backward", "attention_backward_flops")(*whole) == 5 * products
    moved = 2 * size + 2 * 2 * q.numel() + 4 * lse.numel()  # what is read and its gradients, do and o, lse
    assert kernel("attention_backward", "attention_backward_bytes")(*whole) == moved


def test_operations_and_bytes_of_decode():
    q = torch.empty(3, 8, 64, device="meta", dtype=torch.bfloat16)
    cache = torch.empty(50, 16, 2, 64, device="meta", dtype=torch.bfloat16)
    table = torch.empty(3, 5, device="meta", dtype=torch.int32)
    lengths = torch.empty(3, device="meta", dtype=torch.int32)
    tokens = 3 * 5 * 16
    arguments = (q, cache, cache, table, lengths)
    assert kernel("decode_attention", "decode_attention_flops")(*arguments) == 2 * 2 * tokens * 8 * 64
    moved = tokens * 2 * 2 * 64 * 2 + (15 + 3) * 4 + 2 * 3 * 8 * 64 * 2
    assert kernel("decode_attention", "decode_attention_bytes")(*arguments) == moved


def test_inputs_of_the_backward_are_the_forwards_results():
    q, k, v = cases.inputs(cases.SHAPES[3], torch.float32, "cpu")
    o, lse = torch.randn_like(q), torch.zeros(q.shape[:3])
    kernel("attention_backward", "attention_backward_inputs")(q, q, k, v, o, lse)
    wanted = attention_forward(q, k, v)
    cases.close(o, wanted[0])
    cases.close(lse, wanted[1])


@pytest.mark.parametrize(
    ("slots", "longest"), [(1, 16), (8, 1024), (8, 32768), (512, 32768), (4096, 1 << 20), (3, 257)]
)
def test_parts_of_a_sequence(slots, longest):
    module = __import__("sys").modules[decode_attention.__module__]
    splits = module._splits(slots, longest)
    assert splits & (splits - 1) == 0
    assert longest / splits <= module.LONGEST
    assert splits == 1 or longest / splits > module.SHORTEST / 2
    # a power of two more than what fills the GPU at most, unless the parts would be too long
    assert slots * splits <= max(2 * module.PROGRAMS, slots) or longest * 2 / splits > module.LONGEST
