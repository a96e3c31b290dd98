"""Write a bundle directory: read :func:`pack_directory` as its table of contents."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tcache._fs import new_directory, sha256_bytes
from tcache._triton import native, release
from tcache._triton.cache import cache_directory
from tcache._triton.distribution import distribution
from tcache._triton.probe import key_environment
from tcache._triton.ptxas import ptxas_release
from tcache.bundle import SCHEMA, Environment, environment_fields
from tcache.errors import UsageError
from tcache.pack.members import Member, distinct, entry_members, index_text, store_members

if TYPE_CHECKING:
    from tcache.manifest import LoadedManifest
    from tcache.resolve import Resolved
    from tcache.store import Store

__all__ = ["Packed", "pack_directory"]


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes:
        path: the bundle.
        launches, entries, helpers: how many.
        bytes: size of all its files.
    """

    path: Path
    launches: int
    entries: int
    helpers: int
    bytes: int


def pack_directory(
    resolved: list[Resolved],
    manifests: list[LoadedManifest],
    stores: tuple[Store, ...],
    target: Path,
    *,
    include_ir: tuple[str, ...] = (),
    with_native: bool = True,
    force: bool = False,
) -> Packed:
    """Write a bundle with everything these launches reference, and nothing else.

    Args:
        resolved: the launches; every entry must be in the Triton cache.
        manifests: what they were replayed from; copied in, so that ``verify`` can replay them.
        stores: where their best configs are.
        target: the bundle directory; it must not exist unless ``force``.
        include_ir: kinds of intermediate files to include, of :data:`tcache.pack.members.IR`.
        with_native: build and include native helpers.
        force: replace an existing directory.

    Raises:
        OutputError: ``target`` exists or cannot be written; nothing is left behind.
        BundleError: an entry is incomplete.
        CompilerMissing: native helpers are wanted and there is no C compiler.
    """
    members = entry_members(resolved, include_ir)
    members += store_members(resolved, stores)
    members.append(Member("index.json", index_text(resolved)))
    copies = _manifest_members(manifests)
    members += [member for member, _ in copies]
    helpers, helper_rows = _helper_members(resolved) if with_native else ([], [])
    members += helpers
    head = {
        "schema": SCHEMA,
        "name": target.name,
        "environment": environment_fields(_environment(resolved)),
        "gpus": _gpus(resolved),
        "targets": sorted({str(launch.gpu.target) for launch in resolved}),
        "manifests": [row for _, row in copies],
        "helpers": helper_rows,
    }
    return _write(head, members, resolved, target, len(helpers), force=force)


def _write(
    head: dict[str, Any], members: list[Member], resolved: list[Resolved], target: Path, helpers: int, *, force: bool
) -> Packed:
    members = sorted(members, key=lambda member: member.path)
    rows = {member.path: {"size": len(member.data), "sha256": sha256_bytes(member.data)} for member in members}
    text = (json.dumps({**head, "files": rows}, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
    when = _source_date_epoch()
    with new_directory(target, force=force) as folder:
        for member in [*members, Member("bundle.json", text)]:
            path = folder / member.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(member.data)
            path.chmod(0o644)
            os.utime(path, (when, when))
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir():
                path.chmod(0o755)
                os.utime(path, (when, when))
        os.utime(folder, (when, when))
    size = len(text) + sum(len(member.data) for member in members)
    return Packed(target, len(resolved), len(distinct(resolved)), helpers, size)


def _source_date_epoch() -> int:
    """Return ``SOURCE_DATE_EPOCH``, see https://reproducible-builds.org/specs/source-date-epoch/."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if not text.isdigit() or int(text) >= 2**33:
        raise UsageError(f"SOURCE_DATE_EPOCH={text!r}: expected seconds since 1970", "unset it, or use `date +%s`")
    return int(text)


def _environment(resolved: list[Resolved]) -> Environment:
    releases = {found for launch in resolved if (found := ptxas_release(launch.gpu.arch)) is not None}
    return Environment.current(release, key_environment(), ", ".join(sorted(releases)) or None, distribution().digest)


def _gpus(resolved: list[Resolved]) -> list[dict[str, Any]]:
    found = {launch.gpu.name: asdict(launch.gpu) for launch in resolved}
    return [found[name] for name in sorted(found)]


def _manifest_members(manifests: list[LoadedManifest]) -> list[tuple[Member, dict[str, Any]]]:
    """Return the manifests' copies and their rows, with everything they include; paths are kept only relative to the
    working directory. A ``part`` is replayed through the manifest that includes it.
    """
    here = Path.cwd().resolve()
    whole = {manifest.path.resolve() for manifest in manifests}
    found: dict[Path, tuple[Member, dict[str, Any]]] = {}
    for path in (each.resolve() for manifest in manifests for each in manifest.files()):
        relative = path.relative_to(here).as_posix() if path.is_relative_to(here) else None
        data = path.read_bytes()
        file = f"manifests/{sha256_bytes(data)[:8]}-{path.name}"
        row: dict[str, Any] = {"file": file, "path": relative}
        found.setdefault(path, (Member(file, data), row if path in whole else {**row, "part": True}))
    return list(found.values())


def _helper_members(resolved: list[Resolved]) -> tuple[list[Member], list[dict[str, Any]]]:
    """Build the native helpers these launches need; the Triton cache keeps them for the next time."""
    kernels = []
    for launch in distinct(resolved):
        if launch.gpu.backend == "cuda":
            # what a launcher is made from is in the entry's metadata: nothing is compiled, wherever the cache was moved
            name = f"{launch.compilation.name[:150]}.json"
            metadata = json.loads(Path(cache_directory(), launch.entry, name).read_bytes())
            metadata["target"] = SimpleNamespace(**metadata["target"])
            kernels.append(SimpleNamespace(src=launch.compilation.source, metadata=SimpleNamespace(**metadata)))
    sources = native.helper_sources(kernels)
    paths = native.build(sources, Path(cache_directory(), "tcache-native"))
    members, rows = [], []
    for source, path in zip(sources, paths, strict=True):
        file = f"native/{source.digest[:16]}/{path.name}"
        members.append(Member(file, path.read_bytes()))
        rows.append({"name": source.name, "source": source.digest, "keys": list(source.keys()), "path": file})
    return members, rows
