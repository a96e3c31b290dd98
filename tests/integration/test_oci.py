"""Bundles as OCI images, in the hands of the tools that people use: umoci, skopeo, a registry, buildah.

Debian has them all; none needs a daemon: `apt-get install umoci skopeo buildah docker-registry`, as root.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from projects import batch, make_project

from tcache.layout import read_layout

MANIFEST = "shapes/plain.yaml"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("oci") / "project", gpus=())


@pytest.fixture(scope="module")
def packed(project, tmp_path_factory):
    """An image as a directory and as an archive, one on it as its base, and a directory to compare with."""
    out = tmp_path_factory.mktemp("images")

    def pack(output, *options):
        return ["pack", MANIFEST, "-o", output, "--name", "shop", "--json", *options]

    answers = batch(
        project,
        pack(out / "dir", "--warmup"),
        pack(out / "image", "--format", "oci"),
        pack(out / "image.tar", "--format", "oci"),
        pack(out / "mounted", "--format", "oci", "--mount-path", "/opt/triton/cache", "--tag", "v2"),
        pack(out / "native", "--format", "native", "--mount-path", "/opt/triton/cache"),
        pack(out / "onbase", "--format", "oci", "--base", out / "image.tar", "--include-ir", "ptx"),
    )
    return out, [json.loads(answer.ok()) for answer in answers]


def files(root):
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def members(layout, number=0):
    """Return the members of a layer."""
    layer = read_layout(layout).layers[number]
    with tarfile.open(layer.path) as archive:
        return {info.name: (info, archive.extractfile(info).read() if info.isreg() else b"") for info in archive}


def test_the_layer_is_what_mcv_gkm_and_kserve_read(packed):
    out, _answers = packed
    image = read_layout(out / "mounted")
    [layer] = image.layers
    assert layer.descriptor["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
    found = members(out / "mounted")
    assert all(info.isreg() or info.isdir() for info, _ in found.values())
    assert not [name for name in found if name.startswith(("./", "/"))]
    assert {(info.mtime, info.uid, info.gid, info.uname) for info, _ in found.values()} == {(0, 0, 0, "")}
    cache = {name: data for name, (info, data) in found.items() if name.startswith("io.triton.cache/") and info.isreg()}
    native = files(out / "native")
    assert {
        name.removeprefix("io.triton.cache/"): hashlib.sha256(data).hexdigest() for name, data in cache.items()
    } == (native)
    labels = image.labels
    assert json.loads(labels["cache.triton.image/summary"]) == {
        "targets": [{"backend": "cuda", "arch": "90", "warp_size": 32}]
    }
    assert labels["cache.triton.image/entry-count"] == "2"
    assert labels["cache.triton.image/cache-size-bytes"] == str(sum(map(len, cache.values())))
    assert [name for name in labels if "cache-size-bytes" in name] == ["cache.triton.image/cache-size-bytes"]
    rows = json.loads(found["io.triton.manifest/manifest.json"][1])["triton"]
    hashes = {json.loads(data)["hash"] for name, data in cache.items() if name.endswith("/plain.json")}
    assert {row["hash"] for row in rows} == hashes
    assert {(row["backend"], row["arch"], row["warp_size"]) for row in rows} == {("cuda", "90", 32)}
    groups = [json.loads(data) for name, data in cache.items() if "/__grp__" in name]
    assert len(groups) == 2
    assert all(path.startswith("/opt/triton/cache/") for group in groups for path in group["child_paths"].values())


def test_the_bundle_rides_along(packed):
    out, _ = packed
    place = "opt/tcache/shop/"
    found = {
        name.removeprefix(place): hashlib.sha256(data).hexdigest()
        for name, (info, data) in members(out / "image").items()
        if name.startswith(place) and info.isreg()
    }
    assert found == files(out / "dir")


def test_the_archive_is_the_directory(packed, tmp_path):
    out, (_, image, archive, *_) = packed
    assert image["manifest"] == archive["manifest"]
    assert image["diff_id"] == archive["diff_id"]
    with tarfile.open(out / "image.tar") as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # since 3.11.4
    assert files(tmp_path) == files(out / "image")


def test_every_form_of_image_is_proven_and_a_lying_one_refused(project, packed, tmp_path):
    """The cases that skopeo lets through: a wrong diff_id, too few of them, a wrong size."""
    out, answers = packed
    assert any("several layers" in note for note in answers[-1]["notes"])
    assert len(read_layout(out / "onbase").layers) == 2
    liars = {
        "wrong": (lambda config, _: config["rootfs"].update(diff_ids=["sha256:" + "0" * 64]), "diff_id is"),
        "few": (lambda config, _: config["rootfs"].update(diff_ids=[]), "names 0 diff_ids"),
        "size": (lambda _, manifest: manifest["layers"][0].update(size=7), "its descriptor says 7"),
    }
    for name, (change, _) in liars.items():
        lie(out / "image", tmp_path / name, change)
    commands = [["verify", path] for path in (out / "image", out / "onbase", *(tmp_path / name for name in liars))]
    good, based, *refused = batch(project, *commands, ["diff", out / "dir", out / "image.tar"])
    equal = refused.pop()
    assert good.ok().startswith("proven: 2 launches, 2 hits")
    assert based.ok().startswith("proven: 2 launches, 2 hits")
    assert equal.ok().startswith("equal")
    for answer, (_, message) in zip(refused, liars.values(), strict=True):
        assert answer.code == 2
        assert message in answer.stderr


def lie(source, target, change):
    """Copy a layout and change its config or manifest, every digest above following."""
    shutil.copytree(source, target)
    blobs = target / "blobs" / "sha256"
    index = json.loads((target / "index.json").read_text())
    old = blobs / index["manifests"][0]["digest"].removeprefix("sha256:")
    manifest = json.loads(old.read_text())
    config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
    change(config, manifest)
    for document, row in ((config, manifest["config"]), (manifest, index["manifests"][0])):
        data = json.dumps(document).encode()
        row["digest"], row["size"] = f"sha256:{hashlib.sha256(data).hexdigest()}", len(data)
        (blobs / row["digest"].removeprefix("sha256:")).write_bytes(data)
    (target / "index.json").write_text(json.dumps(index))


def tool(*command, check=True, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    if check:
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.images
def test_umoci_unpacks_it_and_catches_the_lies(packed, tmp_path):
    out, _ = packed
    tool("umoci", "unpack", "--rootless", "--image", f"{out / 'image'}:latest", tmp_path / "unpacked")
    assert files(tmp_path / "unpacked" / "rootfs" / "opt" / "tcache" / "shop") == files(out / "dir")
    tool("umoci", "unpack", "--rootless", "--image", f"{out / 'onbase'}:latest", tmp_path / "onbase")
    lie(out / "image", tmp_path / "liar", lambda config, _: config["rootfs"].update(diff_ids=["sha256:" + "0" * 64]))
    options = ["--rootless", "--image", f"{tmp_path / 'liar'}:latest"]
    assert tool("umoci", "unpack", *options, tmp_path / "lies", check=False).returncode != 0


@pytest.fixture
def registry(tmp_path):
    """A registry on this machine; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {tmp_path / 'registry'}\nhttp:\n  addr: {address}\n"
    )
    with (tmp_path / "registry.log").open("w") as log:
        served = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
        try:
            host, port = address.split(":")
            for _ in range(100):
                with socket.socket() as probe:
                    if probe.connect_ex((host, int(port))) == 0:
                        break
                time.sleep(0.1)
            yield address
        finally:
            served.terminate()
            served.wait(10)


