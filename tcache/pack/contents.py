"""What a bundle holds, in whatever form it is written: read :func:`collect` as its table of contents."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache._fs import sha256_bytes
from tcache._triton import release
from tcache._triton.distribution import distribution
from tcache._triton.probe import key_environment
from tcache._triton.ptxas import ptxas_release
from tcache._triton.spared import believable, recorded
from tcache.bundle import SCHEMA, Environment, environment_fields
from tcache.errors import UsageError
from tcache.pack.captured import CapturedEntry, captured_entries
from tcache.pack.helpers import Helpers, build_helpers
from tcache.pack.members import Member, best_configs, distinct, entry_members, index_text, store_members
from tcache.project import project_root

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.keys.gpu import GPU
    from tcache.manifest import LoadedManifest
    from tcache.resolve import Resolved
    from tcache.store import Record, Store

__all__ = ["Contents", "Packed", "collect", "source_date_epoch"]


@dataclass(frozen=True)
class Packed:
    """What was written.

    Attributes:
        path: the directory or file.
        form: ``dir``, ``wheel``, ``oci`` or ``native``.
        launches, entries, helpers: how many.
        bytes: size of all files in it, before compression.
        notes: what its reader should know.
        digests: what identifies it, where the form has such a thing: an image's manifest digest, a layer's diff_id.
    """

    path: Path
    form: str
    launches: int
    entries: int
    helpers: int
    bytes: int
    notes: tuple[str, ...] = ()
    digests: dict[str, str] | None = None


@dataclass(frozen=True)
class Contents:
    """A bundle before it is written.

    Attributes:
        name: what the bundle is called.
        resolved: the launches.
        environment: what must match.
        files: all its files, sorted by path, ``bundle.json`` among them.
        captured: entries of kernels that others compile and launch, besides those of the launches.
        helpers: the native helpers.
        records: (GPU slug, kernel id) -> the best configs used.
        notes: what its reader should know.
    """

    name: str
    resolved: list[Resolved]
    environment: Environment
    files: tuple[Member, ...]
    captured: tuple[CapturedEntry, ...]
    helpers: Helpers
    records: dict[tuple[str, str], Record]
    notes: tuple[str, ...]

    @property
    def entries(self) -> list[Resolved]:
        """One launch for each entry, sorted by entry."""
        return distinct(self.resolved)

    @property
    def gpus(self) -> list[GPU]:
        """The GPUs it is for, sorted by name."""
        return _gpus(self.resolved, self.captured)

    def packed(
        self, path: Path, form: str, files: Iterable[Member], notes: tuple[str, ...] = (), **digests: str
    ) -> Packed:
        """Return the answer of a writer."""
        count = sum(len(member.data) for member in files)
        entries = len(self.entries) + len(self.captured)
        helpers = len(self.helpers.built)
        every = (*self.notes, *notes)
        return Packed(path, form, len(self.resolved), entries, helpers, count, every, digests or None)


def collect(
    resolved: list[Resolved],
    manifests: list[LoadedManifest],
    stores: tuple[Store, ...],
    name: str,
    *,
    include_ir: tuple[str, ...] = (),
    with_native: bool = True,
    hip_library: str | None = None,
    gpus: list[list[GPU]] | None = None,
    include_captured: bool = False,
) -> Contents:
    """Gather everything these launches reference, and nothing else.

    Args:
        resolved: the launches; every entry must be in the Triton cache.
        manifests: what they were replayed from; copied in, so that ``verify`` can replay them.
        stores: where their best configs are.
        name: what the bundle is called.
        include_ir: kinds of intermediate files to include, of :data:`tcache.pack.members.IR`.
        with_native: build and include native helpers.
        hip_library: path of ``libamdhip64.so`` in the service, for AMD targets.
        gpus: for each manifest the GPUs it was replayed for; None where each was for all.
        include_captured: include what recordings captured of kernels that others launch; needs ``gpus``.

    Raises:
        BundleError: an entry is incomplete, damaged, or captured under another Triton.
        CompilerMissing: native helpers are wanted and there is no C compiler.
    """
    members = entry_members(resolved, include_ir)
    captured = _captured(resolved, manifests, gpus) if include_captured and gpus is not None else []
    members += [member for one in captured for member in one.members()]
    records = best_configs(resolved, stores)
    members += store_members(records)
    members.append(Member("index.json", index_text(resolved, {one.entry: one.facts for one in captured})))
    copies = _manifest_members(manifests, None if gpus is None else [[gpu.name for gpu in some] for some in gpus])
    members += [member for member, _ in copies]
    kernels = [one.kernel() for one in captured]
    helpers = build_helpers(resolved, hip_library, kernels) if with_native else Helpers(notes=(_NO_NATIVE,))
    members += helpers.members()
    chosen = _gpus(resolved, captured)
    environment = _environment(chosen)
    head = {
        "schema": SCHEMA,
        "name": name,
        "environment": environment_fields(environment),
        "gpus": [asdict(gpu) for gpu in chosen],
        "targets": sorted({str(gpu.target) for gpu in chosen}),
        "manifests": [row for _, row in copies],
        "helpers": [helper.row() for helper in helpers.built],
        "hip_library": helpers.hip_library,
        "notes": list(helpers.notes),
    }
    members = _distinct_files(members)
    rows = {member.path: {"size": len(member.data), "sha256": sha256_bytes(member.data)} for member in members}
    text = json.dumps({**head, "files": rows}, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    files = sorted([*members, Member("bundle.json", text.encode())], key=lambda member: member.path)
    return Contents(name, resolved, environment, tuple(files), tuple(captured), helpers, records, helpers.notes)


_NO_NATIVE = "native helpers are left out: the service needs a C compiler, Python's headers and mode lookup"


def source_date_epoch() -> int:
    """Return ``SOURCE_DATE_EPOCH``, see https://reproducible-builds.org/specs/source-date-epoch/, 0 when unset.

    Raises:
        UsageError: it is no number of seconds.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if not text.isascii() or not text.isdigit() or int(text) >= 2**33:
        raise UsageError(f"SOURCE_DATE_EPOCH={text!r}: expected seconds since 1970", "unset it, or use `date +%s`")
    return int(text)


