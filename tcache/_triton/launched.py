"""What a wrapper really launches: the compiled kernels, their resources, and the configs that autotuners chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import KernelInterface

from tcache._triton.kernels import jit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Launched", "launched_kernels"]


@dataclass(frozen=True)
class Launched:
    """One launch that was made.

    Attributes:
        kernel: the object that was launched, with its decorators.
        grid, args, kwargs: what it was launched with.
        made: Triton's ``CompiledKernel``; None under the interpreter.
    """

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any

    @property
    def tuner(self) -> Any:
        """The outermost autotuner; None without one."""
        found = self.kernel
        while isinstance(found, Heuristics):
            found = found.fn
        return found if isinstance(found, Autotuner) else None

    def facts(self) -> dict[str, Any]:
        """Describe the compiled kernel; every figure is None where nothing was compiled.

        Returns:
            ``kernel``: the function's name; ``registers`` per thread; ``spills``: local memory in 32-bit words per
            thread, which is registers spilled and arrays indexed at run time; ``shared``: bytes per block; ``warps``;
            ``stages``. Source: ``load_binary`` in ``third_party/nvidia/backend/driver.c``, and the kernel's metadata.
        """
        metadata = getattr(self.made, "metadata", None)
        return {
            "kernel": jit_of(self.kernel).fn.__name__,
            "registers": getattr(self.made, "n_regs", None),
            "spills": getattr(self.made, "n_spills", None),
            "shared": getattr(metadata, "shared", None),
            "warps": getattr(metadata, "num_warps", None),
            "stages": getattr(metadata, "num_stages", None),
        }


class launched_kernels:  # noqa: N801 - reads as a context manager
    """Note every ``kernel[grid](...)`` inside the block, after it was launched.

    Only tools use this, in their own process; a service never does.

    Attributes:
        found: the launches, in order. They hold their arguments: let go of them soon.
    """

    def __init__(self) -> None:
        self.found: list[Launched] = []
        self._inside = False

    def __enter__(self) -> launched_kernels:  # noqa: PYI034 - typing.Self is newer than 3.10
        self._originals = [(cls, vars(cls)["__getitem__"]) for cls in _family(KernelInterface)]
        for cls, original in self._originals:
            cls.__getitem__ = self._noting(original)
        return self

    def __exit__(self, *_: object) -> None:
        for cls, original in self._originals:
            cls.__getitem__ = original

    def _noting(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def getitem(kernel: Any, grid: Any) -> Any:
            launch = original(kernel, grid)

            def call(*args: Any, **kwargs: Any) -> Any:
                if self._inside:  # a subclass's own __getitem__ that asks its parent's
                    return launch(*args, **kwargs)
                self._inside = True
                try:
                    made = launch(*args, **kwargs)
                finally:
                    self._inside = False
                self.found.append(Launched(kernel, grid, args, kwargs, made))
                return made

            return call

        return getitem


def _family(cls: type) -> Iterator[Any]:
    """Yield a class and those below it that have a ``__getitem__`` of their own."""
    seen = set()
    waiting = [cls]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if "__getitem__" in vars(each):
            yield each
        waiting += each.__subclasses__()
