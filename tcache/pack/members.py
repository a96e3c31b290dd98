"""What goes into a bundle: only what the resolved launches reference, made relocatable."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache._binary import entry_problem
from tcache._triton.cache import cache_directory
from tcache.compile import entry_present
from tcache.errors import BundleError
from tcache.keys.shape import ShapeKey
from tcache.lookup import source_of
from tcache.pack._cubin import cubin_problem, strip_debug, with_name
from tcache.store import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.resolve import Resolved
    from tcache.store import Store

__all__ = [
    "IR",
    "Borrowed",
    "Member",
    "best_configs",
    "distinct",
    "entry_members",
    "index_text",
    "missing_entries",
    "relocatable",
    "store_members",
]

IR = ("source", "ttir", "ttgir", "llir", "ptx", "amdgcn")
"""Intermediate files that a launch does not need."""

_BINARIES = ("cubin", "hsaco")


@dataclass(frozen=True)
class Member:
    """One file of a bundle: where it goes and its bytes."""

    path: str
    data: bytes


@dataclass(frozen=True)
class Borrowed:
    """One file whose bytes are elsewhere and are read when they are written: a base image's layers are large."""

    path: str
    source: Path

    @property
    def data(self) -> bytes:
        return self.source.read_bytes()


def distinct(resolved: Iterable[Resolved]) -> list[Resolved]:
    """Return one launch per entry, sorted by entry name."""
    first: dict[str, Resolved] = {}
    for launch in resolved:
        first.setdefault(launch.entry, launch)
    return [first[entry] for entry in sorted(first)]


def missing_entries(resolved: Iterable[Resolved]) -> list[Resolved]:
    """Return one launch for each entry that the Triton cache lacks."""
    return [launch for launch in distinct(resolved) if not entry_present(launch.entry, launch.compilation.name)]


def entry_members(resolved: Iterable[Resolved], include_ir: tuple[str, ...] = ()) -> list[Member]:
    """Return the files of all entries: metadata and binary, and the IR asked for.

    Absolute paths are removed: the directory of libdevice from the metadata, debug sections from the binary (kept
    when IR is included, since profilers then want both).

    Raises:
        BundleError: an entry lacks its metadata or its binary.
    """
    found = []
    for launch in distinct(resolved):
        folder = Path(cache_directory(), launch.entry)
        name = launch.compilation.name[:150]
        wanted = [f"{name}.json", *(f"{name}.{kind}" for kind in (*_BINARIES, *include_ir))]
        files = {file: folder / file for file in wanted if (folder / file).is_file()}
        if f"{name}.json" not in files or not any(f"{name}.{kind}" in files for kind in _BINARIES):
            raise BundleError(
                f"{folder}: entry has no metadata or no binary", "delete it and run `tcache warmup` again"
            )
        contents = {file: path.read_bytes() for file, path in sorted(files.items())}
        problem = _problem(launch, contents)
        if problem is not None:
            raise BundleError(f"{folder}: {problem}", "delete the entry's directory and run `tcache warmup` again")
        for file, raw in contents.items():
            data = relocatable(str(folder / file), launch.entry, file, raw, keep_debug=bool(include_ir))
            found.append(Member(f"entries/{launch.entry}/{file}", data))
    return found


def _problem(launch: Resolved, contents: dict[str, bytes]) -> str | None:
    """Return why no service would take an entry, or that it is for another architecture than the launch's."""
    problem = entry_problem(launch.entry, contents)
    arch = launch.gpu.arch
    if problem is not None or not isinstance(arch, int):
        return problem
    found = {file: cubin_problem(data, arch) for file, data in contents.items() if file.endswith(".cubin")}
    return next((f"{file}: {text}" for file, text in found.items() if text), None)


