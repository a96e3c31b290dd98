"""A stub driver: what Triton asks a GPU while it binds, keys and compiles a launch, answered without one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as _driver

from tcache.errors import TcacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NullDriver", "StubDriver", "current_device", "current_properties", "current_target", "stub"]

_devices: dict[tuple[str, int | str, int], int] = {}


class _Utils:
    """Stands for ``driver.active.utils``: device properties only; loading a binary needs a GPU."""

    def __init__(self, properties: dict[str, int]) -> None:
        self._properties = properties

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return dict(self._properties)

    def load_binary(self, name: str, *_: Any) -> Any:
        raise TcacheError(f"kernel {name} cannot be loaded: there is no GPU, only tcache's stub driver")


class StubDriver(DriverBase):  # type: ignore[misc]  # upstream is untyped
    """Answers for a GPU that is not there.

    Args:
        backend: ``cuda`` or ``hip``.
        arch: compute capability as an integer (90) or an AMD architecture name (``gfx942``).
        warp_size: threads per warp.
        properties: what ``get_device_properties`` shall answer, in Triton's names and units
            (``max_shared_mem`` in bytes, ``multiprocessor_count``, ``warpSize``, …).
    """

    def __init__(self, backend: str, arch: int | str, warp_size: int, properties: dict[str, int] | None = None) -> None:
        super().__init__()
        self.target = GPUTarget(backend, arch, warp_size)
        self.utils = _Utils(properties or {})
        # JITFunction keeps its binder, and with it the target, per device number: one number per target.
        self._device = _devices.setdefault((backend, arch, warp_size), len(_devices))

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        """Accept any device: there is one GPU here, and it is not there."""

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_device_capability(self, _device: int | None = None) -> tuple[int, int]:
        arch = self.target.arch
        return divmod(arch, 10) if isinstance(arch, int) else (int(arch[3:-2], 16), int(arch[-2], 16))

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Any:
        raise TcacheError(
            "nothing can be benchmarked: there is no GPU, only tcache's stub driver", "run `tcache tune` on a GPU"
        )

    get_empty_cache_for_benchmark = get_benchmarker  # what triton.testing.do_bench asks for

    def launcher_cls(self, src: Any, _metadata: Any) -> Any:
        raise TcacheError(f"kernel {src.name} cannot be launched: there is no GPU, only tcache's stub driver")


class _NullUtils(_Utils):
    """Loads any binary as nothing: no module, so that nothing is unloaded when the kernel goes."""

    def load_binary(self, _name: str, *_: Any) -> Any:
        return None, 0, 0, 0, 1024  # module, function, registers, spills, threads per block

    def unload_module(self, module: Any) -> None:
        """Unload nothing."""


class NullDriver(StubDriver):
    """A stub driver on which every launch succeeds and does nothing, so that a launch can be followed to its end."""

    def __init__(self, backend: str, arch: int | str, warp_size: int, properties: dict[str, int] | None = None) -> None:
        super().__init__(backend, arch, warp_size, properties)
        self.utils = _NullUtils(properties or {})

    def launcher_cls(self, src: Any, _metadata: Any) -> Any:
        """Return what takes the place of the C launcher."""
        return lambda *_: None


@contextlib.contextmanager
def stub(
    backend: str, arch: int | str, warp_size: int, properties: dict[str, int] | None = None, *, launches: bool = False
) -> Iterator[StubDriver]:
    """Make a :class:`StubDriver` (a :class:`NullDriver` if ``launches``) Triton's active driver inside the block."""
    previous = _driver._active
    current = (NullDriver if launches else StubDriver)(backend, arch, warp_size, properties)
    _driver.set_active(current)
    try:
        yield current
    finally:
        _driver._active = previous


def current_target() -> tuple[str, int | str, int]:
    """Return ``(backend, arch, warp_size)`` of the active driver's current device.

    Raises:
        RuntimeError: there is no driver (upstream's own message).
    """
    target = _driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def current_device() -> int:
    """Return the number of the active driver's current device, -1 where there is no driver."""
    try:
        return _driver.active.get_current_device()  # type: ignore[no-any-return]
    except RuntimeError:
        return -1


def current_properties() -> dict[str, int]:
    """Return the active driver's properties of the current device, in Triton's names and units."""
    active = _driver.active
    return dict(active.utils.get_device_properties(active.get_current_device()))
