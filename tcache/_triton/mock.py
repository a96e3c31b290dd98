"""Pointer arguments without memory, for launches that are spelled out and need no torch."""

from __future__ import annotations

__all__ = ["MockDType", "MockTensor"]


class MockDType:
    """Answers like a ``torch.dtype`` of that name as far as Triton's binder and descriptors look: its ``str``, its size
    in bytes, and whether it is a float's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def itemsize(self) -> int:
        return (
            1
            if self.name == "bool" or self.name.startswith("float8")
            else int(self.name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
        )

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class MockTensor:
    """A tensor argument: dtype and address are what the binder sees; shape and stride serve heuristics.

    Args:
        dtype: torch's name of the element type, such as ``bfloat16``.
        shape: sizes in elements.
        stride: strides in elements.
        address: what ``data_ptr()`` answers, in bytes; only its divisibility by 16 matters.
        storage: what ``ptr_range()`` answers, in bytes: AMD's backend asks whether it is more than 2 GiB.
    """

    is_cuda = True

    def __init__(
        self, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], address: int = 0, storage: int = 0
    ) -> None:
        self.dtype = MockDType(dtype)
        self.shape = shape
        self._stride = stride
        self._address = address
        self._storage = storage

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return self._storage

    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        return self._stride if dim is None else self._stride[dim]

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dim(self) -> int:
        return len(self.shape)
