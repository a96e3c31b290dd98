"""The kernels of a mixture of experts against torch, on the device that the importing module's fixture names."""

from __future__ import annotations

import pytest
import torch
from cases_matmul import close, dtypes, kernel

grouped, grouped_reference, grouped_torch = (
    kernel(f"grouped_gemm.py:grouped_gemm{suffix}") for suffix in ("", "_reference", "_torch")
)
route, route_reference, align, align_reference = (
    kernel(f"moe.py:{name}") for name in ("route", "route_reference", "align", "align_reference")
)
gather, gather_reference, combine, combine_reference, silu_gate, silu_gate_reference = (
    kernel(f"moe_rows.py:{name}{suffix}")
    for name in ("gather", "combine", "silu_gate")
    for suffix in ("", "_reference")
)
moe_mlp, moe_mlp_reference = (kernel(f"moe_mlp.py:{name}") for name in ("moe_mlp", "moe_mlp_reference"))


def offsets_of(counts, device, dtype=torch.int32):
    return torch.tensor([0, *counts]).cumsum(0).to(dtype).to(device)


@pytest.mark.parametrize("layout", ["stored", "transposed"])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("counts", [[5, 0, 70, 1], [0, 0, 3], [130], [1] * 9])
def test_grouped(counts, tma, layout, device):
    if tma and device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older than Hopper")
    for dtype in dtypes(device):
        if tma and dtype == torch.float32:
            continue
        for n, k in [(40, 72), (136, 8)] if tma else [(33, 70), (1, 1)]:
            x = torch.randn(sum(counts), k, device=device).to(dtype)
            shape = (len(counts), k, n) if layout == "stored" else (len(counts), n, k)
            w = torch.randn(*shape, device=device).to(dtype)
            w = w if layout == "stored" else w.transpose(1, 2)
            offsets = offsets_of(counts, device)
            wanted = grouped_reference(x, w, offsets)
            close(grouped(x, w, offsets, tma=tma), wanted)
            close(grouped(x, w, offsets.long()), wanted)


def test_grouped_of_strides_and_of_rows_of_nobody(device):
    x = torch.randn(80, 30, device=device).half().t()[::2, 1::2]  # [15, 40]
    w = torch.randn(3, 40, 2 * 20, device=device).half()[:, :, ::2]
    offsets = offsets_of([4, 0, 7], device)
    got, wanted = grouped(x, w, offsets), grouped_reference(x, w, offsets)
    close(got[:11], wanted[:11])
    if device == "cpu":  # where outputs are poisoned
        assert got[11:].isnan().all()


def test_grouped_stays_inside_whatever_the_offsets(device):
    x, w = torch.randn(40, 16, device=device).half(), torch.randn(3, 16, 16, device=device).half()
    offsets = torch.tensor([-5, 10, 1 << 20, 7], device=device, dtype=torch.int32)
    inside = offsets_of([10, 30, 0], device)
    close(grouped(x, w, offsets, tma=False), grouped_reference(x, w, inside))


def test_grouped_of_nothing(device):
    w = torch.zeros(2, 8, 16, device=device).half()
    assert grouped(torch.zeros(0, 8, device=device).half(), w, offsets_of([0, 0], device)).shape == (0, 16)
    no_depth = grouped(
        torch.zeros(3, 0, device=device), torch.zeros(2, 0, 4, device=device), offsets_of([1, 2], device)
    )
    assert torch.equal(no_depth, torch.zeros(3, 4, device=device))


