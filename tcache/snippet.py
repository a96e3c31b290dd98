"""The manifest lines that cover a launch, written from its arguments: what a miss tells the reader to add."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["manifest_lines"]


def manifest_lines(
    ref: str, arguments: dict[str, Any], *, filled: frozenset[str] = frozenset(), grid: tuple[int, ...] | None = None
) -> str:
    """Return an item of a manifest's ``kernels:`` for one launch, empty when an argument cannot be spelled out.

    Args:
        ref: the kernel's ref.
        arguments: argument -> value; tensors are anything with ``dtype``, ``shape`` and ``data_ptr()``. Strides are
            left out: a kernel sees them as arguments of their own.
        filled: arguments that an autotuner or a heuristic fills in, which a manifest leaves to them.
        grid: the launch's grid; it is not part of what is compiled.
    """
    rows = []
    for name, value in arguments.items():
        if name not in filled:
            text = _argument(value)
            if text is None:
                return ""
            rows.append(f"      {name}: {text}")
    sizes = ", ".join(str(max(1, size)) for size in grid or (1,))
    return "\n".join([f"  - kernel: {ref}", "    args:", *rows, f"    grid: [{sizes}]", "    cases: [{}]"])


def _argument(value: Any) -> str | None:
    value = value.value if type(value).__name__ == "constexpr" and hasattr(value, "value") else value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # YAML reads a number with an exponent as text unless it has a point
        text = repr(value)
        return (text if "." in text or "e" not in text else text.replace("e", ".0e")) if math.isfinite(value) else None
    if isinstance(value, str):
        return f"{{value: {_quoted(value)}}}"  # a bare text would be an expression
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "data_ptr"):
        return _tensor(value)
    return None


def _quoted(text: str) -> str:
    """Quote a text as JSON does, except where YAML reads JSON's escapes differently or none at all."""
    plain = (json.dumps(char)[1:-1] if char != "\x7f" and char <= "\uffff" else f"\\U{ord(char):08x}" for char in text)
    return f'"{"".join(plain)}"'


def _tensor(value: Any) -> str | None:
    dtype = str(value.dtype)
    if not dtype.startswith("torch."):
        return None
    shape = ", ".join(str(int(size)) for size in value.shape)
    offset = ", offset: 1" if value.data_ptr() % 16 else ""
    return f"{{shape: [{shape}], dtype: {dtype.removeprefix('torch.')}{offset}}}"
