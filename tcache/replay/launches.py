"""From one manifest case to the launches it makes, without a GPU or on one."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import defaults_of, is_kernel, jit_of, outermost_launches, through_launchers
from tcache._triton.written import written_arguments
from tcache.errors import KernelError, ManifestError, TcacheError
from tcache.manifest.expr import ExpressionError, evaluate, names, unbound
from tcache.manifest.launches import RecordedLaunch
from tcache.manifest.model import CallItem, KernelItem
from tcache.replay.arguments import arguments, describe, ghost, mock
from tcache.replay.companions import real_arguments
from tcache.replay.machine import with_torch
from tcache.replay.recorded import recorded_launch
from tcache.replay.ref import KernelRef, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache.manifest import Case

__all__ = ["Launch", "kernel_of", "launches", "load_target", "run_case"]

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Compile options that a spelled-out launch may state among its arguments."""


_RECORD = "record its launches on a GPU with `tcache record`"
_SPELL_OUT = "spell its launches out with 'kernel:', or record them on a GPU with `tcache record`"


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
    with with_torch(needed=isinstance(case.item, CallItem)):
        if isinstance(case.item, RecordedLaunch):
            launch = recorded_launch(case.item, case.folder, case.where)
            return [Launch(*launch, case.where, case.ref, source=case.item.source)]
        target = load_target(case)
        if not isinstance(case.item, KernelItem):
            return _replay_call(case, target)
        kernel = kernel_of(case, target)
        given = arguments(case, ghost if "torch" in sys.modules else mock)
        grid = _grid(case, given, kernel)
        try:
            made, args, kwargs = through_launchers(kernel, grid, (), given)
        except ManifestError:  # of the grid
            raise
        except TcacheError as error:
            raise ManifestError(case.where, f"{case.ref} cannot be replayed: {error.message}", _RECORD) from error
        except Exception as error:
            raise _wrapper_failed(case, error) from error
        return [Launch(made, args, kwargs, case.where, case.ref, grid)]


def _replay_call(case: Case, wrapper: Any) -> list[Launch]:
    from tcache.replay.compiled import Compiled
    from tcache.replay.values import forget

    found: list[Launch] = []

    def sink(kernel: Any, _grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(Launch(kernel, args, kwargs, case.where, case.ref))
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        written = written_arguments(kernel)
        forget([value for name, value in named.items() if name in written or isinstance(value, (tuple, list))])
        return Compiled()

    given = arguments(case, ghost)
    with outermost_launches(sink):
        try:
            wrapper(**given)
        except TcacheError as error:
            if type(error) is not TcacheError:
                raise
            raise ManifestError(  # the stub driver was asked for what only a GPU can do
                case.where, f"{case.ref} cannot be replayed for {describe(case)}: {error.message}", _SPELL_OUT
            ) from error
        except (Exception, SystemExit) as error:
            raise _wrapper_failed(case, error) from error
    if not found:
        raise ManifestError(case.where, f"{case.ref} launched no kernel for {describe(case)}", "remove the case")
    return found


def run_case(case: Case) -> None:
    """Run a case for real on the current GPU, with random inputs or those of the wrapper's ``f_inputs``.

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
    target = load_target(case)
    given = real_arguments(case, target)
    try:
        if isinstance(case.item, KernelItem):
            kernel = kernel_of(case, target)
            kernel[_grid(case, given)](**given)
        else:
            target(**given)
        torch.cuda.synchronize()
    except TcacheError:
        raise
    except Exception as error:
        raise _wrapper_failed(case, error) from error


def load_target(case: Case) -> Any:
    """Import what a case's item names.

    Raises:
        ManifestError: the ref leads nowhere; the message has the manifest's line.
    """
    try:
        return load(KernelRef.parse(case.ref), case.folder)
    except KernelError as error:
        raise ManifestError(case.ref_where or case.where, error.message, error.hint) from error


def kernel_of(case: Case, target: Any) -> Any:
    """Return the kernel of a ``kernel:`` item after checking that it is one and takes the item's arguments.

    Raises:
        ManifestError: it does not.
    """
    if not is_kernel(target):
        kind = type(target).__name__
        raise ManifestError(
            case.ref_where or case.where,
            f"{case.ref} is a {kind}, not a Triton kernel",
            "use 'call:' for a Python wrapper",
        )
    known = list(jit_of(target).arg_names)
    assert isinstance(case.item, KernelItem)
    for name in case.item.args:
        if name not in known and name not in OPTIONS:
            raise ManifestError(case.where, f"{case.ref} has no argument {name!r}: expected {', '.join(known)}")
    for text in case.item.grid:
        for name in names(str(text)):
            if name not in known and name not in case.scope:
                scope = dict.fromkeys([*known, *case.scope])
                raise ManifestError(case.where, f"grid: {unbound(name, scope)}")
    return target


def _grid(case: Case, given: dict[str, Any], kernel: Any = None) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    """Return the manifest's grid as a function of the meta-parameters; the kernel's own defaults are bound as well."""
    item = case.item
    assert isinstance(item, KernelItem)
    scope = {
        **defaults_of(kernel),
        **case.scope,
        **{name: value for name, value in given.items() if isinstance(value, (int, float))},
    }

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


def _wrapper_failed(case: Case, error: BaseException) -> ManifestError:
    where = getattr(error, "where", None)
    if where is not None and "torch" in sys.modules:
        from tcache.replay.values import ValueUnknown

        if isinstance(error, ValueUnknown):
            return ManifestError(
                case.where,
                f"{case.ref} cannot be replayed for {describe(case)}: {error}",
                _SPELL_OUT,
            )
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "/tcache/replay/" not in f.filename]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = str(error).splitlines()[0] if str(error) else ""
    return ManifestError(
        case.where,
        f"{case.ref} failed for {describe(case)}{where}: {type(error).__name__}: {text}",
        "install it here, too: a replay runs the wrapper's own code"
        if isinstance(error, ModuleNotFoundError)
        else "check the arguments; code that reads tensor values finds none here: spell its launches out with 'kernel:'"
        if isinstance(case.item, CallItem)
        else None,
    )
