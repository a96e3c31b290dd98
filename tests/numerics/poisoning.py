"""Fixtures of the kernels' tests: the device, and outputs that start as NaN: what is not written shows."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device():
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Floats that nobody wrote are NaN, and integers that nobody wrote are far out of range."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        if tensor.device.type == "meta":
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    torch.manual_seed(0)


@pytest.fixture
def untuned(monkeypatch):
    """Launch with the first config, or with the only one that a test leaves; nothing is tuned."""
    monkeypatch.setenv("TCACHE_MODE", "lookup")
