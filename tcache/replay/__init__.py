"""One manifest case -> the launches it makes."""

from tcache.replay.launches import Launch, launches, run_case
from tcache.replay.machine import machine
from tcache.replay.ref import KernelRef, load

__all__ = ["KernelRef", "Launch", "launches", "load", "machine", "run_case"]
