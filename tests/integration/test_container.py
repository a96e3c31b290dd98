"""The Dockerfile built for real, without a Docker engine, and its image run as the strictest cluster would run it:
a read-only root, a user id that no passwd file knows, HOME unset, and no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UID = "12345"
PORT = 18765
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
COMPILERS = ("gcc", "cc", "c++", "g++", "clang", "tcc", "ld", "as")

pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

# chroot isolation cannot make a root read-only; a mount namespace of its own can
ENTER = """
set -e
mount --bind "$1" "$2"
mount -o remount,ro,bind "$2"
mount -t proc proc "$2/proc"
mount --rbind /dev "$2/dev"
exec chroot --userspec="$3:$3" "$2" sh -c 'cd /app && exec "$@"' sh "${@:4}"
"""


def run(*command, **more):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def tools():
    missing = [name for name in ("mmdebstrap", "buildah") if not shutil.which(name)]
    if not Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists():  # not Debian
        missing.append("debian-archive-keyring")
    if missing:
        for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", *missing]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{' '.join(command)}: {(done.stderr.splitlines() or ['failed'])[-1]}")


def pip_settings(folder):
    """Return mounts that give pip inside what it has outside: where to find a CPU-only torch above all."""
    wanted = {"disable-pip-version-check": "true", "cert": CERTIFICATES}
    mounts = []
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        name, value = name.rpartition(".")[2], value.strip("'\"")
        if name == "find-links" and Path(value).is_dir():
            wanted["find-links"] = value
            mounts += ["-v", f"{value}:{value}:ro"]
        elif name == "index-url":
            wanted[name] = value
    if not any(Path(wanted.get("find-links", "/nonexistent")).glob("torch-*+cpu-*")):
        wanted["extra-index-url"] = "https://download.pytorch.org/whl/cpu"
    settings = folder / "pip.conf"
    settings.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in wanted.items()))
    certificates = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if certificates and Path(certificates).exists():
        mounts += ["-v", f"{Path(certificates).resolve()}:{CERTIFICATES}:ro"]
    return [*mounts, "-v", f"{settings}:/etc/pip.conf:ro"]


class Image:
    """The runtime image, unpacked."""

    def __init__(self, folder, root, config):
        self.root = Path(root)
        self._enter = folder / "enter.sh"
        self._enter.write_text(ENTER)
        self._mount = folder / "mnt"
        self._mount.mkdir()
        self.command = config["Cmd"]
        self._environment = dict(row.split("=", 1) for row in config["Env"])
        assert "HOME" not in self._environment

    def arguments(self, *command):
        return ["unshare", "--mount", "bash", self._enter, self.root, self._mount, UID, *command]

    def environment(self, **more):
        # the outer PATH finds mount and chroot; the image's follows
        return {**self._environment, "PATH": f"{self._environment['PATH']}:/usr/sbin:/usr/bin:/sbin:/bin", **more}

    def run(self, *command):
        return subprocess.run(
            self.arguments(*command), env=self.environment(), capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    tools()
    folder = tmp_path_factory.mktemp("container")
    buildah = ["buildah", "--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "vfs"]
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
    base = folder / "base"
    base.mkdir()
    (base / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", base / "rootfs.tar")
    build = [*buildah, "bud", "--format", "docker", "--layers=false"]
    try:
        run(*build, "-t", "localhost/base:py", base, env=environment)
        (base / "rootfs.tar").unlink()
        options = [*pip_settings(folder), "--pull-never", "--build-arg", "PYTHON=localhost/base:py"]
        run(*build, *options, "-t", "localhost/service", ROOT, env=environment)
        container = run(*buildah, "from", "--pull-never", "localhost/service", env=environment).strip()
        config = json.loads(run(*buildah, "inspect", container, env=environment))["Docker"]["config"]
        yield Image(folder, run(*buildah, "mount", container, env=environment).strip(), config)
    finally:
        for command in (["umount", "--all"], ["rm", "--all"], ["rmi", "--all", "--force"]):
            subprocess.run([*map(str, buildah), *command], env=environment, capture_output=True, check=False)


def test_nothing_in_the_image_can_compile(image):
    found = [
        str(path)
        for folder in ("usr/bin", "usr/local/bin", "bin", "opt/venv/bin", "usr/sbin")
        for name in COMPILERS
        if (path := image.root / folder / name).exists()
    ]
    assert found == []
    assert list(image.root.glob("usr/**/Python.h")) == []


def test_the_user_is_nobody_and_may_write_nothing(image):
    code = """
import os, pwd, tcache
print(os.getuid(), os.environ.get("HOME"))
try:
    pwd.getpwuid(os.getuid())
except KeyError:
    print("unknown")
"""
    done = image.run("python3", "-c", code)
    assert done.stdout.split() == [UID, "None", "unknown"], done.stderr
    for place in ("/tmp/x", "/app/x", "/opt/tcache/bundle/x", "/x"):
        assert "Read-only file system" in image.run("touch", place).stderr


@pytest.mark.parametrize("scratch", ["/dev/shm", ""])
def test_every_launch_of_the_bundle_is_proven_in_the_image(image, scratch):
    done = image.run("env", f"TMPDIR={scratch}", "tcache", "verify", "/opt/tcache/bundle", "--root", "/app", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["proven"]
    assert found["launches"] == found["hits"] == 52
    assert found["problems"] == found["unreplayed"] == found["unindexed"] == []


def ask(path, data=None):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", data, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def wait(wanted, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if wanted():
                return
        time.sleep(0.2)
    raise AssertionError("timed out")


def test_the_service_is_alive_and_says_why_it_is_not_ready(image, tmp_path):
    environment = image.environment(PORT=str(PORT), HOST="127.0.0.1")
    with open(tmp_path / "log", "w+") as log:
        service = subprocess.Popen(image.arguments(*image.command), env=environment, stdout=log, stderr=log)
        try:
            wait(lambda: ask("/live")[0] == 200)
            wait(lambda: "loading" not in str(ask("/ready")))
            assert ask("/live") == (200, {"alive": True})
            assert ask("/ready") == (503, {"ready": False, "reason": "not ready: no GPU"})
            assert ask("/stats")[1]["misses"] == 0
            assert ask("/axpy", b'{"a": 2, "x": [1], "y": [1]}') == (503, {"error": "not ready: no GPU"})
            assert service.poll() is None
        finally:
            service.terminate()
            service.wait(30)
        log.seek(0)
        text = log.read()
    assert "tcache: mode frozen, 1 bundles (quickstart), 25 entries" in text
    assert "Traceback" not in text