def _captured(resolved: list[Resolved], manifests: list[LoadedManifest], gpus: list[list[GPU]]) -> list[CapturedEntry]:
    own = {launch.entry for launch in resolved}
    return [one for one in captured_entries(manifests, gpus) if one.entry not in own]


def _gpus(resolved: Iterable[Resolved], captured: Iterable[CapturedEntry]) -> list[GPU]:
    found = {launch.gpu.name: launch.gpu for launch in resolved}
    found |= {gpu.name: gpu for one in captured for gpu in one.gpus}
    return [found[name] for name in sorted(found)]


def _environment(gpus: Iterable[GPU]) -> Environment:
    arches = {gpu.arch for gpu in gpus}
    releases = {found for arch in arches if (found := ptxas_release(arch)) is not None}
    here = distribution()
    computed = believable(recorded(arches), release, here.files) if here.digest else {}
    return Environment.current(
        release,
        key_environment(),
        ", ".join(sorted(releases)) or None,
        here.digest if "triton_key" in computed else "",  # else Triton reads other files than those recorded
        computed,
    )


def _distinct_files(members: list[Member]) -> list[Member]:
    """Return the members sorted, a file that was named twice once (the same manifest given twice)."""
    found = {member.path: member for member in members}
    return [found[path] for path in sorted(found)]


def _manifest_members(
    manifests: list[LoadedManifest], gpus: list[list[str]] | None
) -> list[tuple[Member, dict[str, Any]]]:
    """Return the manifests' copies and rows, with everything they include; a ``part`` is replayed through the manifest
    that includes it.

    Paths are kept relative to the project, or without one to the folder that all manifests lie under: neither where
    the checkout is nor where ``pack`` ran is part of a bundle.
    """
    whole: dict[Path, set[str]] = {manifest.path.resolve(): set() for manifest in manifests}
    for manifest, names in zip(manifests, gpus or [], strict=gpus is not None):
        whole[manifest.path.resolve()] |= set(names)
    paths = {path.resolve() for manifest in manifests for path in manifest.files()}
    roots = {project_root(path.parent) for path in whole}
    root = roots.pop() if len(roots) == 1 else None
    root = root or Path(os.path.commonpath([path.parent for path in paths]))
    found = []
    for path in sorted(paths):
        data = path.read_bytes()
        file = f"manifests/{sha256_bytes(data)[:8]}-{path.name}"
        relative = path.relative_to(root).as_posix() if path.is_relative_to(root) else None
        row: dict[str, Any] = {"file": file, "path": relative}
        more = {"part": True} if path not in whole else {"gpus": sorted(whole[path])} if gpus is not None else {}
        found.append((Member(file, data), row | more))
    return found
