"""The bundle format: what ``pack`` writes and ``load`` reads.

    bundle.json        schema, name, environment, GPUs, targets, every file's size and SHA-256
    index.json         kernel -> launches: shape key, config, specialization, options, entry
    store/             the best configs referenced
    entries/<KEY>/     kernel.json and the binary
    native/            native helpers
    manifests/         the manifests it was packed from

Nothing in a bundle is written at load time, and no file is used before its digest was compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tcache.errors import BundleError

__all__ = ["SCHEMA", "Accepted", "Bundle", "Environment", "Helper", "Index", "Rejected", "compatible", "library_tag"]

SCHEMA = 1
_MANIFEST = "bundle.json"
_INDEX = "index.json"
_LARGEST_JSON = 256 * 1024 * 1024


@dataclass(frozen=True)
class Accepted:
    """A bundle or file that may be used."""


@dataclass(frozen=True)
class Rejected:
    """A bundle or file that may not be used, and why."""

    reason: str


@dataclass(frozen=True)
class Environment:
    """What must match for a bundle's entries to be found and its native helpers to load.

    Attributes:
        triton: release, such as ``3.6.0``.
        python: tag of the interpreter's ABI, such as ``cpython-312``; each Python minor has its own ``libtriton``.
        platform: such as ``linux-x86_64``.
        libc: such as ``glibc 2.36``: what the native helpers were built against.
        variables: environment variables that are part of Triton's keys.
        ptxas: ``ptxas --version``'s release line, None where no CUDA target is packed. For the reader's eye.
    """

    triton: str
    python: str
    platform: str
    libc: str
    variables: dict[str, str] = field(default_factory=dict)
    ptxas: str | None = None

    @classmethod
    def current(cls, triton: str, variables: dict[str, str], ptxas: str | None = None) -> Environment:
        """Gather the facts of this process."""
        libc = " ".join(platform.libc_ver(sys.executable)).strip() or "unknown"
        return cls(triton, library_tag(), sysconfig.get_platform().replace(".", "_"), libc, variables, ptxas)


def library_tag() -> str:
    """Return the interpreter's ABI tag, ``cpython-312``, as native helpers carry it in their names."""
    return f"{sys.implementation.name}-{sys.version_info.major}{sys.version_info.minor}"


def compatible(bundle: Environment, here: Environment) -> Accepted | Rejected:
    """Decide whether a bundle's entries can hit in this process.

    ``libc`` and ``ptxas`` do not decide: the dynamic linker checks the one and Triton's key the other.
    """
    for what, theirs, ours in (
        ("Triton", bundle.triton, here.triton),
        ("Python", bundle.python, here.python),
        ("platform", bundle.platform, here.platform),
    ):
        if theirs != ours:
            return Rejected(f"packed for {what} {theirs}, this process has {ours}")
    for name in sorted({*bundle.variables, *here.variables}):
        theirs, ours = bundle.variables.get(name, "unset"), here.variables.get(name, "unset")
        if theirs != ours:
            return Rejected(f"packed with {name} {theirs}, this process has {ours}")
    return Accepted()


@dataclass(frozen=True)
class Helper:
    """A native helper of a bundle.

    Attributes:
        name: the module's name, ``cuda_utils`` or ``__triton_launcher``.
        source: SHA-256 of its C source: what identifies it.
        keys: entry names under which Triton may ask for it on machines like the builder.
        path: where it is in the bundle.
    """

    name: str
    source: str
    keys: tuple[str, ...]
    path: str


@dataclass(frozen=True)
class Index:
    """What a bundle holds.

    Attributes:
        launches: rows of ``gpu``, ``ref``, ``shape``, ``config`` and ``entry``.
        facts: entry name -> what the name depends on, see :func:`tcache.explain.facts_of`.
    """

    launches: list[dict[str, Any]]
    facts: dict[str, dict[str, Any]]


