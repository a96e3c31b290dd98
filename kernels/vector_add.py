"""``z = a*x + y`` over vectors: one pass, bound by memory."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

import tcache

from ._check import FLOATS, check_device, check_dtype, check_shape, number, on_device_of, readable

_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in [
        (128, 1),
        (256, 2),
        (512, 4),
        (1024, 2),
        (1024, 4),
        (1024, 8),
        (2048, 4),
        (2048, 8),
        (4096, 8),
        (8192, 8),
        (8192, 16),
        (16384, 16),
    ]
]


@tcache.autotune(configs=_CONFIGS, key=["n"])
@triton.jit
def axpy_kernel(x_ptr, y_ptr, z_ptr, a, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(z_ptr + offsets, (a * x + y).to(z_ptr.dtype.element_ty), mask=inside)


def axpy(a: float, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``a*x + y``.

    Args:
        a: the factor.
        x: contiguous vector of ``n`` elements, float32, float16 or bfloat16.
        y: contiguous vector like ``x``.

    Returns:
        A new vector of the dtype of ``x``; the arithmetic is in float32.

    Raises:
        TypeError: ``a`` is no number, or ``x`` or ``y`` no tensor.
        ValueError: shapes, dtypes or devices differ, or a vector is not contiguous.
    """
    a = number("a", a)
    # the kernel counts in 64 bits
    x, y = readable("x", x, FLOATS, 1, most=math.inf), readable("y", y, FLOATS, 1, most=math.inf)
    check_shape("x", x, x.shape, contiguous=True)
    check_shape("y", y, x.shape, "x", contiguous=True)
    check_dtype("y", y, "x", x)
    check_device(x=x, y=y)
    z = torch.empty_like(x)
    n = x.numel()
    if n:
        with on_device_of(x):
            axpy_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, z, a, n)
    return z


def axpy_reference(a: float, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return what :func:`axpy` computes, in torch, rounded once from float32."""
    return (a * x.float() + y.float()).to(x.dtype)


def axpy_torch(a: float, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return what a user of torch would call."""
    return torch.add(y, x, alpha=a)


def axpy_flops(a: float, x: torch.Tensor, y: torch.Tensor) -> int:
    """Return one product and one sum for each element."""
    return 2 * x.numel()


def axpy_bytes(a: float, x: torch.Tensor, y: torch.Tensor) -> int:
    """Return the bytes of both inputs and of the output."""
    return 2 * x.numel() * x.element_size() + y.numel() * y.element_size()
