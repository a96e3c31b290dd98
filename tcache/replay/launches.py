"""From one manifest case to the launches it makes, without a GPU or on one."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import is_kernel, jit_of, outermost_launches
from tcache._triton.mock import MockTensor
from tcache.errors import KernelError, ManifestError, TcacheError
from tcache.manifest.expr import ExpressionError, evaluate, names, unbound
from tcache.manifest.launches import RecordedLaunch
from tcache.manifest.model import CallItem, Constant, KernelItem, Tensor
from tcache.replay.recorded import recorded_launch
from tcache.replay.ref import KernelRef, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache.manifest import Case

__all__ = ["Launch", "launches", "run_case"]

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Compile options that a spelled-out launch may state among its arguments."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the program would make it.

    Attributes:
        kernel: the decorated kernel object.
        args, kwargs: the arguments, with ghost or mock tensors; ``grid`` is not among them.
        where: ``file:line:column`` of the manifest case it comes from.
        ref: the case's ref.
        grid: the manifest's grid as a function of the meta-parameters, None where the wrapper's own code computes it.
        source: identity of the kernel's source when the launch was recorded, None where it was not.
    """

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    ref: str
    grid: Callable[[dict[str, Any]], tuple[int, ...]] | None = None
    source: str | None = None


def launches(case: Case) -> list[Launch]:
    """Replay a case without a GPU and return what it would launch. A stub driver must be active.

    Raises:
        ManifestError: the case does not fit the kernel, or the wrapper failed; the message has the manifest's line.
        KernelError: the ref leads nowhere.
    """
    if isinstance(case.item, RecordedLaunch):
        launch = recorded_launch(case.item, case.folder, case.where)
        return [Launch(*launch, case.where, case.ref, source=case.item.source)]
    target = _load(case)
    if isinstance(case.item, KernelItem):
        kernel = _kernel(case, target)
        make = _ghost if "torch" in sys.modules else _mock
        arguments = _arguments(case, make)
        return [Launch(kernel, (), arguments, case.where, case.ref, _grid(case, arguments))]
    return _replay_call(case, target)


def _replay_call(case: Case, wrapper: Any) -> list[Launch]:
    from tcache.replay.ghost import GhostMode

    found: list[Launch] = []

    def sink(kernel: Any, _grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Launch(kernel, args, kwargs, case.where, case.ref))

    arguments = _arguments(case, _ghost)
    with outermost_launches(sink), GhostMode():
        try:
            wrapper(**arguments)
        except TcacheError:
            raise
        except (Exception, SystemExit) as error:
            raise _wrapper_failed(case, error) from error
    if not found:
        raise ManifestError(case.where, f"{case.ref} launched no kernel for {_scope(case)}", "remove the case")
    return found


def run_case(case: Case) -> None:
    """Run a case for real on the current GPU, with random inputs.

    Raises:
        ManifestError: the case does not fit the kernel, or the wrapper failed.
        KernelError: the ref leads nowhere.
    """
    import torch

    if isinstance(case.item, RecordedLaunch):
        raise ManifestError(
            case.where,
            "a recorded launch is not run again: its grid is the one of the config it was recorded with",
            "tune by running the program itself in mode tune, or from a manifest of `tcache manifest generalize`",
        )
    target = _load(case)
    arguments = _arguments(case, _real)
    try:
        if isinstance(case.item, KernelItem):
            kernel = _kernel(case, target)
            kernel[_grid(case, arguments)](**arguments)
        else:
            target(**arguments)
        torch.cuda.synchronize()
    except TcacheError:
        raise
    except Exception as error:
        raise _wrapper_failed(case, error) from error


def _load(case: Case) -> Any:
    try:
        return load(KernelRef.parse(case.ref), case.folder)
    except KernelError as error:
        raise ManifestError(case.ref_where or case.where, error.message, error.hint) from error


