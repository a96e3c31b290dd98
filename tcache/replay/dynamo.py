"""``torch._dynamo`` during a replay: imported only by who needs it, and then as if there were no replay.

It takes as long to import as torch itself, and 60 MB; few wrappers need it. Whoever imports it late, a library or
``torch.compile`` in a wrapper, would let it see what a replay puts in place: it files ``torch.cuda``'s functions by
identity while it is imported, and keeps them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from tcache.replay.cuda import torch_cuda_lifted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["as_written"]

_NAME = "torch._dynamo"


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Let functions under ``torch.compile`` run as they are written: what it would generate belongs to torch.

    Where dynamo is not imported yet, its import is watched for: nothing of a replay is in place meanwhile, and from
    then on the stance holds until the end of the block.
    """
    with contextlib.ExitStack() as stack:
        if _NAME in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            stack.enter_context(_without())
            finder = _Finder(stack)
            sys.meta_path.insert(0, finder)
            stack.callback(finder.end)
        yield


_KNOWN = "__dynamo_disable"
"""Where torch keeps, on a function that dynamo shall not look into, what it calls instead."""
_spared: set[Any] = set()


@contextlib.contextmanager
def _without() -> Iterator[None]:
    """Let torch's meta kernels run without dynamo inside the block.

    Adding two meta tensors imports it, only to say that it shall not look into the kernel; under the stance that comes
    to a plain call. A torch built otherwise imports it as ever.

    Source: ``_disable_dynamo`` in ``torch/_compile.py``, alike in 2.11 to 2.13; ``elementwise_type_promotion_wrapper``
    in ``torch/_prims_common/wrappers.py``.
    """
    own = {function for function in _disabled() if _KNOWN not in vars(function)}
    for function in own:
        setattr(function, _KNOWN, function)
    _spared.update(own)
    try:
        yield
    finally:
        _spare_no_more(own & _spared)


def _spare_no_more(functions: set[Any]) -> None:
    for function in functions:
        vars(function).pop(_KNOWN, None)
    _spared.difference_update(functions)


def _disabled() -> Iterator[Any]:
    """Yield the functions of torch's meta kernels that are kept from dynamo, through whatever else decorates them."""
    inner = [value for value in torch._disable_dynamo.__code__.co_consts if isinstance(value, CodeType)]
    names = ("torch._refs", "torch._decomp", "torch._prims", "torch._meta_registrations")
    waiting = [value for name, module in list(sys.modules.items()) if name.startswith(names)
               for value in list(vars(module).values())]  # fmt: skip
    seen = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        held = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not bound yet
                held[name] = cell.cell_contents
        waiting += held.values()
        if function.__code__ in inner and isinstance(held.get("fn"), FunctionType):
            yield held["fn"]


class _Finder(MetaPathFinder):
    """Finds dynamo as the other finders do, and puts its own loader around theirs."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._searching = False

    def end(self) -> None:
        with contextlib.suppress(ValueError):  # somebody else has emptied the list
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME or self._searching:
            return None
        self._searching = True
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if found is not None and found.loader is not None:
            found.loader = _Loader(found.loader, self._stack)
        return found


class _Loader(Loader):
    """Runs dynamo's import with nothing of a replay in place, and then sets the stance."""

    def __init__(self, real: Any, stack: contextlib.ExitStack) -> None:
        self._real = real
        self._stack = stack

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        _spare_no_more(set(_spared))
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        # tensors that are made meanwhile are what they say, whatever device a mode would put them on
        with torch_cuda_lifted(), torch._C.DisableTorchFunction():
            self._real.exec_module(module)
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
