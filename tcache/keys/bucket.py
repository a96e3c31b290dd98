"""Bucketing: several sizes share one best config."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

__all__ = ["Bucket", "bucket_text", "make_bucket"]

Bucket = "str | list[int] | Callable[[Any], Any]"


def _pow2(value: Any) -> Any:
    return 1 << max(0, int(value) - 1).bit_length() if value > 0 else value


def _log2(value: Any) -> Any:
    return 1 << (int(value).bit_length() - 1) if value > 0 else value


def make_bucket(spec: Any) -> Any:
    """Return the function from a key argument's value to the value that stands for its bucket.

    Args:
        spec: ``"pow2"`` (round up to a power of two), ``"log2"`` (round down to one), ``"multiple:16"`` (round up to a
            multiple), a sorted list of edges (the smallest edge that is not below the value; beyond the last edge
            everything is one bucket, infinity), or a function of the value.

    Raises:
        ValueError: ``spec`` is none of these.
    """
    if callable(spec):
        return spec
    if spec == "pow2":
        return _pow2
    if spec == "log2":
        return _log2
    if isinstance(spec, str) and spec.startswith("multiple:") and spec[9:].isdigit() and int(spec[9:]) > 0:
        step = int(spec[9:])
        return lambda value: -(-int(value) // step) * step
    if isinstance(spec, (list, tuple)) and spec and all(type(edge) is int for edge in spec):
        edges = list(spec)
        if edges == sorted(set(edges)):

            def edge_of(value: Any) -> Any:
                at = bisect.bisect_left(edges, value)
                return edges[at] if at < len(edges) else float("inf")

            return edge_of
    raise ValueError(
        f"bucket {spec!r} is unknown: expected 'pow2', 'log2', 'multiple:N', a sorted list of integers or a function"
    )


def bucket_text(spec: Any) -> Any:
    """Return a bucket as JSON for a store file's head; a function by its qualified name."""
    if callable(spec):
        return f"{spec.__module__}:{spec.__qualname__}" if hasattr(spec, "__qualname__") else type(spec).__qualname__
    return list(spec) if isinstance(spec, tuple) else spec
