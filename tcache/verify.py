"""Prove a bundle: replay its manifests in a fresh process, frozen, from another directory, with no other cache.

A copy of the bundle is moved, and a process started (:mod:`tcache.proof`) in whose environment only that copy can
answer. What it read is then compared with what ``index.json`` says was packed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tcache.archives import opened
from tcache.bundle import Bundle, Rejected
from tcache.errors import BundleError, OutputError, TcacheError
from tcache.project import project_root

__all__ = ["Report", "verify"]


@dataclass
class Report:
    """What a verification found.

    Attributes:
        launches: launches replayed.
        hits: launches that found their best config, their entry and their native helpers in the bundle.
        entries: distinct entries read.
        direct: those of them that launches were also led to by the index alone, without Triton's key.
        misses: ``{"where", "launch", "why"}`` for every launch that did not hit, or not on every way it may take.
        captured: entries that recordings captured: they were looked at, since their launches cannot be replayed.
        problems: files that are damaged or not trusted.
        differences: what ``index.json`` says otherwise than the replay of the manifests it was packed from.
        notes: what a reader should know, such as a bundle without native helpers.
        unreplayed: launches of the bundle's index that no replay made, as ``{"gpu", "ref", "shape", "config",
            "entry"}``.
        unindexed: launches that were replayed and hit, and that the index does not know, likewise.
    """

    launches: int = 0
    hits: int = 0
    entries: int = 0
    direct: int = 0
    captured: int = 0
    misses: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreplayed: list[dict[str, Any]] = field(default_factory=list)
    unindexed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        return self.launches + self.captured > 0 and not (self.misses or self.problems or self.differences)


def verify(path: Path, manifests: list[Path], root: Path) -> Report:
    """Verify a bundle.

    Args:
        path: the bundle: a directory, a wheel, an image layout, or an archive of one.
        manifests: manifests to replay; empty for those the bundle was packed from.
        root: the directory that manifests in the bundle are relative to (the project's root).

    Raises:
        BundleError: it is no bundle, or it does not say where its manifests' kernels are and none were given.
        TcacheError: the child could not replay at all.
    """
    with opened(path) as folder:
        report = _verify(folder, manifests, root)
        # what was unpacked is gone when the reader sees this
        report.problems = [problem.replace(str(folder), str(path)) for problem in report.problems]
    return report


def _verify(path: Path, manifests: list[Path], root: Path) -> Report:
    bundle = Bundle(path)
    report = Report(problems=bundle.problems(), notes=list(bundle.notes))
    try:
        bundle.index()
    except BundleError as error:  # of another schema, say, although its digest is right
        report.problems = list(dict.fromkeys([*report.problems, error.message]))
    chosen = [(path, None) for path in manifests] or _packed_manifests(bundle, root)
    with tempfile.TemporaryDirectory(prefix="tcache-verify-", dir=_scratch()) as scratch:
        moved = Path(scratch, "elsewhere")
        try:
            shutil.copytree(path, moved, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise BundleError(f"{path}: cannot be copied: {error}".splitlines()[0][:300], "pack it again") from error
        empty = Path(scratch, "empty")
        empty.mkdir(mode=0o555)
        for gpu in bundle.gpus:
            wanted = [str(manifest.resolve()) for manifest, gpus in chosen if gpus is None or gpu["name"] in gpus]
            found = _child({"gpu": gpu, "manifests": wanted}, moved, empty)
            _merge(report, found)
            _compare(report, bundle, gpu["name"], found["replayed"], own=not manifests)
        _compare_entries(report, bundle)
    return report


_MEMORY = "/dev/shm"  # noqa: S108 - the directory made there is private


def _scratch() -> str | None:
    """Return where temporary directories can be made; a container with a read-only root may have only /dev/shm.

    Raises:
        OutputError: nowhere.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if os.access(_MEMORY, os.W_OK | os.X_OK):
            return _MEMORY
    raise OutputError(
        "there is no writable temporary directory to copy the bundle to",
        "mount one, for example `docker run --tmpfs /tmp`, or set TMPDIR",
    )


_FIELDS = ("ref", "shape", "config", "entry")


def _compare(report: Report, bundle: Bundle, gpu: str, replayed: list[dict[str, Any]], *, own: bool) -> None:
    """Compare what was replayed on a GPU with the launches that the index says were packed for it.

    Other manifests than those it was packed from may well make other launches; of those only notes are made.
    """
    try:
        packed = [{name: row[name] for name in _FIELDS} for row in bundle.index().launches if row["gpu"] == gpu]
    except BundleError:
        return  # reported as damaged
    identity = _FIELDS if own else _FIELDS[1:]
    made = {tuple(row[name] for name in identity) for row in replayed}
    known = {tuple(row[name] for name in identity) for row in packed}
    unreplayed = [row for row in packed if tuple(row[name] for name in identity) not in made]
    unindexed = [row for row in replayed if tuple(row[name] for name in identity) not in known]
    report.unreplayed += [{"gpu": gpu, **row} for row in unreplayed]
    report.unindexed += [{"gpu": gpu, **row} for row in unindexed]
    if own:
        report.differences += _disagreements(gpu, unreplayed, unindexed)
        return
    for rows, what in ((unreplayed, "in the index and not replayed"), (unindexed, "replayed and not in the index")):
        if rows:
            report.notes.append(f"{len(rows)} launches on {gpu} are {what}, the first: {_shown(rows[0])}")


def _disagreements(gpu: str, unreplayed: list[dict[str, Any]], unindexed: list[dict[str, Any]]) -> list[str]:
    """Say what is wrong with the index: a row that names another entry or config, a row too many, a row missing."""
    found = []
    left = list(unreplayed)
    for row in unindexed:
        same = next((other for other in left if (other["ref"], other["shape"]) == (row["ref"], row["shape"])), None)
        if same is None:
            found.append(f"{gpu}: index.json lacks the launch {_shown(row)}")
            continue
        left.remove(same)
        what = ", ".join(f"{name} {same[name]}, the launch has {row[name]}"
                         for name in ("config", "entry") if same[name] != row[name])  # fmt: skip
        found.append(f"{gpu}: index.json says of {row['ref']} [{row['shape'] or 'no autotuner'}]: {what}")
    return found + [f"{gpu}: index.json has a launch that no manifest makes: {_shown(row)}" for row in left]


def _shown(row: dict[str, Any]) -> str:
    return f"{row['ref']} [{row['shape'] or 'no autotuner'}] -> {row['entry']}"


def _compare_entries(report: Report, bundle: Bundle) -> None:
    """Compare the entries that are packed with those that the index describes, and its launches with both."""
    try:
        index = bundle.index()
        described = {entry for entry, _ in index.kernels()}
        facts = {entry: index.fact(entry) for entry in described}
        launched = {(row["gpu"], row["entry"]) for row in index.launches}
    except BundleError:
        return  # reported as damaged
    captured = {entry for entry, row in facts.items() if row.get("captured") is True}
    report.captured = len(captured)
    if captured:
        report.notes.append(f"{report.captured} captured entries are intact; their launches cannot be replayed")
    packed, gpus = bundle.entries, {gpu["name"] for gpu in bundle.gpus}
    report.differences += [f"index.json does not describe entry {entry}" for entry in sorted(packed - described)]
    report.differences += [
        f"index.json describes entry {entry}, which is not packed" for entry in sorted(described - packed)
    ]
    idle = (packed & described) - captured - {entry for _, entry in launched}
    idle -= {row["entry"] for row in report.unindexed}  # the row that reads it is reported as missing
    report.differences += [
        f"index.json describes entry {entry}, which no launch reads and no recording captured: it cannot be proven"
        for entry in sorted(idle)
    ]
    report.differences += [
        f"index.json answers launches with captured entry {entry}, which only what compiled it may launch"
        for entry in sorted(captured)
        if facts[entry].get("direct") is True
    ]
    report.differences += [
        f"index.json has a launch on {gpu!r}, which the bundle was not packed for: entry {entry}"
        for gpu, entry in sorted(launched, key=str)
        if gpu not in gpus
    ]


def _packed_manifests(bundle: Bundle, root: Path) -> list[tuple[Path, list[str] | None]]:
    found = []
    for row in bundle.manifests:
        relative = row.get("path")
        places = [root, *([inside] if (inside := project_root(root)) is not None else [])]
        root = next((place for place in places if relative and (place / relative).is_file()), root)
        if relative is None or not (root / relative).is_file():
            name = relative or Path(row["file"]).name
            raise BundleError(
                f"manifest {name} of the bundle is not at {root}: its kernels cannot be found",
                "run from the project's root (without a pyproject.toml: the manifest's folder), pass --root, or give "
                "the manifest as a further argument",
            )
        checked = bundle.check(row["file"])
        if isinstance(checked, Rejected):
            raise BundleError(checked.reason, "pack it again, or give the manifest as a further argument")
        if (root / relative).read_bytes() != (bundle.root / row["file"]).read_bytes():
            raise BundleError(
                f"{root / relative}: changed after packing",
                "pack again, or give the manifest as a further argument to verify against the new one",
            )
        if not row["part"]:
            found.append((root / relative, row["gpus"]))
    return found


def _child(request: dict[str, Any], moved: Path, empty: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {
        "HOME": str(empty),
        "TCACHE_BUNDLES": str(moved),
        "TCACHE_GPU_NAME": request["gpu"]["name"],
        "TCACHE_INSTALLED_BUNDLES": "0",
        "TCACHE_MODE": "frozen",
        "TMPDIR": str(moved.parent),
        "TRITON_CACHE_DIR": str(empty),
        "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager",
        "TRITON_HOME": str(empty),
    }
    # the child imports what this process could import, whatever its working directory
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    command = [sys.executable, "-c", "from tcache.proof import child; child()"]
    done = subprocess.run(
        command, input=json.dumps(request), env=environment, cwd=empty, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TcacheError(f"the verifying process ended with code {done.returncode}: {last}") from None
    if "error" in answer:
        raise TcacheError(answer["error"], answer["hint"])
    return answer


def _merge(report: Report, found: dict[str, Any]) -> None:
    report.launches += found["launches"]
    report.hits += found["hits"]
    report.entries += len({row["entry"] for row in found["replayed"]})
    report.direct += len(found["direct"])
    report.misses += found["misses"]
    report.notes += [note for note in found["notes"] if note not in report.notes]
