"""Give a store to kernels that others decorated with ``triton.autotune``, without editing them."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import Autotuner as UpstreamAutotuner
from tcache._triton.kernels import JITFunction, KernelInterface
from tcache.autotuner import Autotuner
from tcache.errors import KernelError
from tcache.naming import values_in

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["adopt"]

_log = logging.getLogger("tcache")


def adopt(what: Any) -> list[str]:
    """Make stock autotuned kernels look up and store their winners as ``tcache.autotune`` does.

    The kernel objects stay the same objects, so every reference to them, in whatever module, is served. Triton itself
    is not patched, and kernels that are not named here are not touched. A library's own subclass of ``Autotuner`` stays
    in place below: the store is asked first, and the subclass launches what it finds in its cache. One that keeps its
    winners elsewhere cannot be served; it is left as it is, with a warning that names it.

    Args:
        what: a kernel, a module (with its loaded submodules), a dotted name such as ``fla.ops``, or a pattern over
            ``module:function`` such as ``fla.ops.gla.*``. A dotted name is imported; a pattern matches what is loaded.

    Returns:
        The kernels adopted, as ``module:function``, sorted; those adopted before are listed again.

    Raises:
        KernelError: nothing autotuned was found, or nothing of it can be adopted.
    """
    found: dict[int, Any] = {id(kernel): kernel for kernel in _candidates(what)}
    names, refused = [], []
    for kernel in found.values():
        reason = None if isinstance(kernel, Autotuner) else _take(kernel)
        if reason is None:
            names.append(_name(kernel))
        else:
            refused.append(f"{_name(kernel)}: {reason}")
    if not names:
        raise KernelError(
            f"nothing to adopt in {what!r}: " + (refused or ["found no kernel decorated with triton.autotune"])[0],
            "give a kernel, a module, or a pattern over module:function of modules that are imported",
        )
    for text in refused:
        _log.warning("tcache: not adopted: %s", text)
    return sorted(set(names))


def _take(kernel: Any) -> str | None:
    """Make an autotuner one of tcache's; return the reason if that cannot be."""
    kind: Any = type(kernel)
    if type(kernel.cache) is not dict and not type(kernel.cache).__module__.startswith("tcache."):
        return f"{kind.__module__}.{kind.__qualname__} keeps its winners in a cache of its own"
    winners = kernel.cache
    try:
        kernel.__class__ = _served(kind)  # adds no state of its own: the object keeps everything it has
    except TypeError as error:
        return f"{kind.__module__}.{kind.__qualname__}: {error}"
    kernel.cache = winners  # for each device apart from here on, and shared with copies as before
    kernel.cache_results = False  # upstream's records, which know no GPU name, are not consulted any more
    return None


@functools.cache
def _served(kind: Any) -> Any:
    """Return the class that puts a store before an autotuner of class ``kind``."""
    if kind is UpstreamAutotuner:
        return Autotuner
    return type(kind.__name__, (Autotuner, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _name(kernel: Any) -> str:
    return f"{kernel.base_fn.__module__}:{kernel.base_fn.__qualname__}"


def _candidates(what: Any) -> Iterator[Any]:
    if isinstance(what, ModuleType):
        yield from _in_modules(what.__name__)
    elif isinstance(what, str) and not any(sign in what for sign in "*?[:"):
        importlib.import_module(what)
        yield from _in_modules(what)
    elif isinstance(what, str):
        pattern = what if ":" in what else f"{what}:*"
        for kernel in _in_modules(""):
            if fnmatch.fnmatchcase(_name(kernel), pattern):
                yield kernel
    else:
        yield from _unwrapped(what)


def _unwrapped(value: Any) -> Iterator[Any]:
    """Yield the autotuner a value is, or has below heuristics or a library's own wrapper.

    By ``type`` and not by ``isinstance``, which asks the value: lazy objects in modules would load or warn.
    """
    while issubclass(type(value), KernelInterface) and not issubclass(type(value), (UpstreamAutotuner, JITFunction)):
        value = getattr(value, "fn", None)
    if issubclass(type(value), UpstreamAutotuner):
        yield value


def _in_modules(name: str) -> Iterator[Any]:
    for module_name, module in list(sys.modules.items()):
        if name and module_name != name and not module_name.startswith(name + "."):
            continue
        for value in values_in(module):
            yield from _unwrapped(value)
