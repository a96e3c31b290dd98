"""A driver that compiles for real and launches nothing: what CPU tests of the autotuner run on."""

from __future__ import annotations

from triton.runtime import driver

from tcache._triton.driver import StubDriver


class NullUtils:
    def __init__(self, launches):
        self.launches = launches

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name, *_):
        return object(), name, 32, 0, 1024

    def unload_module(self, module):
        pass

    def launch(self, *args):
        pass


class NullDriver(StubDriver):
    def __init__(self):
        super().__init__("cuda", 90, 32)
        self.launches = []
        self.utils = NullUtils(self.launches)

    def launcher_cls(self, source, metadata):
        return lambda *_: self.launches.append((source.name, source.constants))


def activate():
    """Return a null driver that is now Triton's active driver."""
    null = NullDriver()
    driver.set_active(null)
    return null
