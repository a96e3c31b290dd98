"""Check a manifest against the kernels it names: refs, argument names, and the arguments of every case. No GPU."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

from tcache.errors import ManifestError
from tcache.manifest import CallItem, KernelItem
from tcache.replay.arguments import arguments, mock
from tcache.replay.launches import kernel_of, load_target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.manifest import Case

__all__ = ["check_cases"]

MOST = 100
"""Problems after which no more are looked for."""


def check_cases(cases: Iterable[Case]) -> list[ManifestError]:
    """Import what the cases' items name and make every case's arguments as mocks; launch nothing.

    A driver must be active, as for replay: some packages ask it while they are imported.

    Args:
        cases: the cases of a sound manifest.

    Returns:
        What is wrong, in order, each once.
    """
    problems: dict[str, ManifestError] = {}
    seen: dict[int, bool] = {}  # item -> whether its ref leads to something that takes its arguments
    kept = []  # keeps items alive, so that their ids stay theirs
    for case in cases:
        if len(problems) >= MOST:
            break
        if not isinstance(case.item, (CallItem, KernelItem)):
            continue
        try:
            if id(case.item) not in seen:
                kept.append(case.item)
                seen[id(case.item)] = False
                _item(case)
                seen[id(case.item)] = True
            arguments(case, mock)
        except ManifestError as error:
            problems.setdefault(error.message, error)
    return list(problems.values())


def _item(case: Case) -> None:
    target = load_target(case)
    if isinstance(case.item, KernelItem):
        kernel_of(case, target)
        return
    if not callable(target):
        raise ManifestError(case.ref_where, f"{case.ref} is a {type(target).__name__}, not a function")
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C, or it hides what it takes
        return
    _wrapper(case, signature.parameters)


def _wrapper(case: Case, parameters: Any) -> None:
    assert isinstance(case.item, CallItem)
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    takes = [
        name
        for name, kind in kinds.items()
        if kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    if inspect.Parameter.VAR_KEYWORD not in kinds.values():
        for name in case.item.args:
            if name not in takes:
                close = difflib.get_close_matches(name, takes, n=1)
                raise ManifestError(
                    case.ref_where,
                    f"{case.ref} has no argument {name!r}: expected {', '.join(takes)}",
                    f"did you mean {close[0]!r}?" if close else None,
                )
    absent = [
        name for name in takes if parameters[name].default is inspect.Parameter.empty and name not in case.item.args
    ]
    if absent:
        raise ManifestError(case.ref_where, f"{case.ref} needs its argument {', '.join(absent)}")
