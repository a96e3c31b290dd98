"""A stock kernel under the overlay: its first launch reads no libtriton and starts no process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton

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


@pytest.fixture
def tampered(packed, tmp_path):
    """A copy of the bundle whose recorded values were edited."""

    def make(**computed):
        root = tmp_path / f"tampered-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(packed / "bundle", root)
        bundle_project.edit(root / "bundle.json", lambda head: head["environment"]["computed"].update(computed))
        return str(root)

    return make


LOOKUP = """
import sys
import tcache
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime.cache import triton_key
before = triton_key(), get_ptxas_version(90)
tcache.activate(sys.argv[1:], mode="lookup")
import triton.backends.nvidia.compiler as compiler, triton.runtime.cache as cache
print((cache.triton_key(), compiler.get_ptxas_version(90)) == before)
"""


def asked(*bundles):
    done = subprocess.run([sys.executable, "-c", LOOKUP, *bundles], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
    return done.stderr


def test_a_key_that_cannot_be_this_tritons_is_not_handed_over(packed, tampered):
    """In mode lookup Triton would write to its cache under it."""
    good, bad = str(packed / "bundle"), tampered(triton_key="3.7.1" + "0" * 64)
    for bundles in ((bad,), (bad, good), (good, bad)):
        assert f"{bad}: its 'triton_key' is not this Triton's and is computed: pack it again" in asked(*bundles)
    assert asked(good) == ""


def test_bundles_that_disagree_are_not_believed(packed, tampered):
    good, bad = str(packed / "bundle"), tampered(**{"ptxas 90": "another"})
    assert f"{bad}: its 'ptxas 90' is not" in asked(good, bad)
    asked(bad, good)


LATER = """
import os, sys
sys.path.insert(0, sys.argv[2])
import null_driver, torch
null_driver.activate()
import bundle_project, tcache
from pathlib import Path
tcache.activate([sys.argv[1] + "/bundle"], mode=sys.argv[3])
module = bundle_project.load(Path(sys.argv[1]))
if len(sys.argv) > 4:
    import tcache.prebaked
    tcache.prebaked.prebaked()._usable()
    os.environ["TRITON_LIBDEVICE_PATH"] = sys.argv[4]
module.tuned[(1,)](torch.zeros(16), 16)
print(tcache.stats()["prebaked"])
"""


def test_a_library_that_is_named_later_is_noticed(packed, tmp_path):
    """The index knows nothing of it: the launch goes Triton's way, whose key covers the file."""
    default = Path(triton.__file__).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc"
    other = tmp_path / "other.bc"
    shutil.copy(default, other)
    environment = {**os.environ, "TCACHE_GPU_NAME": "NVIDIA H200", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    here = str(Path(__file__).parent)
    for extra, prebaked in [((), "1"), ((str(other),), "0")]:
        command = [sys.executable, "-c", LATER, str(packed), here, "lookup", *extra]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == prebaked


def test_a_name_that_is_none_is_no_crash(tampered):
    assert "is not this Triton's" in asked(tampered(**{"ptxas \u00b2": "x", "ptxas " + "9" * 5000: "x"}))


def test_what_an_edited_triton_packs_does_not_pass_for_the_release(tmp_path):
    """Its kernels are found by the name Triton gives them, or not at all: never by the index of a clean one."""
    site = tmp_path / "site"
    for place in (Path(triton.__file__).parent, *Path(triton.__file__).parents[1].glob("triton-*.dist-info")):
        shutil.copytree(place, site / place.name, copy_function=os.symlink)
    path = site / "triton" / "compiler" / "code_generator.py"
    text = path.read_text()
    path.unlink()
    path.write_text(text + "# edited\n")
    project = tmp_path / "project"
    project.mkdir()
    bundle_project.make(project)
    here = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    bundle_project.run(
        project, "pack", "m.yaml", "-o", "edited", "--store", "store", "--warmup", PYTHONPATH=here,
        PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    clean, edited = (json.loads((project / name / "bundle.json").read_text()) for name in ("bundle", "edited"))
    assert clean["environment"]["distribution"]
    assert not edited["environment"]["distribution"]
    assert edited["environment"]["computed"] == {}
    names = [{file.split("/")[1] for file in head["files"] if file.startswith("entries/")} for head in (clean, edited)]
    assert not names[0] & names[1]
