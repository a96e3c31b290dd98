"""One manifest case -> the launches it makes."""

from tcache.replay.launches import Launch, launches, run_case
from tcache.replay.machine import leave, machine
from tcache.replay.ref import KernelRef, load

__all__ = ["KernelRef", "Launch", "launches", "leave", "load", "machine", "run_case"]
