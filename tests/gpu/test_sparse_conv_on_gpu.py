"""On an NVIDIA GPU: the sparse convolution's numbers at small and at real sizes, every config."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

import cases_sparse
from cases_matmul import close, kernel
from cases_sparse import *  # noqa: F403
from poisoning import device, poisoned, untuned  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]


def surface(n, cin, cout):
    neighbours = torch.empty((n, 27), dtype=torch.int32, device="cuda")
    cases_sparse.fill_map(neighbours)
    features = torch.randn(n, cin, device="cuda").bfloat16()
    weight = (torch.randn(27, cin, cout, device="cuda") / (10 * cin) ** 0.5).bfloat16()
    return features, weight, neighbours


@pytest.mark.parametrize(("n", "cin", "cout"), [(20001, 64, 96), (5000, 4, 32)])
def test_every_conv_config(n, cin, cout, monkeypatch):
    tuner = kernel("sparse_conv.py:sparse_conv_kernel")
    features, weight, neighbours = surface(n, cin, cout)
    wanted = cases_sparse.conv_reference(features, weight, neighbours)
    for config in list(tuner.configs):
        monkeypatch.setattr(tuner, "configs", [config])
        close(cases_sparse.conv(features, weight, neighbours), wanted)


def test_every_weight_gradient_config(monkeypatch):
    tuner = kernel("sparse_conv_backward.py:sparse_conv_weight_kernel")
    features, _, neighbours = surface(20001, 72, 40)
    gradient = torch.randn(20001, 40, device="cuda").bfloat16() / 100
    wanted = cases_sparse.weight_gradient_reference(features, gradient, neighbours)
    for config in list(tuner.configs):
        monkeypatch.setattr(tuner, "configs", [config])
        close(cases_sparse.weight_gradient(features, gradient, neighbours), wanted)


def test_a_large_map():
    features, weight, neighbours = surface(400000, 32, 32)
    close(cases_sparse.conv(features, weight, neighbours), cases_sparse.conv_reference(features, weight, neighbours))
