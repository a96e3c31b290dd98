"""What wrappers ask of their arguments before a launch, and in what form a kernel may have them.

Triton takes a tensor's address and nothing else: not its device, not how far it reaches, not whether what lies there is
the value or its negative. Everything that would read or write other memory than meant, or other values, is refused here
by the argument's name, with what was expected and what was given.

One rule for tensors that torch negates lazily (``x._neg_view()``, the imaginary part of a conjugate): what is read is
resolved, as torch's own operations do, which copies it; what is written in place is refused. Conjugates need none:
only complex tensors are, and no kernel takes those.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import sys
import warnings
from collections.abc import Sequence

import torch
import triton
from triton.backends.driver import GPUDriver

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_STRIDED = torch.strided
_PACKAGE = __name__.rpartition(".")[0]
is_traced = torch.compiler.is_dynamo_compiling  # torch.compile cannot ask a tensor whether it is negated
MOST = 2**31 - 2**24
"""Rows, columns or anything else that kernels count in 32 bits: the last tile or step may end past the last element.

The longest step is that of softmax's parts, a 256th of a row: below ``2**23``.
"""
MOST_ACROSS = 65535
"""Programs along the second and the third axis of a grid (CUDA C++ Programming Guide, "Compute Capabilities")."""


def shown(value: object) -> str:
    """Return an argument of a wrong kind, for a message."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r}" if isinstance(value, numbers.Number) else f"a {type(value).__name__}"


def named(dtypes: Sequence[torch.dtype]) -> str:
    """Return ``float32, float16 or bfloat16``."""
    *most, last = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return f"{', '.join(most)} or {last}" if most else last


def readable(
    name: str, value: torch.Tensor, dtypes: Sequence[torch.dtype], dim: int | None = None, most: float = MOST
) -> torch.Tensor:
    """Return a tensor whose memory holds its values; warn where autograd follows it, which ends here.

    Args:
        name: of the argument.
        value: what was given for it.
        dtypes: those that it may have.
        dim: how many dimensions it must have; None for any number.
        most: elements that each of them may have.

    Returns:
        ``value`` itself, detached where autograd follows it, or a copy where torch negates it lazily.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another dtype, number of dimensions or layout, or a dimension that is too long.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {shown(value)}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: expected {named(dtypes)}, got {value.dtype}")
    if dim is not None and value.dim() != dim:
        raise ValueError(f"{name}: expected {dim} dimension{'s' * (dim > 1)}, got shape {tuple(value.shape)}")
    if value.layout is not _STRIDED:
        raise ValueError(f"{name}: expected a strided tensor, got one of layout {value.layout}")
    if value.numel() > most and max(value.shape) > most:
        raise ValueError(f"{name}: expected at most {most} elements along a dimension, got shape {tuple(value.shape)}")
    if value.requires_grad and torch.is_grad_enabled():
        warnings.warn(
            f"{name} requires a gradient, and the result has none: it counts as a constant; where that is meant, say so "
            f"with torch.no_grad() or {name}.detach()",
            stacklevel=_level(),
        )
        value = value.detach()  # said once
    if not (is_traced() or value.is_neg()):  # to be told the same tensor again takes longer
        return value
    try:
        return value.resolve_neg()
    except NotImplementedError:  # of float8: torch has no negative
        raise ValueError(
            f"{name}: expected a tensor whose memory holds its values, got a view of {value.dtype} that torch negates "
            "when it is read, and cannot copy"
        ) from None


def _level() -> int:
    """Return at which level of the stack, seen from who asks, the library was called: what a warning is to point to."""
    if is_traced():  # there are no frames
        return 3
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).rpartition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    return level


def writable(
    name: str, value: torch.Tensor, dtypes: Sequence[torch.dtype], dim: int | None = None, most: float = MOST
) -> torch.Tensor:
    """Return ``value``, which is to be written in place; arguments and errors are those of :func:`readable`.

    Raises:
        ValueError: also where torch negates it lazily: what is written there would be read as its negative.
    """
    with torch.no_grad():  # whether a gradient is lost is for the caller to say
        readable(name, value, dtypes, dim, most)
    if value.is_neg():
        raise ValueError(
            f"{name}: expected a tensor whose memory holds its values, as it is written in place, "
            "got a view that torch negates when it is read; give the result of its resolve_neg()"
        )
    return value


def check_device(**tensors: torch.Tensor | None) -> None:
    """Raise unless the tensors are on one device.

    Raises:
        ValueError: they are not.
    """
    first = None
    for tensor in tensors.values():
        if tensor is not None:
            if first is None:
                first = tensor.device
            elif tensor.device != first:
                found = ", ".join(f"{name} on {each.device}" for name, each in tensors.items() if each is not None)
                raise ValueError(f"expected one device, got {found}")


def check_dtype(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise unless a tensor has the dtype of another.

    Raises:
        ValueError: it has not.
    """
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name}: expected {named([other.dtype])} like {other_name}, got {tensor.dtype}")