def _kernel(case: Case, target: Any) -> Any:
    if not is_kernel(target):
        kind = type(target).__name__
        raise ManifestError(
            case.ref_where or case.where,
            f"{case.ref} is a {kind}, not a Triton kernel",
            "use 'call:' for a Python wrapper",
        )
    known = list(jit_of(target).arg_names)
    for name in case.item.args:
        if name not in known and name not in OPTIONS:
            raise ManifestError(case.where, f"{case.ref} has no argument {name!r}: expected {', '.join(known)}")
    assert isinstance(case.item, KernelItem)
    for text in case.item.grid:
        for name in names(str(text)):
            if name not in known and name not in case.scope:
                scope = dict.fromkeys([*known, *case.scope])
                raise ManifestError(case.where, f"grid: {unbound(name, scope)}")
    return target


def _grid(case: Case, arguments: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    item = case.item
    assert isinstance(item, KernelItem)
    scope = {**case.scope, **{name: value for name, value in arguments.items() if isinstance(value, (int, float))}}

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        found = []
        for text in item.grid:
            try:
                size = evaluate(text, {**scope, **meta})
            except ExpressionError as error:
                raise ManifestError(case.where, f"grid: {error}") from error
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ManifestError(case.where, f"grid: {text!r} is {size!r}, expected an integer of at least 1")
            found.append(size)
        return tuple(found)

    return grid


Maker = "Callable[[tuple[int, ...], str, tuple[int, ...], int], Any]"


def _arguments(case: Case, make: Callable[[tuple[int, ...], str, tuple[int, ...], int], Any]) -> dict[str, Any]:
    assert not isinstance(case.item, RecordedLaunch)
    found: dict[str, Any] = {}
    for name, spec in case.item.args.items():
        try:
            if isinstance(spec, Tensor):
                found[name] = _tensor(spec, case, make)
            elif isinstance(spec, Constant):
                found[name] = spec.value
            else:
                found[name] = evaluate(spec, case.scope) if isinstance(spec, str) else spec
        except ExpressionError as error:
            raise ManifestError(case.where, f"{name}: {error}") from error
        except (RuntimeError, OverflowError, TypeError, ValueError) as error:  # torch refuses such a tensor
            text = next(iter(str(error).splitlines()), "")
            raise ManifestError(case.where, f"{name}: cannot be made for {_scope(case)}: {text}") from error
    return found


def _tensor(spec: Tensor, case: Case, make: Callable[[tuple[int, ...], str, tuple[int, ...], int], Any]) -> Any:
    shape = tuple(_size(size, case) for size in spec.shape)
    stride = _contiguous(shape) if spec.stride is None else tuple(_size(step, case) for step in spec.stride)
    dtype = str(case.scope.get(spec.dtype, spec.dtype))
    return make(shape, dtype, stride, _size(spec.offset, case))


def _size(text: str | int, case: Case) -> int:
    value = evaluate(text, case.scope)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ExpressionError(f"{text!r} is {value!r}: expected an integer of at least 0")
    return value


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def _mock(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int) -> MockTensor:
    return MockTensor(dtype, shape, stride, offset * _BYTES[dtype])


_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
}


def _ghost(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int) -> Any:
    from tcache.replay.ghost import ghost

    return ghost(shape, dtype, stride, offset)


def _real(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int) -> Any:
    import torch

    last = (
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else offset
    )
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        storage = torch.randn(last + 1, device="cuda", dtype=torch.float32).to(kind)
    else:
        storage = torch.zeros(last + 1, device="cuda", dtype=kind)
    return storage.as_strided(shape, stride, offset)


def _scope(case: Case) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.scope.items())


def _wrapper_failed(case: Case, error: BaseException) -> ManifestError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "/tcache/replay/" not in f.filename]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = str(error).splitlines()[0] if str(error) else ""
    return ManifestError(
        case.where,
        f"{case.ref} failed for {_scope(case)}{where}: {type(error).__name__}: {text}",
        "check the arguments; code that reads tensor values finds none here: spell its launches out with 'kernel:'"
        if isinstance(case.item, CallItem)
        else None,
    )