class Bundle:
    """A bundle directory, opened for reading.

    Args:
        root: the directory.

    Raises:
        BundleError: it is no bundle, has another schema, or its ``bundle.json`` does not hold together.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        data = _load_json(self.root / _MANIFEST)
        if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
            raise BundleError(
                f"{self.root}: bundle schema {data.get('schema')!r}, expected {SCHEMA}",
                "pack it again, or load it with the tcache release that wrote it",
            )
        try:
            self.name: str = str(data["name"])
            self.environment = Environment(**data["environment"])
            self.targets: list[str] = [str(target) for target in data["targets"]]
            self.gpus: list[dict[str, Any]] = [_gpu_row(row) for row in data["gpus"]]
            self.manifests: list[dict[str, Any]] = [
                {
                    "file": _inside(row["file"]),
                    "path": row["path"] and _inside(row["path"]),
                    "part": bool(row.get("part")),
                }
                for row in data["manifests"]
            ]
            self.notes: list[str] = [str(note) for note in data.get("notes", [])]
            self.hip_library: str | None = data.get("hip_library") and str(data["hip_library"])
            self.files: dict[str, tuple[int, str]] = {
                _inside(name): (int(row["size"]), str(row["sha256"])) for name, row in data["files"].items()
            }
            self.helpers = [
                Helper(**{**row, "keys": tuple(row["keys"]), "path": _inside(row["path"])}) for row in data["helpers"]
            ]
            if any(row["file"] not in self.files for row in self.manifests):
                raise ValueError("a manifest is not among the files")
            if not isinstance(self.environment.variables, dict):
                raise TypeError("environment.variables is no object")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BundleError(f"{self.root / _MANIFEST}: corrupt: {error!r}", "pack it again") from error
        self._entries: dict[str, dict[str, str]] = {}
        for name in self.files:
            parts = PurePosixPath(name).parts
            if len(parts) == 3 and parts[0] == "entries":
                self._entries.setdefault(parts[1], {})[parts[2]] = name
        self._checked: dict[str, Accepted | Rejected] = {}

    def __repr__(self) -> str:
        return f"Bundle({str(self.root)!r})"

    @property
    def entries(self) -> set[str]:
        """Names of the packed entries."""
        return set(self._entries)

    def entry_files(self, key: str) -> dict[str, Path] | Rejected | None:
        """Return the files of an entry by name, None when it is not packed, or why it cannot be used."""
        names = self._entries.get(key)
        if names is None:
            return None
        found = {}
        for file, name in names.items():
            checked = self.check(name)
            if isinstance(checked, Rejected):
                return checked
            found[file] = self.root / name
        return found

    def check(self, name: str) -> Accepted | Rejected:
        """Compare a file with the size and digest in ``bundle.json``; the answer is kept for the process."""
        known = self._checked.get(name)
        if known is None:
            known = self._checked[name] = self._compare(name)
        return known

    def _compare(self, name: str) -> Accepted | Rejected:
        size, digest = self.files[name]
        path = self.root / name
        if os.path.realpath(path) != os.path.join(os.path.realpath(self.root), name):
            return Rejected(f"{path}: reached through a link")
        try:
            found = path.stat(follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                return Rejected(f"{path}: not a regular file")
            if found.st_size != size:
                return Rejected(f"{path}: {found.st_size} bytes, expected {size}")
            data = path.read_bytes()
        except OSError as error:
            return Rejected(f"{path}: {error.strerror}")
        if hashlib.sha256(data).hexdigest() != digest:
            return Rejected(f"{path}: digest differs from bundle.json")
        return Accepted()

    def helper(self, *, key: str | None = None, source: str | None = None, name: str = "") -> Path | Rejected | None:
        """Return the native helper of that key or source digest, None when none is packed, or why it is refused."""
        for helper in self.helpers:
            if (key is not None and key in helper.keys and PurePosixPath(helper.path).name == name) or (
                source is not None and source == helper.source
            ):
                checked = self._trusted(helper.path)
                return checked if isinstance(checked, Rejected) else self.root / helper.path
        return None

    def _trusted(self, name: str) -> Accepted | Rejected:
        """Helpers are code that this process runs: they must be intact and nobody else's to change."""
        if name not in self.files:
            return Rejected(f"{self.root / name}: not listed in bundle.json")
        path = self.root / name
        for place in (path, *(parent for parent in path.parents if parent.is_relative_to(self.root))):
            try:
                found = place.stat()
            except OSError as error:
                return Rejected(f"{place}: {error.strerror}")
            if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
                return Rejected(f"{place}: writable by everyone")
            if found.st_uid not in (0, os.getuid()):
                return Rejected(f"{place}: owned by uid {found.st_uid}, neither root nor this user")
        return self.check(name)

    def index(self) -> Index:
        """Return what is packed.

        Raises:
            BundleError: the index is missing, its digest differs, or it does not hold together.
        """
        checked = self.check(_INDEX) if _INDEX in self.files else Rejected(f"{self.root}: no index.json listed")
        if isinstance(checked, Rejected):
            raise BundleError(checked.reason, "pack it again")
        data = _load_json(self.root / _INDEX)
        try:
            shared = data["options"]
            facts = {entry: {**row, "options": {**shared, **row["options"]}} for entry, row in data["entries"].items()}
            return Index(list(data["launches"]), facts)
        except (KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{self.root / _INDEX}: corrupt: {error!r}", "pack it again") from error

    def problems(self) -> list[str]:
        """Compare every file of the bundle; return what is wrong, empty when it is intact."""
        found = [checked.reason for name in sorted(self.files) if isinstance(checked := self.check(name), Rejected)]
        found += [row.reason for helper in self.helpers if isinstance(row := self._trusted(helper.path), Rejected)]
        return list(dict.fromkeys(found))


def _gpu_row(row: dict[str, Any]) -> dict[str, Any]:
    fields = {"name": str, "backend": str, "arch": (int, str), "warp_size": int, "multiprocessors": int}
    for field_name, kinds in {**fields, "max_shared_mem": int}.items():
        if not isinstance(row[field_name], kinds):  # type: ignore[arg-type]  # a type or a tuple of them
            raise TypeError(f"gpus: {field_name} is {row[field_name]!r}")
    return dict(row)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name or "\0" in name:
        raise ValueError(f"file name {name!r} leaves the bundle")
    return name


def _load_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise BundleError(f"{path}: larger than {_LARGEST_JSON} bytes", "pack it again")
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise BundleError(
            f"{path.parent}: not a bundle: no {path.name}", "give a directory that `tcache pack` wrote"
        ) from error
    except NotADirectoryError as error:
        raise BundleError(f"{path.parent}: not a bundle: a file, expected a directory") from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: corrupt, expected JSON: {error}", "pack it again") from error
    if not isinstance(data, dict):
        raise BundleError(f"{path}: corrupt, expected a JSON object", "pack it again")
    return data


def environment_fields(environment: Environment) -> dict[str, Any]:
    """Return an environment as the JSON fields of ``bundle.json``."""
    return asdict(environment)