@pytest.mark.images
@pytest.mark.parametrize("transport", ["oci", "oci-archive"])
def test_a_registry_keeps_its_digest(packed, registry, tmp_path, transport):
    out, (_, image, *_) = packed
    source = out / ("image" if transport == "oci" else "image.tar")
    remote = f"docker://{registry}/kernels:1"
    tool("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", f"{transport}:{source}:latest", remote)
    found = tool("skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", remote).stdout.strip()
    assert found == image["manifest"]
    back = tmp_path / "back"
    tool("skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", remote, f"oci:{back}:latest")
    assert read_layout(back).digest == image["manifest"]
    labels = json.loads(tool("skopeo", "inspect", "--tls-verify=false", remote).stdout)["Labels"]
    assert labels["io.tcache.bundle"] == "/opt/tcache/shop"


@pytest.mark.images
@pytest.mark.parametrize("name", ["image", "onbase"])
def test_buildah_starts_from_it_and_copies_out_of_it(packed, tmp_path, name):
    out, _ = packed
    storage = ["--storage-driver", "vfs", "--root", tmp_path / "storage", "--runroot", tmp_path / "run"]
    env = {**os.environ, "BUILDAH_ISOLATION": "chroot", "HOME": str(tmp_path)}
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    reference = f"oci:{out / name}:latest"
    container = tool(
        "buildah", *storage, "from", "--signature-policy", policy, "--pull-never", reference, env=env
    ).stdout.strip()
    try:
        mounted = Path(tool("buildah", *storage, "mount", container, env=env).stdout.strip())
        bundle = json.loads((mounted / "opt" / "tcache" / "shop" / "bundle.json").read_text())
        assert bundle["name"] == "shop"
        group = next((mounted / "io.triton.cache").rglob("__grp__*.json"))
        paths = json.loads(group.read_text())["child_paths"].values()
        assert all((mounted / path.lstrip("/")).is_file() for path in paths)
    finally:
        tool("buildah", *storage, "umount", container, env=env, check=False)
        tool("buildah", *storage, "rm", container, env=env, check=False)
