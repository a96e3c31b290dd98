"""A wrapper's companions: the functions beside it that say what it computes, what that costs, and on what values.

Beside a wrapper ``f`` its module may define ``f_reference``, ``f_torch``, ``f_flops``, ``f_bytes``, ``f_inputs`` and
``f_tolerance``; each takes the arguments of ``f``. This module is the one place that knows how they are found, and when
``f_inputs`` is called: after the real tensors of a ``call:`` case were made, and never on ghosts.
"""

from __future__ import annotations

import inspect
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

from tcache.errors import ManifestError, TcacheError
from tcache.manifest import CallItem
from tcache.replay.arguments import arguments, describe, real
from tcache.replay.ref import KernelRef, load, module_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache.manifest import Case

__all__ = ["KINDS", "call_companion", "companion", "real_arguments"]

KINDS = ("reference", "torch", "flops", "bytes", "inputs", "tolerance")


def companion(case: Case, wrapper: Any, kind: str) -> Callable[..., Any] | None:
    """Return a companion of a case's wrapper.

    Args:
        case: a case of a ``call:`` item.
        wrapper: what its ref names.
        kind: one of :data:`KINDS`.

    Returns:
        The function called like the wrapper with ``_`` and the kind added: beside the name that the ref gives, else
        beside the wrapper's definition, where the ref names a re-export. None where there is none.
    """
    ref = KernelRef.parse(case.ref)
    owner, _, name = ref.attribute.rpartition(".")
    place = load(KernelRef(ref.module, owner), case.folder) if owner else module_of(ref, case.folder)
    found = getattr(place, f"{name}_{kind}", None)
    if found is None:
        defined = inspect.unwrap(wrapper)
        found = getattr(defined, "__globals__", {}).get(f"{getattr(defined, '__name__', name)}_{kind}")
    return found if callable(found) else None


def call_companion(case: Case, wrapper: Any, kind: str, given: dict[str, Any], default: Any = None) -> Any:
    """Call a companion with a case's arguments.

    Args:
        case, wrapper, kind: as for :func:`companion`.
        given: the arguments.
        default: what to return where there is no such companion.

    Raises:
        ManifestError: it raised; the message names it and the line.
        torch.OutOfMemoryError: the device has not enough memory for it; left to the caller, who may have another way.
    """
    function = companion(case, wrapper, kind)
    if function is None:
        return default
    try:
        return function(**given)
    except TcacheError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise _companion_failed(case, kind, error) from error


def _companion_failed(case: Case, kind: str, error: Exception) -> ManifestError:
    own = [f for f in traceback.extract_tb(error.__traceback__) if "/tcache/replay/" not in f.filename]
    own = [f for f in own if "site-packages" not in f.filename] or own
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = next(iter(str(error).splitlines()), "")
    name = f"{case.ref}_{kind}"
    return ManifestError(
        case.where,
        f"{name} failed for {describe(case)}{where}: {type(error).__name__}: {text}",
        f"a companion takes exactly the arguments of {case.ref.rpartition(':')[2]}: correct it, or remove it",
    )


def real_arguments(case: Case, wrapper: Any, device: str = "cuda") -> dict[str, Any]:
    """Make a case's arguments with contents: random floats, zeros of any other type, then what ``f_inputs`` fills in.

    Args:
        case: a case of a ``call:`` or ``kernel:`` item; only wrappers have companions.
        wrapper: what its ref names.
        device: where the tensors shall be.

    Raises:
        ManifestError: they cannot be made, or ``f_inputs`` raised.
    """
    given = arguments(case, partial(real, device=device))
    if isinstance(case.item, CallItem):
        call_companion(case, wrapper, "inputs", given)
    return given
