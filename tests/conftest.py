"""Shared fixtures, and the one table that says which marker needs what."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "contract"))  # null_driver, bundle_project
QUICKSTART = ROOT / "shape_manifests" / "quickstart.yaml"

with contextlib.suppress(ImportError):  # a GPU machine may have pytest alone
    from hypothesis import settings

    # the same examples in every run, so that a change fails for what it changed; ``explore`` looks for new ones
    settings.register_profile("explore", print_blob=True)
    settings.register_profile("same", derandomize=True)
    settings.load_profile("same")


@functools.cache
def gpu_present() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@functools.cache
def image_builder():
    """Whether images can be built: as root that may mount, with the tools or with apt-get to install them."""
    if os.getuid() != 0 or os.environ.get("TCACHE_TEST_OFFLINE") or not shutil.which("unshare"):
        return False
    tools = all(shutil.which(name) for name in ("mmdebstrap", "buildah")) or shutil.which("apt-get")
    return (
        bool(tools) and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
    )


def missing_tools() -> list[str]:
    tools = ("umoci", "skopeo", "buildah", "docker-registry")
    return [name for name in tools if not shutil.which(name)] or ([] if os.geteuid() == 0 else ["root"])


NEEDS = {
    "container": (
        image_builder,
        "needs root that may mount, mmdebstrap and buildah or apt-get, and TCACHE_TEST_OFFLINE unset",
    ),
    "gpu": (gpu_present, "needs an NVIDIA GPU"),
    "images": (
        lambda: not missing_tools(),
        "needs umoci, skopeo, buildah and docker-registry (apt-get install), and root",
    ),
    "compat": (lambda: not os.environ.get("TCACHE_TEST_OFFLINE"), "TCACHE_TEST_OFFLINE is set"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, (present, reason) in NEEDS.items():
            if item.get_closest_marker(marker) and not present():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    """No setting, store or cache of the developer reaches a test, and no test's settings reach another."""
    for name in list(os.environ):
        if name.startswith("TCACHE_") and not name.startswith("TCACHE_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    active = sys.modules.get("tcache.active")
    if active is not None:
        monkeypatch.setattr(active, "_active", None)


@pytest.fixture
def triton_cache(monkeypatch, tmp_path):
    """An empty Triton cache of this test."""
    from tcache._triton.cache import set_cache_directory

    before = os.environ.get("TRITON_CACHE_DIR")
    folder = tmp_path / "triton-cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    set_cache_directory(str(folder))
    yield folder
    from triton import knobs

    if before is None:
        del knobs.cache.dir
    else:
        set_cache_directory(before)


@pytest.fixture
def kernel_file(tmp_path):
    """Write a kernel file and return its path: ``kernel_file("k.py", text)``."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def tcache(tmp_path):
    """Run the command line in a process of its own: ``tcache("warmup", "m.yaml", cwd=…, env={…})``."""

    def run(*args, cwd=ROOT, env=None, check=None):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
        environment |= {
            "TRITON_CACHE_DIR": str(tmp_path / "triton-cache"),
            "HOME": str(tmp_path / "home"),
            **(env or {}),
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "tcache", *map(str, args)]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        if check is not None:
            assert done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


# what loads bundles; a file's own fixtures of the same names come first


@pytest.fixture(scope="session")
def packed_project(tmp_path_factory):
    """A project and its bundle (``contract/bundle_project.py``), for tests that change nothing."""
    import bundle_project

    return bundle_project.make(tmp_path_factory.mktemp("packed-project"))


@pytest.fixture
def project(packed_project, tmp_path):
    """A copy that a test may damage; its Triton cache is gone."""
    root = tmp_path / "copy"
    shutil.copytree(packed_project, root, ignore=shutil.ignore_patterns("cache", "__pycache__"))
    return root


@pytest.fixture
def null_gpu(monkeypatch, triton_cache):
    """A driver that compiles for real and launches nothing, under the name of the GPU the project is packed for."""
    import bundle_project
    import null_driver
    from triton.runtime import driver

    monkeypatch.setenv("TCACHE_GPU_NAME", "NVIDIA H200")
    before = driver._active
    yield null_driver.activate()
    sys.modules.pop(bundle_project.NAME, None)
    gc.collect()  # since 3.8 a kernel unloads its module when it goes: the driver must still be there
    driver._active = before