def check_shape(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], beside: str = "", contiguous: bool = False
) -> None:
    """Raise unless a tensor has this shape, and is contiguous if it must be.

    Args:
        name: of the argument.
        tensor: what was given for it.
        shape: the shape wanted.
        beside: the arguments that it follows from, which may be what is wrong.
        contiguous: whether it must be.

    Raises:
        ValueError: it has not, or is not.
    """
    if tensor.shape != shape or (contiguous and not tensor.is_contiguous()):
        raise ValueError(
            f"{name}: expected {'contiguous ' * contiguous}{list(shape)}{beside and f' to go with {beside}'}, "
            f"got shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}"
        )


def check_fp8(name: str, x: torch.Tensor, instead: str = "int8") -> None:
    """Raise where the GPU that holds ``x`` has no float8_e4m3fn: before compute capability 8.9.

    Args:
        name: of the argument.
        x: what was given for it.
        instead: what such a GPU takes in its place.

    Raises:
        ValueError: it has none.
    """
    if x.is_cuda and torch.version.hip is None:
        found = torch.cuda.get_device_capability(x.device)
        if tuple(found) < (8, 9):
            raise ValueError(
                f"{name}: float8_e4m3fn: expected a GPU of compute capability 8.9 or more, {x.device} has "
                f"{found[0]}.{found[1]}; use {instead} there"
            )


def number(name: str, value: float) -> float:
    """Return a number as a float. A tensor of one element is none: reading it would wait for the device.

    Raises:
        TypeError: it is no number.
        ValueError: it is an integer or a fraction that no float reaches.
    """
    if type(value) is float:  # most are: asking whether something is a number at all takes longer
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name}: expected a number that a float holds, got one of more than 308 digits") from None
    raise TypeError(f"{name}: expected a number, got {shown(value)}")


def positive(name: str, value: float | None, default: float) -> float:
    """Return a finite number above 0; the default for None.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or not above 0.
    """
    if value is None:
        return default
    value = number(name, value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a finite {name} above 0, got {value}")
    return value


def integer(name: str, value: int, least: int, most: int) -> int:
    """Return an integer of a range.

    Raises:
        TypeError: it is no integer.
        ValueError: it lies outside of it.
    """
    if type(value) is not int and (not isinstance(value, numbers.Integral) or isinstance(value, bool)):
        raise TypeError(f"{name}: expected an integer, got {shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least}..{most}, got {value}")
    return int(value)


def flag(name: str, value: bool) -> bool:
    """Return True or False; 0 and 1 stand for them.

    Raises:
        TypeError: it is none of these.
    """
    if value is True or value is False:
        return value
    if not isinstance(value, numbers.Integral) or value not in (0, 1):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def check_any_order(what: str) -> None:
    """Raise, or warn, where the program wants the same bits every time: torch.use_deterministic_algorithms.

    Args:
        what: adds up in the order in which programs end.

    Raises:
        RuntimeError: what torch's own operations raise then.
    """
    if torch.are_deterministic_algorithms_enabled():
        text = (
            f"{what} adds up in the order in which programs end, and has no other way; expected an operation that is "
        )
        text += "deterministic, as torch.use_deterministic_algorithms is on (warn_only=True warns instead)"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=_level())


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Return a context in which launches go to the GPU that holds ``x``; Triton launches on the current one.

    Raises:
        ValueError: ``x`` is on the meta device: Triton takes its address, 0, for a pointer like any other. Or it is on
            the CPU where kernels run on GPUs: Triton refuses such pointers only after it has compiled, and those of
            descriptors not at all.
    """
    if x.is_cuda:
        return torch.cuda.device(x.get_device())
    kind = x.device.type
    if kind == "meta":
        raise ValueError("expected tensors that have memory, got one on the meta device")
    if kind == "cpu" and not triton.knobs.runtime.interpret and _runs_on_gpus():
        raise ValueError(
            "expected tensors on a GPU, got one on the CPU, where only Triton's interpreter runs kernels (TRITON_INTERPRET=1)"
        )
    return contextlib.nullcontext()


def _runs_on_gpus() -> bool:
    """Return whether what Triton launches goes to a GPU: also where there is none, and nothing can be launched."""
    try:
        return isinstance(triton.runtime.driver.active, GPUDriver)
    except RuntimeError:  # of Triton: no driver, or several
        return True
