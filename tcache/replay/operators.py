"""Custom operators in a replay: a GPU's Python implementation runs with ghosts, where torch would run the fake one.

``torch.library.custom_op``, ``triton_op`` and ``Library.impl(..., "CUDA")`` register Python functions that launch
kernels. To torch a ghost is a meta tensor, so that it would call the operator's fake implementation, which launches
nothing. While a replay lasts the dispatcher's entry for meta tensors calls the GPU's implementation instead, inside the
mode; autograd's formulas, which are above it, stay as they are. Operators in C++ keep their implementations for meta
tensors.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._library.triton import set_wrap_triton_enabled
from torch._ops import OpOverload, OpOverloadPacket

from tcache.replay.autocast import AUTOCAST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

__all__ = ["is_operator", "operators_for_ghosts", "prepare", "take_back"]

_GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)  # AMD's, too
_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradMeta)
_BELOW, _THROUGH = ("CUDA", "CompositeExplicitAutograd"), ("CompositeImplicitAutograd", "")
"""Keys a Python implementation is registered under: below autograd, and seen through by it (which is the default)."""

_libraries: list[Any] = []
_prepared: dict[str, str | None] = {}
"""Operators met in this replay: name -> the key of the Python implementation that serves a GPU."""


def is_operator(func: Any) -> bool:
    """Return whether a function is an operator as ``torch.ops`` has them."""
    return isinstance(func, (OpOverload, OpOverloadPacket))


def prepare(func: Any, inside: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any] | None:
    """Return what to call for an operator given ghosts, None where no Python function implements it for a GPU.

    Args:
        func: the operator; one overload, or all of that name.
        inside: turns a function into one that runs inside the ghosts' mode.
    """
    overloads = [func] if isinstance(func, OpOverload) else [getattr(func, name) for name in func.overloads()]
    kinds = [_prepare(one, inside) for one in overloads]
    if len(kinds) == 1 and kinds[0] in _THROUGH:  # nothing may be registered below
        call: Callable[..., Any] = inside(overloads[0].redispatch)
        return lambda *args, **kwargs: call(_AUTOGRAD, *args, **kwargs)
    return func if any(kind is not None for kind in kinds) else None


def _prepare(operator: Any, inside: Callable[[Callable[..., Any]], Callable[..., Any]]) -> str | None:
    name = str(operator._name)
    if name not in _prepared and _libraries:
        _prepared[name] = kind = _python(name)
        if kind in _BELOW:
            namespace, _, rest = name.partition("::")
            library = torch.library.Library(namespace, "IMPL")
            _libraries.append(library)
            call = inside(operator.redispatch)
            library.impl(rest, lambda *args, **kwargs: call(_GPU, *args, **kwargs), "Meta", allow_override=True)
    return _prepared.get(name)


def _python(name: str) -> str | None:
    namespace, _, rest = name.partition("::")
    if namespace in ("aten", "prim", "prims"):
        return None
    known = torch.library._impls
    return next((kind for kind in _BELOW + _THROUGH if f"{namespace}/{rest}/{kind}" in known), None)


_BETWEEN = ("torch", "tcache", "functools")
_made: dict[int, list[weakref.ref[Any]]] = {}
"""Identity of a module's namespace (a name may be there twice) -> the libraries it made in replays, also by torch's
own functions (``torch.library.define``)."""


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    """Return ``Library.__init__`` for the block, which notes whose a library is."""

    def making(library: Any, *args: Any, **kwargs: Any) -> None:
        init(library, *args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
            frame = frame.f_back
        _made.setdefault(id(frame.f_globals), []).append(weakref.ref(library))

    return making


def take_back(module: ModuleType) -> None:
    """Destroy what a module registered: whoever imports it again defines its operators again, which torch refuses.

    A library that it holds and that another module has as well stays, until the last of them is forgotten.
    """
    found = {id(one): one for one in (library() for library in _made.pop(id(vars(module)), [])) if one is not None}
    if imported := {id(one): one for one in _held(module) if id(one) not in found}:
        elsewhere = {id(one) for other in list(sys.modules.values()) for one in _held(other)}
        found |= {number: one for number, one in imported.items() if number not in elsewhere}
    for library in found.values():
        library._destroy()


def _held(module: Any) -> list[Any]:
    values = list(getattr(module, "__dict__", {}).values())
    return [value for value in values if issubclass(type(value), torch.library.Library)]


_placed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Libraries that put functions in the place of torch's operators on GPUs."""


def _replacing(
    impl: Callable[..., None], inside: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., None]:
    """Return ``Library.impl`` for the block: what replaces an operator of torch's on GPUs replaces it for ghosts too.

    So libraries put their kernels in torch's place (``flag_gems.enable()``). Ours goes when theirs does, and between
    replays: theirs may stay, and meta tensors are nobody's ghosts then.
    """

    def registering(library: Any, name: Any, function: Any, key: str = "", **kwargs: Any) -> None:
        impl(library, name, function, key, **kwargs)
        if library.ns == "aten" and (key or library.dispatch_key) == "CUDA" and not kwargs.get("with_keyset"):
            full = name if isinstance(name, str) else str(name._name)
            placed = library.__dict__.setdefault("_tcache_placed", {})
            placed[full] = function, _place(full, inside(function))
            _placed.add(library)

    return registering


def _place(full: str, function: Callable[..., Any]) -> Any:
    ours = torch.library.Library("aten", "IMPL")
    # below Library.impl, which refuses some operators; with_keyset is False
    ours.m.impl(full.removeprefix("aten::"), "Meta", function, False)  # noqa: FBT003
    return ours


def _place_again(inside: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Do for ghosts once more what libraries did in an earlier replay, and have not taken back."""
    for library in list(_placed):
        if library.m is None:
            _placed.discard(library)
            continue
        placed = library._tcache_placed
        placed |= {full: (function, _place(full, inside(function))) for full, (function, _) in placed.items()}


def _displace() -> None:
    for library in list(_placed):
        for _, ours in library._tcache_placed.values():
            ours._destroy()


@contextlib.contextmanager
def operators_for_ghosts(inside: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let :func:`prepare` register implementations inside the block, and take them back at its end.

    Args:
        inside: turns a function into one that runs inside the ghosts' mode.
    """
    before = torch.library.Library.__init__, torch.library.Library.impl
    passing = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    changed = [(operator, operator.non_fallthrough_keys) for operator in torch._ops._higher_order_ops.values()]
    try:
        _libraries.append(torch.library.Library("_", "IMPL"))
        _place_again(inside)
        torch.library.Library.__init__, torch.library.Library.impl = _noting(before[0]), _replacing(before[1], inside)
        passing.append(AUTOCAST)
        for operator, _ in changed:
            operator.fallthrough(AUTOCAST)
        with set_wrap_triton_enabled(False):  # what wrap_triton wraps is launched as it is
            yield
    finally:
        torch.library.Library.__init__, torch.library.Library.impl = before
        passing[:] = [key for key in passing if key != AUTOCAST]
        for operator, keys in changed:
            operator.non_fallthrough_keys = keys
        _displace()
        while _libraries:
            _libraries.pop()._destroy()
        _prepared.clear()
