"""Values that Triton itself defines and a launch may be given: element types, constexprs, tensor descriptors."""

from __future__ import annotations

from typing import Any

import triton.language as tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

from tcache.errors import UnsupportedTriton

__all__ = ["constexpr", "element_type", "tensor_descriptor"]

_TYPES = {
    "bfloat16": tl.bfloat16,
    "bool": tl.int1,
    "float16": tl.float16,
    "float32": tl.float32,
    "float64": tl.float64,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e4m3fnuz": tl.float8e4b8,
    "float8_e5m2": tl.float8e5,
    "float8_e5m2fnuz": tl.float8e5b16,
    "int16": tl.int16,
    "int32": tl.int32,
    "int64": tl.int64,
    "int8": tl.int8,
    "uint16": tl.uint16,
    "uint32": tl.uint32,
    "uint64": tl.uint64,
    "uint8": tl.uint8,
}
"""torch's names -> Triton's types, as in ``type_canonicalisation_dict`` of ``triton/_utils.py``."""


def element_type(name: str) -> Any:
    """Return Triton's element type for torch's name of it: ``tl.bfloat16``."""
    return _TYPES[name]


def constexpr(value: Any) -> Any:
    """Return ``tl.constexpr(value)``, which makes an argument part of the kernel whatever its signature says."""
    return tl.constexpr(value)


def tensor_descriptor(base: Any, shape: list[int], strides: list[int], block: list[int], padding: str) -> Any:
    """Return a host-side tensor descriptor (TMA).

    Args:
        base: the tensor; it needs ``data_ptr()`` and ``dtype.itemsize``.
        shape, strides: its sizes and strides in elements.
        block: block shape; powers of two.
        padding: ``zero`` or ``nan``.

    Raises:
        AssertionError, TypeError, ValueError: what upstream says of a tensor that no descriptor can describe.
        UnsupportedTriton: this release has no tensor descriptors.
    """
    if TensorDescriptor is None:
        raise UnsupportedTriton("this Triton has no tensor descriptors", "pip install --upgrade triton")
    return TensorDescriptor(base, shape, strides, block, padding)
