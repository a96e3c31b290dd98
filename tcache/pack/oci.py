"""A bundle as an OCI image: one gzip layer, alone or on a base, that tcache, MCV, GKM and KServe read.

Members, names without a leading ``./``:

    opt/tcache/<name>/               the bundle
    io.triton.cache/<KEY>/<file>     a Triton cache, its group files for the mount path
    io.triton.manifest/manifest.json what each entry is for

Source of the latter two and of the labels: spec-compat.md of https://github.com/redhat-et/MCU (mcv/docs).
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache import __version__
from tcache._fs import new_file
from tcache.errors import UsageError
from tcache.layout import BUNDLE_LABEL, Image
from tcache.pack._tar import gzipped, tar
from tcache.pack.contents import Contents, Packed, source_date_epoch
from tcache.pack.directory import write_tree
from tcache.pack.members import Borrowed, Member
from tcache.pack.native import native_members

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CACHE", "write_oci"]

CACHE = "io.triton.cache"
"""Where the Triton cache is in the image, and the mount path of its group files unless another is said."""

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_oci(
    contents: Contents,
    target: Path,
    *,
    mount_path: str | None = None,
    driver_dirs: tuple[str, ...] = (),
    base: Image | None = None,
    tag: str = "latest",
    force: bool = False,
) -> Packed:
    """Write a bundle as an image layout, or as an archive of one when ``target`` ends in ``.tar``.

    Args:
        contents: what is packed.
        target: directory or ``.tar`` file; it must not exist unless ``force``.
        mount_path: where a service without tcache will see the Triton cache; None for where it is in the image.
        driver_dirs: directories of ``libcuda.so.1`` in such a service; see :mod:`tcache.pack.native`.
        base: image to put the layer on; None for an image of this layer alone.
        tag: name of the image in the layout.
        force: replace an existing output.

    Raises:
        UsageError: the base is for another architecture, or ``mount_path`` is not absolute.
        OutputError: ``target`` exists or cannot be written; nothing is left behind.
    """
    cache, notes = native_members(contents, mount_path or f"/{CACHE}", driver_dirs)
    place = f"opt/tcache/{contents.name}"
    members = [Member(f"{place}/{member.path}", member.data) for member in contents.files]
    members += [Member(f"{CACHE}/{member.path}", member.data) for member in cache]
    members.append(Member("io.triton.manifest/manifest.json", _mcv_manifest(contents)))
    archive = tar(members)
    layer = gzipped(archive)
    labels = _labels(contents, cache, place)
    config, manifest = _documents(labels, _digest(archive), _described(layer, _LAYER), base)
    notes = tuple(f"for a service without tcache: {note}" for note in notes)
    if base is not None:
        notes = (*notes, "on a base the image has several layers: MCV, GKM and KServe read images of one layer")
    described = _described(manifest, _MANIFEST)
    named = {**described, "annotations": {"org.opencontainers.image.ref.name": tag}}
    files: list[Member | Borrowed] = [
        Member("oci-layout", _json({"imageLayoutVersion": "1.0.0"})),
        Member("index.json", _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [named]})),
        *(_blob(data) for data in (layer, config, manifest)),
        *(Borrowed(f"blobs/sha256/{one.path.name}", one.path) for one in (base.layers if base is not None else ())),
    ]
    files = list({member.path: member for member in files}.values())
    if target.suffix == ".tar":
        new_file(target, tar(files), force=force)
    else:
        write_tree(sorted(files, key=lambda member: member.path), target, force=force)
    digests = {"manifest": str(described["digest"]), "diff_id": _digest(archive)}
    return contents.packed(target, "oci", members, notes, **digests)


_INDEX = "application/vnd.oci.image.index.v1+json"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _json(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _blob(data: bytes) -> Member:
    return Member(f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data)


def _described(data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}


def _documents(labels: dict[str, str], diff_id: str, layer: dict[str, Any], base: Image | None) -> tuple[bytes, bytes]:
    """Return the image's config and manifest: the base's with one layer more."""
    machine = platform.machine()
    architecture = _ARCHITECTURES.get(machine, machine)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(source_date_epoch()))
    config: dict[str, Any] = {"os": "linux", "architecture": architecture, "config": {}}
    layers: list[dict[str, Any]] = []
    diff_ids: list[str] = []
    history: list[dict[str, Any]] = []
    if base is not None:
        config = json.loads(json.dumps(base.config))
        if config.get("architecture") != architecture:
            found = config.get("architecture")
            raise UsageError(f"--base {base.root}: for {found}, these native helpers are for {architecture}")
        layers = [{**one.descriptor} for one in base.layers]
        diff_ids = [one.diff_id for one in base.layers]
        history = list(config.get("history") or [])
    inner = config.get("config") or {}
    config["config"] = {**inner, "Labels": {**(inner.get("Labels") or {}), **labels}}
    config["created"] = created
    config["rootfs"] = {"type": "layers", "diff_ids": [*diff_ids, diff_id]}
    config["history"] = [*history, {"created": created, "created_by": f"tcache pack --format oci ({__version__})"}]
    text = _json(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _described(text, _CONFIG),
        "layers": [*({**one, "mediaType": _as_oci(one["mediaType"])} for one in layers), layer],
    }
    return text, _json(manifest)


def _as_oci(media_type: str) -> str:
    """Return a layer's media type in an OCI manifest, which has no Docker types."""
    docker = "application/vnd.docker.image.rootfs.diff.tar"
    return media_type.replace(f"{docker}.gzip", _LAYER).replace(docker, _LAYER.removesuffix("+gzip"))


def _labels(contents: Contents, cache: list[Member], place: str) -> dict[str, str]:
    targets = {(gpu.backend, str(gpu.arch), gpu.warp_size) for gpu in contents.gpus}
    summary = [{"backend": name, "arch": arch, "warp_size": warp} for name, arch, warp in sorted(targets)]
    return {
        BUNDLE_LABEL: f"/{place}",
        "cache.triton.image/summary": json.dumps({"targets": summary}, separators=(",", ":")),
        "cache.triton.image/entry-count": str(len(contents.entries) + len(contents.captured)),
        "cache.triton.image/cache-size-bytes": str(sum(len(member.data) for member in cache)),
        "org.opencontainers.image.title": contents.name,
    }


def _mcv_manifest(contents: Contents) -> bytes:
    """Return MCV's manifest: one row per entry, ``hash`` as Triton wrote it into the entry's metadata."""
    rows = []
    for member in sorted(_metadata(contents.files), key=lambda member: member.path):
        data = json.loads(member.data)
        row = {
            "hash": data["hash"],
            "backend": data["target"]["backend"],
            "arch": str(data["target"]["arch"]),
            "warp_size": data["target"]["warp_size"],
            "num_warps": data.get("num_warps", 0),
            "num_stages": data.get("num_stages", 0),
            "debug": bool(data.get("debug", False)),
        }
        rows.append({**row, "ptx_version": data["ptx_version"]} if data.get("ptx_version") else row)
    return json.dumps({"triton": rows}, sort_keys=True, indent=1).encode() + b"\n"


def _metadata(files: Iterable[Member]) -> list[Member]:
    return [member for member in files if member.path.startswith("entries/") and member.path.endswith(".json")]