@pytest.mark.parametrize(
    ("x", "w", "offsets"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, 5), torch.zeros(3).int()),
        (torch.zeros(2, 3), torch.zeros(2, 3, 5), torch.zeros(2).int()),
        (torch.zeros(2, 3), torch.zeros(2, 3, 5).half(), torch.zeros(3).int()),
        (torch.zeros(2, 3), torch.zeros(2, 3, 5), torch.zeros(3)),
        (torch.zeros(2, 3), torch.zeros(2, 3, 5), torch.zeros(6).int()[::2]),
        (torch.zeros(2, 3), torch.zeros(2, 3, 5), torch.zeros(3, device="meta").int()),
        (torch.zeros(2, 3), torch.zeros(1025, 3, 1), torch.zeros(1026).int()),
        (torch.zeros(2, 3).double(), torch.zeros(2, 3, 5).double(), torch.zeros(3).int()),
    ],
)
def test_grouped_refuses(x, w, offsets):
    with pytest.raises(ValueError, match="expected"):
        grouped(x, w, offsets)
    with pytest.raises(ValueError, match="expected"):
        grouped(x, w, offsets, tma=True)


def test_grouped_says_why_tma_cannot(device):
    x, w = torch.zeros(8, 16, device=device), torch.zeros(2, 16, 16, device=device)
    for a, b, why in [
        (x, w, "4 bytes"),
        (x.half(), w.half()[:, :, ::2], "no dimension"),
        (x.half(), w.half()[:, :, 1:], "16"),
    ]:
        with pytest.raises(ValueError, match=why):
            grouped(a, b, offsets_of([4, 4], device), tma=True)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("t", "e", "k"), [(1, 1, 1), (33, 8, 2), (7, 60, 6), (3, 5, 5), (0, 4, 2)])
def test_route(t, e, k, scoring, renormalise, device):
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(t, e, device=device).to(dtype)
        for bias in (None, torch.randn(e, device=device)):
            weights, experts = route(logits, k, scoring, renormalise, bias)
            wanted, chosen = route_reference(logits, k, scoring, renormalise, bias)
            assert torch.equal(experts, chosen)
            torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, under the interpreter
def test_route_of_equal_huge_and_undefined_logits(device):
    logits = torch.zeros(5, 6, device=device)
    logits[1, 4] = 3e38
    logits[2, 1] = float("nan")
    logits[3] = float("-inf")
    logits[4, 5] = float("inf")
    weights, experts = route(logits.t().contiguous().t(), 6)
    assert experts.sort(dim=1).values.tolist() == [list(range(6))] * 5
    assert experts[0].tolist() == list(range(6))
    assert experts[1, 0] == 4
    assert experts[2, 5] == 1
    assert experts[4, 0] == 5
    torch.testing.assert_close(weights[:2], route_reference(logits[:2], 6)[0], rtol=1e-5, atol=1e-6)
    assert weights[2:].isnan().any(dim=1).all()


def test_route_refuses():
    logits = torch.zeros(2, 4)
    for arguments in [(logits, 0), (logits, 5), (logits.int(), 1), (logits[0], 1), (logits, 1, "tanh"),
                      (logits, 1, "softmax", True, torch.zeros(3)), (torch.zeros(1, 1025), 1)]:  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            route(*arguments)


@pytest.mark.parametrize(("t", "e", "k"), [(1, 1, 1), (0, 3, 2), (100, 8, 2), (43, 64, 6), (700, 3, 1)])
def test_align(t, e, k, device):
    experts = torch.randint(-1, e + 1, (t, k), device=device, dtype=torch.int32)  # some are none
    for got, wanted in zip(align(experts, e), align_reference(experts, e), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got, wanted)


def test_align_refuses():
    for arguments in [(torch.zeros(2, 2), 3), (torch.zeros(2).int(), 3), (torch.zeros(4, 4).int()[:, ::2], 3),
                      (torch.zeros(2, 2).int(), 0), (torch.zeros(2, 2).int(), 1025)]:  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            align(*arguments)


def test_gather_stays_inside_whatever_the_order(device):
    x = torch.randn(4, 8, device=device)
    order = torch.tensor([3, 8, -1, 1 << 30, 7, -(1 << 31), 0, 9], device=device, dtype=torch.int32)
    rows = gather(x, order, 2)
    assert torch.equal(rows, gather_reference(x, order, 2))
    assert torch.equal(rows[[0, 4, 6]], x[[1, 3, 0]])
    assert not rows[[1, 2, 3, 5, 7]].any()


