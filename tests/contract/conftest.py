"""Fixtures of the conformance scenarios, see ``recording.py``."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import triton
from triton.runtime import driver as runtime_driver

from tcache._triton.cache import set_cache_directory

sys.path.insert(0, str(Path(__file__).parent))
from recording import KERNELS, Both, adopted, ours


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The Triton cache of the session's scenarios: what a kernel compiles to is not what they are about."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def own_driver():
    """Put Triton's driver back when a module's scenarios are done."""
    before = runtime_driver._active
    yield
    for kernel in KERNELS:
        kernel.device_caches.clear()
    gc.collect()  # since 3.8 a kernel unloads its module when it goes: a null driver must still be there
    runtime_driver._active = before


@pytest.fixture(params=[ours, adopted])
def both(request, own_driver, compiled, monkeypatch, tmp_path):
    """Scenarios under upstream's decorator and one of tcache's, with a store of the test's own."""
    monkeypatch.setenv("TCACHE_GPU_NAME", "NVIDIA H200")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    set_cache_directory(str(compiled))
    yield Both(request.param, tmp_path / "store")
    del triton.knobs.cache.dir
