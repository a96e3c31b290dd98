"""Cases of attention shared by the interpreter's tests and the GPU's: each takes the device it runs on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from tcache.replay import KernelRef, load

ROOT = Path(__file__).parents[2]


def kernel(module, name):
    return load(KernelRef.parse(f"kernels/{module}.py:{name}"), ROOT)


attention = kernel("attention", "attention")
attention_torch = kernel("attention", "attention_torch")
attention_forward = kernel("attention_forward", "attention_forward")
attention_forward_reference = kernel("attention_forward", "attention_forward_reference")
attention_backward = kernel("attention_backward", "attention_backward")
attention_backward_reference = kernel("attention_backward", "attention_backward_reference")
decode_attention = kernel("decode_attention", "decode_attention")
decode_attention_reference = kernel("decode_attention", "decode_attention_reference")
decode_attention_torch = kernel("decode_attention", "decode_attention_torch")
decode_attention_inputs = kernel("decode_attention", "decode_attention_inputs")

KERNELS = {
    name: kernel(module, f"{name}_kernel")
    for module, name in [
        ("attention_forward", "attention_forward"),
        ("attention_backward", "attention_delta"),
        ("attention_backward", "attention_dkdv"),
        ("attention_backward", "attention_dq"),
        ("decode_attention", "decode_attention"),
        ("decode_attention", "decode_combine"),
    ]
}
CONFIGS = [(name, number) for name, tuner in KERNELS.items() for number in range(len(tuner.configs))]

TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.float16: (1e-2, 1e-2), torch.bfloat16: (1e-2, 1e-2)}
# dS = P * (dP - delta) cancels, and is rounded to the inputs' dtype before its products: errors follow the size of
# typical gradients, not of the one that happens to be near 0. bfloat16 has 8 bits.
GRADIENT_TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-2, 1e-2), torch.bfloat16: (2e-2, 2e-2)}

SHAPES = [
    # B, Hq, Hkv, Sq, Skv, D, causal
    (1, 1, 1, 1, 1, 16, True),
    (1, 2, 1, 70, 70, 64, True),
    (2, 3, 3, 128, 128, 32, True),
    (1, 4, 2, 33, 100, 32, True),  # keys from a cache
    (2, 2, 1, 100, 33, 16, True),  # the first 67 queries see no key
    (1, 2, 2, 300, 2, 16, True),
    (1, 1, 1, 130, 257, 64, False),
    (1, 8, 1, 1, 77, 16, True),
    (1, 1, 1, 40, 40, 256, True),
    (1, 2, 2, 64, 64, 128, False),
]
PAGED = [
    # Hq, Hkv, D, page size, pages a sequence has room for, lengths
    (4, 1, 32, 16, 5, [70, 0]),
    (2, 2, 64, 16, 40, [600]),  # parts
    (8, 2, 32, 128, 3, [1, 384, 200]),
    (3, 3, 16, 32, 33, [1040, 0, 31]),  # parts, one of them without any key
    (40, 2, 16, 64, 2, [128, 65]),  # groups of more than 16
    (1, 1, 256, 16, 1, [16]),
]


def close(got, wanted, tolerance=TOLERANCE):
    rtol, atol = tolerance[wanted.dtype]
    if tolerance is GRADIENT_TOLERANCE and wanted.numel() > 1:
        atol *= max(1.0, wanted.float().std().item())
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)


def inputs(shape, dtype, device):
    batch, heads, kv_heads, q_len, kv_len, dim, _ = shape
    sizes = [(batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)]
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def check_forward(shape, dtype, device, scale=None):
    q, k, v = inputs(shape, dtype, device)
    o, lse = attention_forward(q, k, v, shape[-1], scale)
    wanted, sums = attention_forward_reference(q, k, v, shape[-1], scale)
    close(o, wanted)
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-5)
    return o, lse


def check_backward(shape, dtype, device, scale=None):
    q, k, v = inputs(shape, dtype, device)
    do = torch.randn_like(q)
    o, lse = attention_forward(q, k, v, shape[-1], scale)
    got = attention_backward(do, q, k, v, o, lse, shape[-1], scale)
    wanted = attention_backward_reference(do, q, k, v, o, lse, shape[-1], scale)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs, GRADIENT_TOLERANCE)


def check_layouts(dtype, device):
    """[B, S, H, D] views, parts of one packed tensor, a head shared by stride 0; what lies around them is NaN."""
    packed = torch.full((2, 50, 3, 5, 32), float("nan"), device=device, dtype=dtype)
    packed[:, 3:45, :, 1:3] = torch.randn(2, 42, 3, 2, 32, device=device).to(dtype)
    q, k, v = packed[:, 3:45, :, 1:3].unbind(2)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    shared = k.detach()[:, :1].expand(2, 2, 42, 32)
    do = torch.randn(2, 32, 2, 42, device=device).to(dtype).permute(0, 2, 3, 1)  # its last dimension has gaps
    for keys in (k, shared):
        o = attention(q, keys, v)
        close(o.detach(), attention_forward_reference(q.detach(), keys.detach(), v.detach())[0])
        assert o.transpose(1, 2).is_contiguous() == (o.stride() != o.contiguous().stride())
    got = torch.autograd.grad(attention(q, k, v), (q, k, v), do)
    wanted = attention_backward_reference(do, q.detach(), k.detach(), v.detach(), None, None)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs, GRADIENT_TOLERANCE)
    one = k.detach()[:, :1].requires_grad_()
    (got,) = torch.autograd.grad(attention(q, one.expand(2, 2, 42, 32), v), one, do)
    wanted = attention_backward_reference(do, q.detach(), shared, v.detach(), None, None)[1]
    close(got, wanted.sum(1, keepdim=True), GRADIENT_TOLERANCE)


def check_windows(dtype, device):
    """Queries, keys and values whose rows overlap, as windows that slide over a signal do."""
    for strides in ((0, 0, 1, 1), (1, 1, 16, 1), (0, 0, 0, 1)):
        q, k, v = (torch.randn(300, device=device).to(dtype).as_strided((2, 2, 9, 16), strides) for _ in range(3))
        do = torch.randn(2, 2, 9, 16, device=device).to(dtype)
        o, lse = attention_forward(q, k, v)
        close(o, attention_forward_reference(q, k, v)[0])
        got = attention_backward(do, q, k, v, o, lse)
        wanted = attention_backward_reference(do, q, k, v, o, lse)
        for mine, theirs in zip(got, wanted, strict=True):
            close(mine, theirs, GRADIENT_TOLERANCE)


def check_special_values(dtype, device):
    q, k, v = inputs((1, 1, 1, 40, 40, 16, True), dtype, device)
    q[0, 0, 7], k[0, 0, 20] = float("nan"), float("nan")
    o, lse = attention_forward(q, k, v)
    wanted, sums = attention_forward_reference(q, k, v)
    close(o, wanted)
    close(lse, sums)
    assert o[0, 0, 7].isnan().all()
    assert o[0, 0, 20:].isnan().all()
    assert not o[0, 0, :7].isnan().any()
    assert not o[0, 0, 8:20].isnan().any()
    # scores of -inf count for nothing, also when whole tiles have no other
    q, k, v = inputs((1, 2, 2, 40, 300, 16, False), dtype, device)
    k[:, :, :290] = -float("inf")
    o, lse = attention_forward(q.abs(), k, v, causal=False)
    assert o.isfinite().all()
    close(o, attention_forward_reference(q.abs(), k[:, :, 290:], v[:, :, 290:], causal=False)[0])
    q, k, v, table, length = paged((2, 1, 16, 16, 20, [310]), dtype, device)
    k[table[0, :19].long()] = -float("inf")
    got = decode_attention(q.abs(), k, v, table, length)
    assert got.isfinite().all()
    close(got, decode_attention_reference(q.abs(), k, v, table, length))


def paged(case, dtype, device):
    """A cache of NaN where no sequence has a token, and a table that is wrong past each sequence's end."""
    heads, kv_heads, dim, page_size, width, lengths = case
    batch, pages = len(lengths), len(lengths) * width + 2
    q = torch.randn(batch, heads, dim, device=device).to(dtype)
    caches = torch.randn(2, pages, page_size, kv_heads, dim, device=device).to(dtype)
    table = torch.zeros(batch, width, device=device, dtype=torch.int32)
    length = torch.zeros(batch, device=device, dtype=torch.int32)
    decode_attention_inputs(q, caches[0], caches[1], table, length)
    assert len(set(table.flatten().tolist())) == table.numel()
    assert length.tolist() == [width * page_size] * batch
    length.copy_(torch.tensor(lengths, dtype=torch.int32))
    used = torch.zeros(pages, page_size, device=device, dtype=torch.bool)
    for b, count in enumerate(lengths):
        tokens = torch.arange(count, device=device)
        used[table[b, tokens // page_size].long(), tokens % page_size] = True
        table[b, -(-count // page_size) :] = 1_000_000_000
    caches[:, ~used] = float("nan")
    return q, caches[0], caches[1], table, length


def check_decode(case, dtype, device, scale=None):
    arguments = paged(case, dtype, device)
    got = decode_attention(*arguments, scale)
    close(got, decode_attention_reference(*arguments, scale))
    empty = arguments[4] == 0
    assert not got[empty].any()
    return arguments, got


def check_decode_of_wrong_indices(device):
    """Pages outside the cache and lengths beyond the table give numbers of no meaning, never an illegal access."""
    q, k, v, table, length = paged((2, 1, 16, 16, 4, [64, 10]), torch.float32, device)
    k.nan_to_num_()
    v.nan_to_num_()
    wanted = decode_attention(q, k, v, table, length)
    table[0] = torch.tensor([-5, k.shape[0], 2**31 - 1, -(2**31)], dtype=torch.int32)
    length.copy_(torch.tensor([2**31 - 1, -3], dtype=torch.int32))
    got = decode_attention(q, k, v, table, length)
    assert got[0].isfinite().all()
    assert not got[1].any()
    assert wanted[1].any()


def check_decode_of_strided_caches(dtype, device):
    """Keys and values interleaved in one tensor, pages of another order: [pages, Hkv, 2, page_size, D] as a view."""
    q, k, v, table, length = paged((4, 2, 32, 16, 3, [40, 48]), dtype, device)
    both = torch.stack([k, v]).permute(1, 3, 0, 2, 4).contiguous()
    keys, values = (both[:, :, n].transpose(1, 2) for n in (0, 1))
    assert keys.stride() != k.stride()
    wide = torch.full((2, 4, 64), float("nan"), device=device, dtype=dtype)
    wide[..., 16:48] = q
    wanted = decode_attention(q, k, v, table, length)
    close(decode_attention(wide[..., 16:48], keys, values, table, length), wanted)
    close(decode_attention(q, k, values, table, length), wanted)


@contextlib.contextmanager
def only(name, number):
    """Let a kernel have one of its configs and no other; pruning always leaves one."""
    tuner = KERNELS[name]
    configs = tuner.configs
    tuner.configs = [configs[number]]
    tuner.cache.clear()
    try:
        yield configs[number]
    finally:
        tuner.configs = configs
        tuner.cache.clear()


def check_config(name, number, dtype, device, dim, lengths, causals=(True, False)):
    """One config, on sizes that no tile divides and that span several tiles, with a group."""
    with only(name, number):
        if name in ("decode_attention", "decode_combine"):
            check_decode((4, 2, dim, 32, 33, [1040, 0, 31]), dtype, device)
            return
        check = check_forward if name == "attention_forward" else check_backward
        for causal in causals:
            check((1, 2, 1, *lengths, dim, causal), dtype, device)