@pytest.mark.parametrize(("t", "h", "k"), [(1, 1, 1), (9, 300, 2), (5, 33, 4), (0, 8, 2)])
def test_gather_and_combine(t, h, k, device):
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(t, 2 * h, device=device).to(dtype)[:, ::2]
        offsets, order, position = align(torch.randint(-1, 3, (t, k), device=device, dtype=torch.int32), 3)
        rows = gather(x, order, k)
        assert torch.equal(rows, gather_reference(x, order, k))
        assert not rows[offsets[-1] :].any()
        weights = torch.rand(t, k, device=device)
        got, wanted = combine(rows, position, weights), combine_reference(rows, position, weights)
        torch.testing.assert_close(
            got, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6 if dtype == torch.float32 else 1e-2
        )


def test_a_row_that_nobody_chose_does_not_matter(device):
    y = torch.full((3, 4), float("nan"), device=device)
    y[1] = 1.0
    position = torch.tensor([[1, -1], [-1, 99]], device=device, dtype=torch.int32)
    got = combine(y, position, torch.full((2, 2), 0.5, device=device))
    assert got.tolist() == [[0.5] * 4, [0.0] * 4]


@pytest.mark.parametrize("shape", [(1, 2), (7, 600), (0, 8), (3, 0)])
def test_silu_gate(shape, device):
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(*shape, device=device).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(silu_gate(x), silu_gate_reference(x), rtol=tolerance, atol=tolerance)


def test_rows_refuse():
    x, order = torch.zeros(2, 4), torch.zeros(4).int()
    position, weights = torch.zeros(2, 2).int(), torch.zeros(2, 2)
    for function, arguments in [
        (gather, (x, order, 1)), (gather, (x, order.long(), 2)), (gather, (x.int(), order, 2)),
        (gather, (x[0], order, 2)), (gather, (x, order.to("meta"), 2)),
        (combine, (x, position, weights[:1])), (combine, (x, position.long(), weights)),
        (combine, (x.t(), position, weights)), (combine, (x, position, weights.int())),
        (combine, (x, position, weights.to("meta"))),
        (silu_gate, (torch.zeros(2, 3),)), (silu_gate, (torch.zeros(2, 4).int(),)),
        (silu_gate, (torch.zeros(4, 2).t(),)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            function(*arguments)


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|All-NaN slice):RuntimeWarning")  # of the interpreter
def test_references_choose_as_the_kernel_does(device):
    """Of equal scores the first, as bfloat16 logits often have; NaN last."""
    x, logits = torch.randn(3, 16, device=device), torch.ones(3, 17, device=device)
    gate_up, down = torch.randn(17, 8, 16, device=device) / 4, torch.randn(17, 16, 4, device=device) / 4
    got, wanted = moe_mlp(x, logits, gate_up, down, 3), moe_mlp_reference(x, logits, gate_up, down, 3)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=5e-2)  # TF32
    logits[1, 2:9] = float("nan")
    logits[2] = -torch.inf
    for scoring in ("softmax", "sigmoid"):
        assert torch.equal(route(logits, 5, scoring)[1], route_reference(logits, 5, scoring)[1])


@pytest.mark.parametrize(("t", "e", "k"), [(1, 4, 2), (37, 5, 3)])
def test_moe_mlp(t, e, k, device):
    h, f = 48, 32
    x, logits = torch.randn(t, h, device=device).half(), torch.randn(t, e, device=device)
    gate_up = (torch.randn(e, 2 * f, h, device=device) / h**0.5).half()
    down = (torch.randn(e, h, f, device=device) / f**0.5).half()
    close(moe_mlp(x, logits, gate_up, down, k), moe_mlp_reference(x, logits, gate_up, down, k))
    with pytest.raises(ValueError, match="expected"):
        moe_mlp(x, logits, gate_up, down.transpose(1, 2).contiguous(), k)
    with pytest.raises(ValueError, match="expected"):
        moe_mlp(x, logits[:, :1].expand(t, e)[:0], gate_up, down, k)
