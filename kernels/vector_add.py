"""``z = a*x + y`` over vectors: one pass, bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tcache

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
        x: contiguous vector of ``n`` elements, floating point.
        y: contiguous vector like ``x``.

    Returns:
        A new vector of the dtype of ``x``; the arithmetic is in float32.

    Raises:
        ValueError: shapes, dtypes or devices differ, or a vector is not contiguous.
    """
    if x.dim() != 1 or x.shape != y.shape:
        raise ValueError(f"expected two vectors of one length, got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    if x.dtype != y.dtype or x.device != y.device or not x.is_floating_point():
        raise ValueError(
            f"expected one floating dtype and one device, got {x.dtype} on {x.device}, {y.dtype} on {y.device}"
        )
    if not (x.is_contiguous() and y.is_contiguous()) or x.device.type == "meta":
        raise ValueError(
            f"expected contiguous vectors that have memory, got strides {x.stride()}, {y.stride()} on {x.device}"
        )
    z = torch.empty_like(x)
    n = x.numel()
    if n:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            axpy_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, z, float(a), n)
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
