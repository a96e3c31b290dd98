"""The sparse convolution against torch, on the device that the importing module's fixture names."""

from __future__ import annotations

import pytest
import torch
from cases_matmul import close, dtypes, kernel

conv, conv_reference, conv_torch = (
    kernel(f"sparse_conv.py:sparse_conv{suffix}") for suffix in ("", "_reference", "_torch")
)
weight_gradient, weight_gradient_reference, features_gradient, SparseConv = (
    kernel(f"sparse_conv_backward.py:{name}")
    for name in (
        "sparse_conv_weight_gradient",
        "sparse_conv_weight_gradient_reference",
        "sparse_conv_features_gradient",
        "SparseConv",
    )
)
neighbour_map, sort_rows, fill_map = (
    kernel(f"voxels.py:{name}") for name in ("neighbour_map", "sort_rows", "fill_map")
)


def voxels(count, device, extent=6):
    """Different voxels of two samples at random."""
    cells = torch.randperm(2 * extent**3)[:count]
    columns = [cells // extent**3, cells // extent**2 % extent, cells // extent % extent, cells % extent]
    return torch.stack(columns, 1).to(device) - 2  # below zero, too


@pytest.mark.parametrize("size", [1, 3])
def test_the_map_is_that_of_a_dictionary(size, device):
    coordinates = voxels(90, device)
    found = neighbour_map(coordinates.int(), size)
    rows = {tuple(row): number for number, row in enumerate(coordinates.tolist())}
    reach = range(-(size // 2), size // 2 + 1)
    for number, (sample, x, y, z) in enumerate(coordinates.tolist()):
        wanted = [rows.get((sample, x + i, y + j, z + k), -1) for i in reach for j in reach for k in reach]
        assert found[number].tolist() == wanted
    assert found.dtype == torch.int32
    two = neighbour_map(torch.tensor([[0, 0, 0], [0, 0, 1], [1, 0, 2]], device=device))
    assert two[0].tolist() == [-1, -1, -1, -1, 0, 1, -1, -1, -1]
    assert neighbour_map(voxels(0, device)).shape == (0, 27)


@pytest.mark.parametrize(("cin", "cout"), [(1, 1), (4, 33), (64, 48), (40, 96)])
@pytest.mark.parametrize("count", [1, 70, 150])
def test_conv(count, cin, cout, device):
    neighbours = neighbour_map(voxels(count, device))
    order, masks = sort_rows(neighbours)
    for dtype in dtypes(device):
        features = torch.randn(count, cin + 8, device=device).to(dtype)[:, :cin]  # rows apart
        weight = (torch.randn(27, cout, cin, device=device) / (10 * cin) ** 0.5).to(dtype).transpose(1, 2)
        wanted = conv_reference(features, weight, neighbours)
        close(conv(features, weight, neighbours, order, masks), wanted)
        close(conv(features, weight, neighbours), wanted)


def test_conv_of_a_dense_row_of_nobody_and_of_what_is_outside(device):
    neighbours = torch.full((5, 27), -1, device=device, dtype=torch.int32)
    neighbours[1] = torch.arange(27, device=device) % 5
    neighbours[2, 3], neighbours[2, 4] = 1 << 30, 4  # the first is no row: as if there were none
    features, weight = torch.randn(5, 16, device=device), torch.randn(27, 16, 16, device=device) / 16
    inside = neighbours.clone()
    inside[2, 3] = -1
    got = conv(features, weight, neighbours)
    close(got, conv_reference(features, weight, inside))
    assert not got[[0, 3, 4]].any()


def test_conv_of_nothing(device):
    def zeros(*shape):
        return torch.zeros(*shape, device=device)

    no_row = torch.zeros((0, 27), device=device, dtype=torch.int32)
    one = torch.zeros((1, 27), device=device, dtype=torch.int32)
    assert conv(zeros(0, 4), zeros(27, 4, 8), no_row).shape == (0, 8)
    assert conv(zeros(1, 4), zeros(27, 4, 0), one).shape == (1, 0)
    assert torch.equal(conv(zeros(1, 0), zeros(27, 0, 3), one), zeros(1, 3))
    assert not weight_gradient(zeros(0, 4), zeros(0, 8), no_row).any()


@pytest.mark.parametrize(("count", "cin", "cout"), [(60, 24, 40), (130, 16, 4)])
def test_gradients(count, cin, cout, device):
    neighbours = neighbour_map(voxels(count, device))
    features = torch.randn(count, cin, device=device)
    weight = torch.randn(27, cin, cout, device=device) / cin
    gradient = torch.randn(count, cout, device=device)

    def gradients(function):
        leaves = features.clone().requires_grad_(), weight.clone().requires_grad_()
        result = function(*leaves, neighbours)
        result.backward(gradient)
        return result.detach(), leaves[0].grad, leaves[1].grad

    for got, wanted in zip(gradients(SparseConv.apply), gradients(conv_reference), strict=True):
        close(got, wanted)
    half, half_gradient = features.half(), gradient.half()
    got = weight_gradient(half, half_gradient, neighbours)
    close(got, weight_gradient_reference(half, half_gradient, neighbours))
    close(features_gradient(gradient, weight, neighbours), gradients(conv_reference)[1])


def test_no_gradient_of_gradients(device):
    neighbours = neighbour_map(voxels(20, device))
    features = torch.randn(20, 4, device=device, requires_grad=True)
    weight = torch.randn(27, 4, 8, device=device, requires_grad=True)
    for factor in (features, 1.0):  # with a number the gradient that comes in depends on nothing
        result = (SparseConv.apply(features, weight, neighbours)[:, :4] * factor).sum()
        (gradient,) = torch.autograd.grad(result, features, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (features.sum() + gradient.square().sum()).backward()


def test_a_weights_gradient_where_torch_must_be_deterministic(device):
    """It is added up in any order: torch's own operations of that kind raise, or warn if they are told to."""
    neighbours = neighbour_map(voxels(20, device))
    features, gradient = torch.randn(20, 4, device=device), torch.randn(20, 8, device=device)
    try:
        torch.use_deterministic_algorithms(mode=True)
        with pytest.raises(RuntimeError, match=r"^sparse_conv_weight_gradient adds up in the order .*deterministic"):
            weight_gradient(features, gradient, neighbours)
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        with pytest.warns(UserWarning, match="sparse_conv_weight_gradient adds up"):
            found = weight_gradient(features, gradient, neighbours)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    close(found, weight_gradient_reference(features, gradient, neighbours))


def test_gradients_refuse_before_anything_is_sorted():
    features, weight, neighbours = torch.zeros(5, 4), torch.zeros(65, 4, 8), torch.zeros(5, 65).int()
    with pytest.raises(ValueError, match="expected at most 62 offsets"):
        SparseConv.apply(features, weight, neighbours)
    with pytest.raises(ValueError, match="expected both"):
        SparseConv.apply(features, weight[:27], neighbours[:, :27].contiguous(), torch.zeros(5).int())


def test_conv_by_torch(device):
    neighbours = neighbour_map(voxels(50, device))
    features, weight = torch.randn(50, 8, device=device), torch.randn(27, 8, 12, device=device)
    close(conv_torch(features, weight, neighbours), conv_reference(features, weight, neighbours))


def test_conv_refuses():
    features, weight, neighbours = torch.zeros(5, 4), torch.zeros(27, 4, 8), torch.zeros(5, 27).int()
    order, masks = sort_rows(neighbours)
    for arguments in [
        (features[:4], weight, neighbours), (features, weight[:, :3], neighbours), (features, weight[:26], neighbours),
        (features, weight.half(), neighbours), (features.int(), weight.int(), neighbours),
        (features, weight, neighbours.long()), (features, weight, neighbours.t().contiguous().t()),
        (features, weight, neighbours.to("meta")), (features, weight[0], neighbours),
        (features.double(), weight, neighbours), (torch.zeros(4, 5).t(), weight, neighbours),
        (features, weight, neighbours, order), (features, weight, neighbours, None, masks),
        (features, weight, neighbours, order[:3], masks), (features, weight, neighbours, order.long(), masks),
        (features, torch.zeros(63, 4, 8), torch.zeros(5, 63).int()),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            conv(*arguments)
    with pytest.raises(ValueError, match="expected"):
        weight_gradient(features, torch.zeros(5, 8).half(), neighbours)
    with pytest.raises(ValueError, match="expected"):
        features_gradient(torch.zeros(5, 8), weight[0], neighbours)
    with pytest.raises(ValueError, match="odd"):
        neighbour_map(torch.zeros(3, 4).int(), 2)
    with pytest.raises(ValueError, match="expected int32"):
        neighbour_map(torch.zeros(3, 4))
    for arguments in [(features[:3], features, neighbours), (features, features.int(), neighbours),
                      (features, features, neighbours.long()), (features, features.to("meta"), neighbours),
                      (torch.zeros(4, 5).t(), features, neighbours)]:  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            weight_gradient(*arguments)


def test_a_surface_is_filled_in(device):
    neighbours = torch.zeros((400, 27), dtype=torch.int32, device=device)
    fill_map(neighbours)
    assert neighbours[:, 13].tolist() == list(range(400))
    assert 6 < (neighbours >= 0).sum().item() / 400 < 14
    numbers = torch.arange(400, device=device)
    for v in range(27):  # symmetric
        there = neighbours[:, v] >= 0
        assert torch.equal(neighbours[neighbours[there, v].long(), 26 - v].long(), numbers[there])


def test_sorting_leaves_a_tile_few_offsets(device):
    neighbours = torch.zeros((16384, 27), dtype=torch.int32, device=device)
    fill_map(neighbours)
    order, masks = sort_rows(neighbours)
    assert order.sort().values.tolist() == list(range(16384))
    present = neighbours >= 0

    def needed(rows):
        return present[rows].view(-1, 128, 27).any(1).sum(1).float().mean().item()

    assert needed(order.long()) < 0.7 * needed(torch.arange(16384, device=device))
    bits = (masks[:, None] >> torch.arange(27, device=device)) & 1
    assert torch.equal(bits.bool(), present[order.long()])
