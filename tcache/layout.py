"""Reading an OCI image layout: every descriptor's size and digest and every layer's diff_id is compared.

A copy by a registry tool proves none of this: skopeo accepts a wrong diff_id, too few of them, a wrong size.
Source of the format: https://github.com/opencontainers/image-spec (image-layout.md, manifest.md, config.md).
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BUNDLE_LABEL", "Image", "Layer", "is_layout", "read_layout"]

BUNDLE_LABEL = "io.tcache.bundle"
"""Label of an image's config: where in the image the bundle is."""

_LARGEST_JSON = 16 * 1024 * 1024
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        descriptor: its descriptor in the manifest.
        path: the blob.
        diff_id: digest of the uncompressed archive.
    """

    descriptor: dict[str, Any]
    path: Path
    diff_id: str

    def blocks(self) -> Iterator[bytes]:
        """Yield the uncompressed archive in blocks of bounded size."""
        return _blocks(self.path, str(self.descriptor["mediaType"]))


@dataclass(frozen=True)
class Image:
    """An image whose every blob is what its descriptor says.

    Attributes:
        root: the layout.
        digest: of the manifest.
        manifest, config: parsed.
        layers: in order, the base first.
    """

    root: Path
    digest: str
    manifest: dict[str, Any]
    config: dict[str, Any]
    layers: tuple[Layer, ...]

    @property
    def labels(self) -> dict[str, str]:
        found = (self.config.get("config") or {}).get("Labels") or {}
        return {str(name): str(value) for name, value in found.items()}


def is_layout(path: Path) -> bool:
    """Return whether a directory says that it is an image layout."""
    return (path / "oci-layout").is_file()


def read_layout(root: Path) -> Image:
    """Read and check the one image of a layout.

    Raises:
        BundleError: it is no layout, holds no image or several, or a blob is not what its descriptor says.
    """
    try:
        return _read(root)
    except OSError as error:
        raise BundleError(f"{root}: image layout cannot be read: {error.strerror}", _AGAIN) from error
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise BundleError(f"{root}: corrupt image layout: {error!r}"[:300], _AGAIN) from error


_AGAIN = "pack or copy the image again"


def _read(root: Path) -> Image:
    version = json.loads(_small(root / "oci-layout"))["imageLayoutVersion"]
    if not str(version).startswith("1."):
        raise BundleError(f"{root}: image layout version {version!r}, expected 1", _AGAIN)
    descriptor = _one(root, json.loads(_small(root / "index.json"))["manifests"])
    while descriptor["mediaType"] in _INDEXES:
        descriptor = _one(root, json.loads(_blob(root, descriptor))["manifests"])
    manifest = json.loads(_blob(root, descriptor))
    config = json.loads(_blob(root, manifest["config"]))
    for inner, kind in ((config.get("config"), dict), ((config.get("config") or {}).get("Labels"), dict),
                        (config.get("history"), list)):  # fmt: skip
        if inner is not None and not isinstance(inner, kind):
            raise TypeError(f"{inner!r} in the config")
    diff_ids = config["rootfs"]["diff_ids"]
    if len(diff_ids) != len(manifest["layers"]):
        raise BundleError(
            f"{root}: the config names {len(diff_ids)} diff_ids, the manifest {len(manifest['layers'])} layers", _AGAIN
        )
    layers = []
    for row, diff_id in zip(manifest["layers"], diff_ids, strict=True):
        path = _checked(root, row)
        layer = Layer(row, path, str(diff_id))
        digest = hashlib.sha256()
        for block in layer.blocks():
            digest.update(block)
        if f"sha256:{digest.hexdigest()}" != diff_id:
            raise BundleError(f"{path}: the layer's diff_id is sha256:{digest.hexdigest()}, not {diff_id}", _AGAIN)
        layers.append(layer)
    return Image(root, str(descriptor["digest"]), manifest, config, tuple(layers))


def _one(root: Path, manifests: list[dict[str, Any]]) -> dict[str, Any]:
    if len(manifests) != 1:
        raise BundleError(
            f"{root}: holds {len(manifests)} images, expected one", "copy the one you mean into a layout of its own"
        )
    return manifests[0]


def _small(path: Path) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would block
        raise BundleError(f"{path}: not a regular file", _AGAIN)
    if found.st_size > _LARGEST_JSON:
        raise BundleError(f"{path}: larger than {_LARGEST_JSON} bytes", _AGAIN)
    return path.read_bytes()


def _checked(root: Path, descriptor: dict[str, Any]) -> Path:
    """Return the path of a blob that is as large and has the digest that its descriptor says."""
    match = re.fullmatch(r"sha256:([0-9a-f]{64})", str(descriptor["digest"]))
    if not match:
        raise BundleError(f"{root}: digest {descriptor['digest']!r}, expected sha256", _AGAIN)
    path = root / "blobs" / "sha256" / match[1]
    if path.is_symlink() or not path.is_file():
        raise BundleError(f"{path}: no such blob", _AGAIN)
    size = path.stat().st_size
    if size != descriptor["size"]:
        raise BundleError(f"{path}: {size} bytes, its descriptor says {descriptor['size']}", _AGAIN)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != match[1]:
        raise BundleError(f"{path}: its digest is sha256:{digest.hexdigest()}", _AGAIN)
    return path


def _blob(root: Path, descriptor: dict[str, Any]) -> bytes:
    return _small(_checked(root, descriptor))


def _blocks(path: Path, media_type: str) -> Iterator[bytes]:
    compressed = media_type.endswith(("+gzip", ".gzip"))
    if not compressed and not media_type.endswith(".tar"):
        raise BundleError(f"{path}: layer of type {media_type}, expected tar or tar+gzip", "copy it with --format oci")
    with path.open("rb") as file:
        if not compressed:
            yield from iter(lambda: file.read(1 << 20), b"")
            return
        try:
            yield from _inflated(iter(lambda: file.read(1 << 16), b""))
        except zlib.error as error:
            raise BundleError(f"{path}: corrupt gzip layer: {error}", _AGAIN) from error
        except EOFError as error:
            raise BundleError(f"{path}: the gzip layer is cut off", _AGAIN) from error


def _inflated(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what gzip members hold, one after the other, in blocks of at most 1 MiB."""
    inflate = zlib.decompressobj(wbits=31)
    for block in blocks:
        rest = block
        while rest:
            if inflate.eof:
                inflate = zlib.decompressobj(wbits=31)
            yield inflate.decompress(rest, 1 << 20)
            rest = inflate.unconsumed_tail or inflate.unused_data
    if not inflate.eof:
        raise EOFError
