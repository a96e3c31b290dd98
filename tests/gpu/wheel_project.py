"""Wheels of two bundles and of tcache, the clean environment they are installed into, and what must come of it.

On a machine without a GPU, with the Python and the Triton of the service::

    python tests/gpu/wheel_project.py OUT

compiles and packs ``shape_manifests/quickstart.yaml`` and the project of the contract tests (stock kernels, one of them
with a helper), and downloads what tcache depends on, torch and Triton apart.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
import bundle_project

ROOT = Path(__file__).parents[2]
SERVICE = Path(__file__).with_name("wheel_service.py")
OURS = ("triton-tcache", "tcache-bundle-quickstart", "tcache-bundle-loadables")
APART = ("torch", "triton", "tomli")


def build(out, root=ROOT, *, dependencies=True):
    """Write the wheels to ``out``: tcache's, those of both bundles, and of what tcache depends on."""
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for old in out.glob("*tcache*.whl"):  # pip would choose among several
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        pip("wheel", "--no-deps", "--wheel-dir", out, ROOT)
        bundle_project.run(
            root, "pack", "shape_manifests/quickstart.yaml", "--warmup", "--format", "wheel", "--name", "quickstart",
            "-o", out, "--force", TRITON_CACHE_DIR=os.environ.get("TRITON_CACHE_DIR", str(Path(scratch, "cache"))),
        )  # fmt: skip
        loadables = Path(scratch, "loadables")
        loadables.mkdir()
        bundle_project.make(loadables)
        bundle_project.run(
            loadables, "pack", "m.yaml", "--store", "store", "--format", "wheel", "--name", "loadables", "-o", out,
            "--force",
        )  # fmt: skip
    if dependencies:
        pip("download", "--only-binary", ":all:", "--dest", out, *wanted())
    return sorted(out.glob("*.whl"))


def wanted():
    """Return what tcache's project file asks for, but what comes with the machine."""
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    found = [row for row in re.findall(r'^  "([^";]+)', block, re.MULTILINE) if not row.startswith(APART)]
    assert len(found) >= 5, found
    return found


def pip(*args):
    """Run pip, which shall not take what lies on this process's own path for installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, args)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, f"pip {args}:\n{done.stdout}\n{done.stderr}"


def install(wheels, place):
    """Make a clean environment and install everything from wheels, with no index; return its Python.

    torch and Triton are this machine's own. The environment's requirements, ``triton == X.Y.Z`` among them, are
    resolved by pip.
    """
    venv = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(venv)], check=True)
    (library,) = venv.glob("lib/python*/site-packages")
    outer = {str(Path(importlib.metadata.distribution(name).locate_file(""))) for name in ("torch", "triton")}
    (library / "machine.pth").write_text("\n".join(sorted(outer)) + "\n")
    python = venv / "bin" / "python"
    common = ["--python", python, "install", "--no-index", "--find-links", wheels]
    pip(*common, "--no-deps", "--ignore-installed", *OURS)
    pip(*common, *OURS)
    return python


def _anybodys(python):
    """Return whether another user may run this Python: read-only means nothing to root."""
    return all(parent.stat().st_mode & 0o001 for parent in Path(os.path.realpath(python)).parents)


def serve(python, root, device, place, **variables):
    """Run the service with nothing to compile with and nowhere to write; return its report."""
    home, own = place / "home", place / "service"
    own.mkdir(exist_ok=True)
    shutil.copy(SERVICE, own)
    (own / "loadables.py").write_text(bundle_project.KERNELS)
    for folder in (place, own):
        folder.chmod(0o755)
    home.mkdir(exist_ok=True)
    home.chmod(0o555)
    environment = {
        "HOME": str(home), "PATH": "/nonexistent", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        "TCACHE_MODE": "frozen", "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager",
        "TCACHE_TEST_DEVICE": device, "TCACHE_TEST_ROOT": str(root), "TCACHE_TEST_LOADABLES": str(own), **variables,
    }  # fmt: skip
    if device == "null":
        environment["TCACHE_GPU_NAME"] = "NVIDIA H200"
    done = subprocess.run(
        [str(python), str(own / SERVICE.name)], env=environment, capture_output=True, text=True, check=False, cwd="/",
        **({"user": 65534, "group": 65534} if os.getuid() == 0 and _anybodys(python) else {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EXPECTED = {
    "unaligned pointer, tuned kernel": (["alignment"], "alignment x_ptr: not divisible by 16"),
    "unaligned pointer, stock kernel": (["alignment"], "alignment x_ptr: not divisible by 16"),
    "unseen shape, tuned kernel": (["untuned"], "shape key: M=64 N=4096 K=4096"),
    "unseen shape, stock kernel": (["divisibility"], "divisibility n: not divisible by 16"),
    "edited source, tuned kernel": (["stale"], "reason: stale"),
    "edited source, stock kernel": (["source"], "was edited after packing"),
    "edited helper": (["source"], "or something it calls or reads, was edited after packing"),
    "moved down, stock kernel": (["line"], "line: the kernel starts at line 16, packed at line 14"),
    "variable set late, stock kernel": (["variable"], "variable NVPTX_ENABLE_DUMP: "),
    "variable set late, tuned kernel": (["variable"], "variable NVPTX_ENABLE_DUMP: "),
    "variable of the process, stock kernel": (["kernel", "variable"], "skipped bundle "),
    "variable of the process, tuned kernel": (["untuned", "variable"], "skipped bundle "),
}
"""What is not packed -> the reasons of its miss, and a part of its message."""

HITS = ["moved down, tuned kernel", "moved down, tuned kernel of the manifest", "unedited, stock kernel"]


def check_outcomes(outcomes):
    """Assert that every launch that was not packed missed for its reason, and that the others hit."""
    assert set(outcomes) == {*EXPECTED, *HITS}
    for name, (wanted, text) in EXPECTED.items():
        # on a GPU the driver's own helper is asked for first, and is the first thing that is missing
        asked = "native helper" in outcomes[name]["message"]
        reasons = ["helper", *wanted[1:]] if asked and "variable" in wanted else wanted
        assert outcomes[name]["reasons"] == reasons, (name, outcomes[name])
        assert text in outcomes[name]["message"], (name, outcomes[name])
    for name in HITS:
        assert outcomes[name]["reasons"] == [], (name, outcomes[name])
        assert outcomes[name]["prebaked"] == ("tuned" in name), (name, outcomes[name])


if __name__ == "__main__":
    for wheel in build(sys.argv[1]):
        print(wheel)
