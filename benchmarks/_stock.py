"""A kernel under plain ``triton.autotune``, decorated when this module is first imported."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at, mask=at < n)
