"""What upstream's ``Autotuner`` keeps once and a service needs apart: per thread, and per device.

Upstream stores the arguments of the launch under way and the winners of this process as attributes of the autotuner.
Two threads that launch one kernel then read each other's arguments, and a second GPU is given the first one's winner.
These descriptors stand for the two attributes, so that upstream's own ``run`` is used unchanged.
"""

from __future__ import annotations

import threading
from typing import Any

from tcache._triton.driver import current_device
from tcache._triton.launcher import Winners

__all__ = ["PerDevice", "PerThread"]


class PerThread:
    """An attribute with a value for each thread, None in a thread that has set none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}_by_thread"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return instance.__dict__.get(self._name, {}).get(threading.get_ident())

    def __set__(self, instance: Any, value: Any) -> None:
        values = instance.__dict__.setdefault(self._name, {})
        if value is None:
            values.pop(threading.get_ident(), None)
        else:
            values[threading.get_ident()] = value


class PerDevice:
    """Winners for each device number, chosen by the current device when they are read.

    Setting it asks for no device, since upstream sets it where a kernel is decorated and CUDA must stay untouched: what
    was set belongs to the device that is current when it is first read.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._plain = name
        self._name = f"_{name}_by_device"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        fields = instance.__dict__
        by_device = fields.get(self._name)
        if by_device is None:
            by_device = fields.setdefault(self._name, {})
        device = current_device()
        found = by_device.get(device)
        if found is None:
            plain = fields.pop(self._plain, None)  # maybe empty, and still of a class that somebody chose
            if plain is None:  # another device's: recording watches all of them
                fresh = next((known.fresh for known in list(by_device.values()) if hasattr(known, "fresh")), dict)
                plain = fresh()
            found = by_device.setdefault(device, plain)
        if type(found) is dict:  # upstream's, a user's, or a copy's
            found = by_device[device] = Winners(found)
        return found

    def __set__(self, instance: Any, value: dict[Any, Any]) -> None:
        instance.__dict__[self._plain] = value
        instance.__dict__[self._name] = {}
        launcher = instance.__dict__.get("_launcher")
        if launcher is not None:
            launcher.forget()
