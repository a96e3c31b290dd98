"""The machine that is measured: its clock, its memory, its versions."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Protocol

from tcache import __version__
from tcache._triton import release
from tcache._triton.bench import is_faulted
from tcache.bench.timing import CudaClock
from tcache.errors import GPUMissing

if TYPE_CHECKING:
    from tcache.bench.timing import Clock

__all__ = ["Gpu", "Machine", "leave_if_faulted"]


class Machine(Protocol):
    """What a bench needs of a machine.

    Attributes:
        device: torch's name of where tensors are made.
        name: of the GPU, as cases and stores know it.
        clock: times calls.
        shrink: divides the sizes of what peaks are measured with.
    """

    device: str
    name: str
    shrink: int

    @property
    def clock(self) -> Clock: ...

    def facts(self) -> dict[str, Any]:
        """Describe machine and versions."""

    def free_bytes(self) -> int:
        """Return how much memory is free on the device."""

    def release_memory(self) -> None:
        """Give back what torch keeps for later tensors: the next case's are of other sizes."""

    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    def is_faulted(self) -> bool:
        """Return whether the device cannot be used any more in this process."""


class Gpu:
    """The current GPU.

    Raises:
        GPUMissing: there is none.
    """

    device = "cuda"
    shrink = 1

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise GPUMissing("no GPU here: bench times kernels on one", "run it on the GPU that the service runs on")
        from tcache.lookup import current_gpu

        self._properties = torch.cuda.get_device_properties()
        self.name = current_gpu().name
        self.clock = CudaClock(int(getattr(self._properties, "L2_cache_size", 0) or 0))

    def facts(self) -> dict[str, Any]:
        """Return GPU, driver and versions; no name of a host, no path."""
        import torch

        return {
            "gpu": self.name,
            "multiprocessors": self._properties.multi_processor_count,
            "memory": self._properties.total_memory,
            "l2_cache": getattr(self._properties, "L2_cache_size", None),
            "driver": _driver_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "triton": release,
            "tcache": __version__,
        }

    def free_bytes(self) -> int:
        import torch

        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def release_memory(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def is_faulted(self) -> bool:
        return is_faulted()


def leave_if_faulted(machine: Machine, code: int) -> None:
    """End this process at once if its GPU is beyond use: tearing the context down would abort it, with another code."""
    if machine.is_faulted():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
