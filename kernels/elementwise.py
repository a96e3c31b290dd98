"""``relu(x*a + b)`` in one pass, out of place and in place; ``a`` and ``b`` are numbers or vectors over the columns."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

import tcache

from ._check import FLOATS, check_device, number, on_device_of, readable, writable
from ._rows import ROW_BUCKETS, as_rows, vector

_CONFIGS = [
    triton.Config({"ROWS": rows, "BLOCK": block}, num_warps=warps, num_stages=1)
    for rows, block, warps in [
        (1, 2048, 4),
        (1, 512, 2),
        (1, 1024, 4),
        (1, 1024, 2),
        (1, 2048, 8),
        (1, 4096, 4),
        (1, 4096, 8),
        (1, 8192, 8),
        (1, 8192, 16),
        (1, 16384, 16),
        (4, 256, 4),
        (4, 512, 4),
        (4, 1024, 8),
        (16, 64, 4),
        (16, 128, 4),
        (64, 32, 4),
    ]
]


@triton.jit
def _affine_relu(x, a, b, columns, A_VECTOR: tl.constexpr, B_VECTOR: tl.constexpr, N):
    if A_VECTOR:
        a = tl.load(a + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if B_VECTOR:
        b = tl.load(b + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    y = x.to(tl.float32) * a + b
    return tl.where(y < 0, 0.0, y)  # NaN stays NaN, as in torch; a maximum would lose it


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    across = tl.cdiv(N, BLOCK)
    tile = tl.program_id(0)
    rows = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tile % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return rows[:, None], columns, (rows[:, None] < M) & (columns[None, :] < N)


@tcache.autotune(
    configs=_CONFIGS, key=["M", "N", "A_VECTOR", "B_VECTOR"], buckets={"M": ROW_BUCKETS, "N": "pow2"}
)  # fmt: skip
@triton.jit(do_not_specialize=["M"])
def affine_relu_kernel(
    x_ptr, y_ptr, a, b, M, N, stride_xm, stride_xn, stride_ym,
    A_VECTOR: tl.constexpr, B_VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = _tile(M, N, ROWS, BLOCK)
    x = tl.load(x_ptr + rows * stride_xm + columns[None, :] * stride_xn, mask=inside, other=0.0)
    y = _affine_relu(x, a, b, columns, A_VECTOR, B_VECTOR, N)
    tl.store(y_ptr + rows * stride_ym + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


# in place: every benchmarked launch must find the x of the first one
@tcache.autotune(
    configs=_CONFIGS, key=["M", "N", "A_VECTOR", "B_VECTOR"], buckets={"M": ROW_BUCKETS, "N": "pow2"},
    restore_value=["x_ptr"],
)  # fmt: skip
@triton.jit(do_not_specialize=["M"])
def affine_relu_inplace_kernel(
    x_ptr, a, b, M, N, stride_xm, stride_xn,
    A_VECTOR: tl.constexpr, B_VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = _tile(M, N, ROWS, BLOCK)
    at = x_ptr + rows * stride_xm + columns[None, :] * stride_xn
    x = tl.load(at, mask=inside, other=0.0)
    y = _affine_relu(x, a, b, columns, A_VECTOR, B_VECTOR, N)
    tl.store(at, y.to(x_ptr.dtype.element_ty), mask=inside)


def affine_relu(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """Return ``relu(x*a + b)``.

    Args:
        x: ``[…, N]``, float32, float16 or bfloat16, any strides (copied where more than two dimensions do not merge).
        a: a number, or a contiguous vector ``[N]`` of any of these dtypes, one factor for each column.
        b: the same, added.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``; the arithmetic is in float32. NaN stays NaN.

    Raises:
        TypeError: ``x`` is no tensor, or ``a`` or ``b`` neither a number nor a tensor.
        ValueError: a dtype is another one, devices differ, a vector is not as long as the rows.
    """
    x = readable("x", x, FLOATS, most=math.inf)
    a, b = _factors(x, a, b)
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if x.numel() == 0:
        return y
    rows = _flat(x, a, b)
    m, n = rows.shape
    with on_device_of(x):
        affine_relu_kernel[_grid(m, n)](
            rows, y, a, b, m, n, rows.stride(0), rows.stride(1), n,
            A_VECTOR=isinstance(a, torch.Tensor), B_VECTOR=isinstance(b, torch.Tensor),
        )  # fmt: skip
    return y


def affine_relu_(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """Replace ``x`` by ``relu(x*a + b)`` and return it.

    Args:
        x: as for :func:`affine_relu`, but more than two dimensions must merge into rows without a copy, no two
            elements may share memory, and autograd must not follow it.
        a, b: as for :func:`affine_relu`, and not parts of ``x``.

    Raises:
        TypeError: as for :func:`affine_relu`.
        ValueError: as for :func:`affine_relu`; also when ``x`` cannot be written in place.
    """
    x = writable("x", x, FLOATS, most=math.inf)
    a, b = _factors(x, a, b)
    if x.numel() == 0:
        return x
    if _shares(x):
        raise ValueError(f"x: elements share memory (strides {tuple(x.stride())}); expected each to have its own")
    for name, value in (("a", a), ("b", b)):
        if isinstance(value, torch.Tensor) and _meet(x, value):
            raise ValueError(f"{name}: expected memory that does not share memory with x, which is written; clone it")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("x: requires a gradient, expected none: what is done in place here has none (torch.no_grad)")
    if x.dim() > 2 and as_rows(x).data_ptr() != x.data_ptr():
        raise ValueError(f"x: leading dimensions of shape {tuple(x.shape)}, strides {tuple(x.stride())} do not merge")
    rows = _flat(x, a, b)
    m, n = rows.shape
    with on_device_of(x):
        affine_relu_inplace_kernel[_grid(m, n)](
            rows, a, b, m, n, rows.stride(0), rows.stride(1),
            A_VECTOR=isinstance(a, torch.Tensor), B_VECTOR=isinstance(b, torch.Tensor),
        )  # fmt: skip
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # so that autograd refuses a gradient that needs the old values
    return x


def _shares(x: torch.Tensor) -> bool:
    """Return whether elements may share memory: a stride does not step over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _meet(x: torch.Tensor, vector: torch.Tensor) -> bool:
    """Return whether the memory between the first and the last element of both meets."""
    if x.untyped_storage()._cdata != vector.untyped_storage()._cdata:
        return False

    def ends(tensor: torch.Tensor) -> tuple[int, int]:
        first = tensor.storage_offset()
        last = first + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        return first * tensor.element_size(), (last + 1) * tensor.element_size()

    (start, end), (other_start, other_end) = ends(x), ends(vector)
    return start < other_end and other_start < end


