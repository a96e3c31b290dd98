"""The kernels over rows under Triton's interpreter, against torch. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

import torch
from norm_cases import *  # noqa: F403 - the cases, run here
from quantize_cases import *  # noqa: F403
from rowwise_cases import *  # noqa: F403


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def half():
    return torch.float16  # the interpreter multiplies bfloat16 as the integers it stores them in


@pytest.fixture
def fp8(monkeypatch):
    """Float8 conversions by torch: the interpreter's own (3.6 to 3.9) loses the carry of a mantissa rounded up."""
    from triton.runtime import interpreter

    own = interpreter._convert_float

    def convert(given, source, target, rounding):
        if str(target) != "fp8e4nv" or str(source) != "fp32":
            return own(given, source, target, rounding)
        return torch.from_numpy(given.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
