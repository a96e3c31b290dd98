"""Whether a kernel's result is the reference's, and how far it is from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TOLERANCES", "Agreement", "compare", "tensors_of"]

TOLERANCES = {
    "float64": (1e-9, 1e-12),
    "float32": (1e-5, 1e-6),
    "float16": (1e-2, 1e-2),
    "bfloat16": (1e-2, 1e-2),
    "float8_e4m3fn": (2**-3, 2**-9),  # one step: three bits of mantissa, the smallest number above zero
    "float8_e4m3fnuz": (2**-3, 2**-10),
    "float8_e5m2": (2**-2, 2**-16),
    "float8_e5m2fnuz": (2**-2, 2**-17),
    "int8": (0.0, 1.0),  # one step of a quantised value: rounding decides between neighbours
    "uint8": (0.0, 1.0),
}
"""dtype -> (relative, absolute) tolerance; dtypes that are not listed must be equal."""

_CHUNK = 1 << 26


@dataclass(frozen=True)
class Agreement:
    """How a result compares with a reference.

    Attributes:
        largest_error: the largest absolute difference of finite values, over all tensors.
        problem: why they do not agree; None where they do.
    """

    largest_error: float
    problem: str | None = None


def tensors_of(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested tuples, lists and dictionaries, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def compare(got: Any, wanted: Any, tolerance: tuple[float, float] | None = None) -> Agreement:
    """Compare all tensors of a result with those of a reference.

    Args:
        got, wanted: tensors, or tuples, lists or dictionaries of them.
        tolerance: (relative, absolute), for floating tensors; None takes that of each tensor's dtype from
            :data:`TOLERANCES`. A difference may be the absolute plus the relative times the reference's magnitude.
    """
    ours, theirs = list(tensors_of(got)), list(tensors_of(wanted))
    if len(ours) != len(theirs):
        return Agreement(0.0, f"{len(ours)} tensors, the reference has {len(theirs)}")
    largest = 0.0
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        which = f"result {number}: " if len(ours) > 1 else ""
        if one.shape != other.shape or one.dtype != other.dtype:
            found, expected = (f"{tuple(each.shape)} {each.dtype}" for each in (one, other))
            return Agreement(largest, f"{which}{found}, the reference {expected}")
        dtype = str(one.dtype).removeprefix("torch.")
        allowed = TOLERANCES.get(dtype, (0.0, 0.0))
        if tolerance is not None and one.dtype.is_floating_point:
            allowed = tolerance
        error, wrong = _differences(one, other, *allowed)
        largest = max(largest, error)
        if wrong:
            text = f"{which}{wrong} of {one.numel()} values differ by more than {allowed[0]:g} relative and "
            return Agreement(largest, f"{text}{allowed[1]:g} absolute; the largest difference is {error:.4g}")
    return Agreement(largest)


def _differences(got: Any, wanted: Any, relative: float, absolute: float) -> tuple[float, int]:
    """Return the largest difference of finite values and how many values differ too much; NaN agrees with NaN."""
    import torch

    largest, wrong = 0.0, 0
    exact = got.dtype in (torch.int64, torch.float64, torch.float32, torch.int32)
    for one, other in zip(got.reshape(-1).split(_CHUNK), wanted.reshape(-1).split(_CHUNK), strict=True):
        a, b = (each.to(torch.float64 if exact else torch.float32) for each in (one, other))
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, 0.0, (a - b).abs())
        close = a.isfinite() & b.isfinite() & (difference <= absolute + relative * b.abs())
        finite = difference[difference.isfinite()]
        if finite.numel():
            largest = max(largest, float(finite.max()))
        wrong += int((~same & ~close).sum())
    return largest, wrong
