"""Image layouts: what registry tools let through is caught here."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil

import pytest

from tcache.errors import BundleError
from tcache.layout import read_layout

ARCHIVE = b"\0" * 10240
OTHER = b"\0" * 20480


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Layout:
    """A layout whose documents can be changed after they were written, with or without the digests following."""

    def __init__(self, root):
        self.root = root
        (root / "blobs" / "sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.layers = [gzip.compress(ARCHIVE, mtime=0)]
        self.types = ["application/vnd.oci.image.layer.v1.tar+gzip"]
        self.diff_ids = [digest(ARCHIVE)]
        self.manifests = 1
        self.size = None
        self.write()

    def blob(self, data, media_type):
        (self.root / "blobs" / "sha256" / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    def write(self):
        config = {"rootfs": {"type": "layers", "diff_ids": self.diff_ids}, "config": {"Labels": {"a": "b"}}}
        layers = [self.blob(data, kind) for data, kind in zip(self.layers, self.types, strict=True)]
        if self.size is not None:
            layers[0]["size"] = self.size
        described = self.blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
        manifest = {"schemaVersion": 2, "config": described, "layers": layers}
        row = self.blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
        (self.root / "index.json").write_text(json.dumps({"manifests": [row] * self.manifests}))


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "layout")


def test_a_good_one(layout):
    image = read_layout(layout.root)
    assert image.labels == {"a": "b"}
    [layer] = image.layers
    assert b"".join(layer.blocks()) == ARCHIVE


def test_several_gzip_members_are_one_layer(layout):
    layout.layers = [gzip.compress(ARCHIVE[:5000], mtime=0) + gzip.compress(ARCHIVE[5000:], mtime=0)]
    layout.write()
    assert b"".join(read_layout(layout.root).layers[0].blocks()) == ARCHIVE


CHANGES = [
    (lambda it: setattr(it, "diff_ids", [digest(OTHER)]), "the layer's diff_id is"),
    (lambda it: setattr(it, "diff_ids", []), "names 0 diff_ids, the manifest 1 layers"),
    (lambda it: setattr(it, "diff_ids", it.diff_ids * 2), "names 2 diff_ids, the manifest 1 layers"),
    (lambda it: setattr(it, "size", len(it.layers[0]) - 1), "its descriptor says"),
    (lambda it: setattr(it, "layers", [it.layers[0][:-9]]), "cut off|diff_id"),
    (lambda it: setattr(it, "layers", [b"\x1f\x8b\x08\0" + b"\xff" * 99]), "corrupt gzip layer"),
    (lambda it: setattr(it, "types", ["application/vnd.oci.image.layer.v1.tar+zstd"]), "expected tar or tar\\+gzip"),
    (lambda it: setattr(it, "manifests", 2), "holds 2 images"),
    (lambda it: setattr(it, "manifests", 0), "holds 0 images"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_documents_that_lie(layout, change, message):
    change(layout)
    layout.write()
    with pytest.raises(BundleError, match=message):
        read_layout(layout.root)


FILES = [
    (lambda root: (root / "oci-layout").write_text("{"), "corrupt image layout"),
    (lambda root: (root / "oci-layout").write_text('{"imageLayoutVersion": "2.0.0"}'), "version '2.0.0'"),
    (lambda root: (root / "index.json").write_text("[]"), "corrupt image layout"),
    (lambda root: (root / "index.json").unlink(), "cannot be read"),
    (lambda root: shutil.rmtree(root / "blobs"), "no such blob"),
]


@pytest.mark.parametrize(("change", "message"), FILES)
def test_files_that_are_missing_or_no_json(layout, change, message):
    change(layout.root)
    with pytest.raises(BundleError, match=message):
        read_layout(layout.root)


def test_every_flipped_blob_is_found(layout):
    for path in (layout.root / "blobs" / "sha256").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(BundleError, match="its digest is"):
            read_layout(layout.root)
        path.unlink()
        path.symlink_to("/etc/passwd")
        with pytest.raises(BundleError, match="no such blob"):
            read_layout(layout.root)
        path.unlink()
        path.write_bytes(data)
    read_layout(layout.root)


@pytest.mark.parametrize("change", [{"config": "x"}, {"config": {"Labels": ["x"]}}, {"history": "x"}, {"config": 7}])
def test_a_config_of_other_types_with_right_digests(layout, change):
    described = layout.blob(json.dumps({"rootfs": {"diff_ids": layout.diff_ids}, **change}).encode(), "config")
    manifest = {"schemaVersion": 2, "config": described, "layers": [layout.blob(layout.layers[0], layout.types[0])]}
    row = layout.blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    (layout.root / "index.json").write_text(json.dumps({"manifests": [row]}))
    with pytest.raises(BundleError, match="corrupt image layout"):
        read_layout(layout.root)


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
def test_a_pipe_does_not_block(layout, name):
    (layout.root / name).unlink()
    os.mkfifo(layout.root / name)
    with pytest.raises(BundleError, match="not a regular file"):
        read_layout(layout.root)
