"""A stock kernel under the overlay: its first launch reads no libtriton and starts no process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project

SERVICE = """
import builtins, hashlib, json, subprocess, sys, time
sys.path.insert(0, sys.argv[2])
import null_driver, torch, triton
import triton.backends.nvidia.compiler
null = null_driver.activate()
processes = []
for name in ("run", "Popen", "check_output"):
    def noted(*args, real=getattr(subprocess, name), **kwargs):
        processes.append(str(args[0]))
        return real(*args, **kwargs)
    setattr(subprocess, name, noted)
read = []
real_open = builtins.open
def opened(path, *args, **kwargs):
    if "libtriton" in str(path):
        read.append(str(path))
    return real_open(path, *args, **kwargs)
import triton.runtime.cache
triton.runtime.cache.open = opened
import bundle_project
from pathlib import Path
import tcache
if sys.argv[3] == "activate":
    tcache.activate([sys.argv[1] + "/bundle"])
triton.runtime.cache.get_cache_manager("0" * 64)  # as a real driver does for its own helper
module = bundle_project.load(Path(sys.argv[1]))
x = torch.zeros(64)
try:
    module.scale[(1,)](x, x, 4096, BLOCK=64)
    missed = None
except tcache.CacheMiss as miss:
    missed = list(miss.reasons)
print(json.dumps({"read": len(read), "processes": len(processes), "launches": len(null.launches), "missed": missed}))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return bundle_project.make(tmp_path_factory.mktemp("spared"))


@pytest.fixture(params=["activate", "environment"])
def serve(request, packed, tmp_path):
    def run(**more):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TCACHE_MODE": "frozen", **more}
        if request.param == "environment":
            environment |= {
                "TCACHE_BUNDLES": str(packed / "bundle"),
                "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager",
            }
        here = str(Path(__file__).parent)
        command = [sys.executable, "-c", SERVICE, str(packed), here, request.param]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_nothing_is_computed_that_the_bundle_knows(serve):
    assert serve() == {"read": 0, "processes": 0, "launches": 1, "missed": None}


def test_another_build_of_the_release_computes_its_own(serve, packed):
    path = packed / "bundle" / "bundle.json"
    before = path.read_text()

    def foreign(head):
        head["environment"]["distribution"] = "0" * 64
        head["environment"]["computed"] = {"triton_key": "another", "ptxas 90": "another"}

    try:
        bundle_project.edit(path, foreign)
        found = serve()
    finally:
        path.write_text(before)
    # the name Triton computes from its own files is found all the same: these are the files it was packed with
    assert found["read"] == 1
    assert found["processes"] >= 1
    assert found["missed"] is None


def test_a_bundle_of_before_computes_as_ever(serve, packed):
    path = packed / "bundle" / "bundle.json"
    before = path.read_text()
    try:
        bundle_project.edit(path, lambda head: head["environment"].pop("computed"))
        found = serve()
    finally:
        path.write_text(before)
    assert (found["read"], found["missed"]) == (1, None)