def _factors(
    x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor
) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """Return ``a`` and ``b``, vectors as they are to be read, numbers as floats, after refusing what does not fit."""
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a tensor without any")
    found = []
    for name, value in (("a", a), ("b", b)):
        if isinstance(value, torch.Tensor):
            found.append(vector(name, value, x.shape[-1]))
            check_device(x=x, **{name: value})
        else:
            found.append(number(name, value))
    return found[0], found[1]


def _flat(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """Return ``x`` as rows; as one row where nothing depends on the column, which leaves no ragged edges."""
    plain = not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)
    return x.view(1, -1) if plain and x.is_contiguous() else as_rows(x)


def _grid(m: int, n: int):
    return lambda meta: (triton.cdiv(m, meta["ROWS"]) * triton.cdiv(n, meta["BLOCK"]),)


def affine_relu_reference(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """Return what :func:`affine_relu` computes, in torch, in float32, rounded once."""
    wide = [value.float() if isinstance(value, torch.Tensor) else value for value in (a, b)]
    return torch.relu(x.float() * wide[0] + wide[1]).to(x.dtype)


def affine_relu_torch(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """Return what a user of torch would call: three operations, each through memory."""
    return torch.relu(x * a + b)


def affine_relu_flops(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> int:
    """Return a product, a sum and a comparison for each element."""
    return 3 * x.numel()


def affine_relu_bytes(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> int:
    """Return the bytes of the input, of the output and of the vectors."""
    vectors = sum(value.numel() * value.element_size() for value in (a, b) if isinstance(value, torch.Tensor))
    return 2 * x.numel() * x.element_size() + vectors


def affine_relu__reference(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """Return what :func:`affine_relu_` leaves in ``x``, without changing it."""
    return affine_relu_reference(x, a, b)


def affine_relu__torch(x: torch.Tensor, a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """Do what a user of torch would do."""
    return x.mul_(a).add_(b).relu_()


affine_relu__flops, affine_relu__bytes = affine_relu_flops, affine_relu_bytes
