"""From a case's argument specs to arguments: mock tensors, ghosts, or real tensors on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcache._triton.literals import constexpr, element_type, tensor_descriptor
from tcache._triton.mock import MockTensor
from tcache.errors import ManifestError
from tcache.manifest import (
    CallItem,
    Constant,
    Constexpr,
    Descriptor,
    DType,
    KernelItem,
    ListArgument,
    Tensor,
    TupleArgument,
)
from tcache.manifest.arguments import DTYPES
from tcache.manifest.complaints import unknown_dtype
from tcache.manifest.expr import ExpressionError, evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tcache.manifest import Case

    Maker = Callable[[tuple[int, ...], str, tuple[int, ...], int], Any]

__all__ = ["arguments", "describe", "ghost", "mock", "real", "strides_of"]


def arguments(case: Case, make: Maker) -> dict[str, Any]:
    """Make the arguments of a case.

    Args:
        case: a case of a ``call:`` or ``kernel:`` item.
        make: :func:`mock`, :func:`ghost` or :func:`real`.

    Raises:
        ManifestError: an expression or tensor cannot be made for this case.
    """
    assert isinstance(case.item, (CallItem, KernelItem))  # a recorded launch has its own way
    found: dict[str, Any] = {}
    for name, spec in case.item.args.items():
        try:
            found[name] = _argument(spec, case, make)
        except ExpressionError as error:
            raise ManifestError(case.where, f"{name}: {error}") from error
        except (RuntimeError, OverflowError, TypeError, ValueError, AssertionError) as error:
            text = next(iter(str(error).splitlines()), "")  # what torch or Triton refuse to make
            raise ManifestError(case.where, f"{name}: cannot be made for {describe(case)}: {text}") from error
    return found


def describe(case: Case) -> str:
    """Return a case's values as messages show them, after "for"."""
    return ", ".join(f"{name}={value}" for name, value in case.scope.items()) or "its case"


def _argument(spec: Any, case: Case, make: Maker) -> Any:
    if isinstance(spec, Tensor):
        return _tensor(spec, case, make)
    if isinstance(spec, Constant):
        return evaluate(repr(spec.value), {}) if type(spec.value) is int else spec.value
    if isinstance(spec, DType):
        return _dtype(_named(spec.dtype, case), case)
    if isinstance(spec, TupleArgument):
        return tuple(_argument(member, case, make) for member in spec.items)
    if isinstance(spec, ListArgument):
        return [_argument(member, case, make) for member in spec.items]
    if isinstance(spec, Constexpr):
        return constexpr(_argument(spec.constexpr, case, make))
    if isinstance(spec, Descriptor):
        tensor = _tensor(spec.descriptor, case, make)
        block = [_size(size, case) for size in spec.block]
        return tensor_descriptor(tensor, list(tensor.shape), list(tensor.stride()), block, spec.padding)
    return evaluate(spec, case.scope)


def _named(dtype: str, case: Case) -> str:
    return str(case.scope.get(dtype, dtype))


def _dtype(name: str, case: Case) -> Any:
    """A kernel is given Triton's type, a wrapper torch's."""
    if name not in DTYPES:
        raise unknown_dtype(case.where, name)
    if isinstance(case.item, KernelItem):
        return element_type(name)
    import torch

    return getattr(torch, name)


def _tensor(spec: Tensor, case: Case, make: Maker) -> Any:
    shape = tuple(_size(size, case) for size in spec.shape)
    stride = strides_of(shape, spec.layout) if spec.stride is None else [_size(step, case) for step in spec.stride]
    return make(shape, _named(spec.dtype, case), tuple(stride), _size(spec.offset, case))


def _size(text: str | int, case: Case) -> int:
    value = evaluate(text, case.scope)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ExpressionError(f"{text!r} is {value!r}: expected an integer of at least 0")
    return value


def strides_of(shape: Sequence[int], layout: str | None = None) -> list[int]:
    """Return a tensor's strides in elements.

    Args:
        shape: its sizes.
        layout: None for contiguous, ``channels_last``, ``channels_last_3d`` (torch's memory formats of those names) or
            ``transposed`` (the last two dimensions swapped in memory).
    """
    order = list(range(len(shape)))  # dimensions, the slowest in memory first
    if layout == "transposed":
        order[-2:] = order[-1], order[-2]
    elif layout is not None:
        order = [0, *order[2:], 1]
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return strides


def mock(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int) -> MockTensor:
    """Make a tensor argument that only Triton's binder looks at; needs no torch."""
    return MockTensor(dtype, shape, stride, offset * DTYPES[dtype])


def ghost(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int) -> Any:
    """Make a ghost: see :mod:`tcache.replay.ghost`."""
    from tcache.replay.ghost import ghost as make

    return make(shape, dtype, stride, offset)


def real(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int, device: str = "cuda") -> Any:
    """Make a tensor with contents, on the current GPU: random floats, zeros of any other type."""
    import torch

    last = (
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else offset
    )
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        storage = torch.randn(last + 1, device=device, dtype=torch.float32).to(kind)
    else:
        storage = torch.zeros(last + 1, device=device, dtype=kind)
    return storage.as_strided(shape, stride, offset)
