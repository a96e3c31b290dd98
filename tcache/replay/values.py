"""What a replay knows of tensor values: those the program wrote down itself; for any other, an error at its line.

A ghost has no values. Where a program states them (``torch.tensor([0, 100], device="cuda")``, ``torch.arange``) they
are kept beside the ghost, and operations on small tensors carry them along, so that code may read back what it
wrote, as variable-length wrappers do. A kernel that may write to them or an in-place operation makes them unknown
again: what is kept is valid for one value of torch's version counter, which all views of a tensor share, and of the
count of such kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tcache.replay.place import unwrapped

__all__ = ["ValueUnknown", "forget", "keep", "known", "reads_values", "user_line"]

LIMIT = 1 << 16
"""Most elements whose values are kept."""


class ValueUnknown(RuntimeError):
    """Code asked for the values of a tensor that has none.

    Args:
        what: the operation, as the user wrote it.
        why: what is the matter with it.

    Attributes:
        where: ``file:line`` of the user's code, None when only torch's own frames are there.
    """

    def __init__(self, what: str, why: str = "depends on the values of a GPU tensor, and a replay has none") -> None:
        self.where = user_line()
        place = f"{self.where}: " if self.where else ""
        super().__init__(f"{place}{what} {why}")


_INNER = tuple(
    str(Path(str(module.__file__)).parent) + "/" for module in (torch, sys.modules["tcache"]) if module.__file__
)


def user_line() -> str | None:
    """Return ``file:line`` of the innermost frame that is neither torch's nor tcache's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_INNER, "<")) and "/contextlib.py" not in file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def keep(ghost: Any, value: Any) -> None:
    """Keep the values of a ghost.

    Args:
        ghost: the ghost.
        value: a CPU tensor of the same shape that nobody else writes to.
    """
    if value.numel() <= LIMIT and not ghost.is_inference() and unwrapped(ghost) is ghost:
        ghost._tcache_value = (value.detach(), _age(ghost))


def known(ghost: Any) -> Any:
    """Return the values of a ghost as a CPU tensor, None when they are not known."""
    kept = getattr(ghost, "_tcache_value", None)
    if kept is None or ghost.is_inference() or _age(ghost) != kept[1]:
        return None
    return kept[0]


_launches: dict[int, int] = {}
"""Storage -> kernels that may have written to it. torch's own counter would make autograd refuse a backward pass."""


def _age(ghost: Any) -> tuple[int, int]:
    return ghost._version, _launches.get(ghost.untyped_storage()._cdata, 0)


def forget(value: Any) -> None:
    """Note that a kernel may have written to every tensor in ``value``."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()._cdata
        _launches[storage] = _launches.get(storage, 0) + 1
    elif isinstance(value, (tuple, list)):
        for item in value:
            forget(item)
    elif isinstance(value, dict):
        forget(list(value.values()))
    elif hasattr(value, "base") and isinstance(value.base, torch.Tensor):  # a tensor descriptor
        forget(value.base)


_SYMPTOMS = (
    "cannot be called on meta tensors",
    "Cannot copy out of meta tensor",
    "raises unimplemented by default",  # nonzero, and boolean masks through it
    "data-dependent",
    "repeat_interleave a meta tensor without",
    "_local_scalar_dense",
    "Can't call numpy() on",
    "boolean value of Tensor with",
)
_NAMES = (
    "nonzero", "unique", "masked_select", "is_nonzero", "equal", "allclose", "bincount", "repeat_interleave",
    "histc", "histogram", "tolist", "numpy",
)  # fmt: skip


def reads_values(error: BaseException, name: str) -> bool:
    """Return whether an operation on meta tensors failed because it needs values."""
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return True
    text = str(error)
    return any(symptom in text for symptom in _SYMPTOMS) or (
        isinstance(error, NotImplementedError) and any(part in name for part in _NAMES)
    )