def relocatable(where: str, entry: str, file: str, data: bytes, *, keep_debug: bool = False) -> bytes:
    """Return one file of an entry without what only holds where it was made.

    Raises:
        BundleError: its metadata is no JSON; ``where`` says which.
    """
    if file.endswith(".json"):
        try:
            metadata = json.loads(data)
            libraries = metadata.get("extern_libs") or []
            metadata["extern_libs"] = [[name, Path(library).name] for name, library in libraries]
        except (ValueError, TypeError, AttributeError) as error:
            raise BundleError(
                f"{where}: corrupt, expected Triton's metadata", "delete the entry and run `tcache warmup` again"
            ) from error
        return json.dumps(metadata, separators=(",", ":")).encode()
    if file.endswith(".cubin") and not keep_debug:
        return with_name(strip_debug(data), entry)
    return data


def best_configs(resolved: Iterable[Resolved], stores: tuple[Store, ...]) -> dict[tuple[str, str], Record]:
    """Return the best configs used, each record cut down to those shapes and to the winner's timing.

    Returns:
        (GPU slug, kernel id) -> record.
    """
    wanted: dict[tuple[str, str], dict[str, Resolved]] = {}
    for launch in resolved:
        if launch.tuned is not None and launch.shape is not None:
            wanted.setdefault((launch.gpu.slug, launch.tuned.id), {})[launch.shape] = launch
    found = {}
    for key, by_shape in sorted(wanted.items()):
        first = next(iter(by_shape.values()))
        assert first.tuned is not None
        assert first.tuning is not None  # a launch that the store knows has an autotuner
        source = source_of(first.tuning[0])  # not the entry's: this one covers the bucketing too
        entries = {}
        for text, launch in by_shape.items():
            shape = ShapeKey.parse(text)
            for store in stores:
                entry = store.get(first.gpu, first.tuned, shape, source)
                if entry is not None and entry.source == source:
                    timings = {name: timing for name, timing in entry.timings.items() if name == launch.config}
                    entries[shape] = replace(
                        entry, config=launch.config, timings=timings, space=launch.space, tied=(), extra={}
                    )
                    break
        found[key] = Record(first.gpu, first.tuned, entries)
    return found


def store_members(records: dict[tuple[str, str], Record]) -> list[Member]:
    """Return the best configs as files."""
    return [
        Member(f"store/{slug}/{kernel_id}.json", record.text().encode())
        for (slug, kernel_id), record in sorted(records.items())
    ]


def index_text(resolved: Iterable[Resolved], captured: dict[str, dict[str, Any]] | None = None) -> bytes:
    """Return ``index.json``: the launches, and the facts of each entry with what all share said once.

    Args:
        resolved: the launches.
        captured: facts of further entries, whose launches cannot be told.
    """
    resolved = list(resolved)
    indirect = {launch.entry for launch in resolved if not launch.direct}
    first = distinct(resolved)
    facts = {launch.entry: launch.facts() for launch in first}
    for launch in first:
        if launch.launch is not None:
            facts[launch.entry]["launch"] = launch.launch
    for entry, row in facts.items():
        row["direct"] = entry not in indirect
    facts |= {entry: dict(row) for entry, row in (captured or {}).items()}
    options = [row["options"] for row in facts.values()]
    shared = {
        name: value for name, value in options[0].items() if all(other.get(name, _NO) == value for other in options)
    } if options else {}  # fmt: skip
    for row in facts.values():
        row["options"] = {name: value for name, value in row["options"].items() if name not in shared}
    launches = [
        {
            "gpu": launch.gpu.name,
            "ref": launch.ref,
            "shape": launch.shape,
            "config": launch.config,
            "entry": launch.entry,
        }
        for launch in resolved
    ]
    unique = {json.dumps(launch, sort_keys=True): launch for launch in launches}
    data = {
        "schema": 1,
        "options": shared,
        "entries": {entry: facts[entry] for entry in sorted(facts)},
        "launches": [unique[text] for text in sorted(unique)],
    }
    return (json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


_NO = object()
