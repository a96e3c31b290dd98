"""``bundle.json``: parsed and checked as far as reading it can: names stay inside, types are what they should be."""

from __future__ import annotations

import itertools
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tcache.environment import Environment
from tcache.errors import BundleError
from tcache.index import parse_json
from tcache.keys.gpu import GPU

__all__ = ["MANIFEST", "SCHEMA", "Head", "Helper", "read_head"]

SCHEMA = 1
MANIFEST = "bundle.json"
_LARGEST_JSON = 256 * 1024 * 1024


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
class Head:
    """What ``bundle.json`` says.

    Attributes:
        name: what the bundle is called.
        environment: what it was packed for.
        targets: compile targets, such as ``cuda:90:32``.
        gpus: the GPUs it was packed for, as the fields of :class:`tcache.keys.gpu.GPU`.
        manifests: copies of the manifests: ``file`` in the bundle, ``path`` in the project or None, whether it is
            only a ``part`` that another includes, and the names of the ``gpus`` it was replayed for, None for all.
        helpers: native helpers.
        files: name -> size and SHA-256 of every file.
        notes: what a reader should know.
        hip_library: where the service has ``libamdhip64.so``, which HIP helpers are made for.
    """

    name: str
    environment: Environment
    targets: list[str]
    gpus: list[dict[str, Any]]
    manifests: list[dict[str, Any]]
    helpers: list[Helper]
    files: dict[str, tuple[int, str]]
    notes: list[str]
    hip_library: str | None


def read_head(root: Path) -> Head:
    """Read a bundle's head.

    Raises:
        BundleError: it is absent, has another schema, or does not hold together.
    """
    data = _load_json(root / MANIFEST)
    _check_schema(root, data.get("schema"))
    try:
        files = _file_rows(data["files"])
        return Head(
            name=str(data["name"]),
            environment=Environment.parse(data["environment"]),
            targets=[str(target) for target in data["targets"]],
            gpus=[asdict(GPU.parse(row)) for row in data["gpus"]],
            manifests=[_manifest_row(row, files) for row in data["manifests"]],
            helpers=[_helper_row(row) for row in data["helpers"]],
            files=files,
            notes=[str(note) for note in data.get("notes", [])],
            hip_library=data.get("hip_library") and str(data["hip_library"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BundleError(f"{root / MANIFEST}: corrupt: {error!r}", "pack it again") from error


def _check_schema(root: Path, schema: Any) -> None:
    if type(schema) is int and schema == SCHEMA:
        return
    newer = type(schema) is int and schema > SCHEMA
    raise BundleError(
        f"{root}: bundle schema {schema!r}, expected {SCHEMA}",
        "upgrade triton-tcache, or pack it again with this release" if newer else "pack it again",
    )


_STRANGE = ("\n/", "/\n", "//", "/.", "\n.", "\n\n", "\\", "\0")
"""What is in every name that :func:`_inside` refuses, and in few others: for one search through all names."""


def _file_rows(rows: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Check all names at once: a bundle of a thousand entries opens in milliseconds."""
    names = "\n" + "\n".join(rows) + "\n"
    if rows and (names.count("\n") != len(rows) + 1 or any(part in names for part in _STRANGE)):
        for name in rows:
            _inside(name)
    files = {name: (row["size"], row["sha256"]) for name, row in rows.items()}
    for size, digest in files.values():
        if type(size) is not int or type(digest) is not str:
            raise TypeError(f"files: size {size!r}, sha256 {digest!r}")
    return files


def _manifest_row(row: dict[str, Any], files: dict[str, tuple[int, str]]) -> dict[str, Any]:
    if row["file"] not in files:
        raise ValueError("a manifest is not among the files")
    gpus = row.get("gpus")
    if gpus is not None and not (isinstance(gpus, list) and all(isinstance(name, str) for name in gpus)):
        raise TypeError(f"manifests: gpus is {gpus!r}")
    path = row["path"] and _inside(row["path"])
    return {"file": _inside(row["file"]), "path": path, "part": bool(row.get("part")), "gpus": gpus}


def _helper_row(row: dict[str, Any]) -> Helper:
    found = Helper(**{**row, "keys": tuple(row["keys"]), "path": _inside(row["path"])})
    if not all(isinstance(text, str) for text in (found.name, found.source, *found.keys)):
        raise TypeError("helpers: a text is none")
    return found


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name or "\0" in name or "\n" in name:
        raise ValueError(f"file name {name!r} leaves the bundle")
    return name


_ENTRY = re.compile(r"[A-Z2-7]{52}")


def _no_bundle(root: Path) -> BundleError:
    """Say of a directory without ``bundle.json`` what it is instead, as far as that can be told."""
    hint = "give a directory that `tcache pack` wrote"
    if not root.exists():
        return BundleError(f"{root}: not a bundle: there is no such directory", hint)
    if (root / "oci-layout").is_file():
        what = "an image layout: a service reads the bundle in the unpacked image, at /opt/tcache/<name>"
        return BundleError(f"{root}: not a bundle: {what}")
    some = itertools.islice(root.glob("*"), 32)  # a name given by mistake may be of a large place
    if any(next(child.glob("__grp__*.json"), None) is not None for child in some if _ENTRY.fullmatch(child.name)):
        return BundleError(f"{root}: not a bundle: a cache of Triton's: name it with TRITON_CACHE_DIR")
    return BundleError(f"{root}: not a bundle: no {MANIFEST}", hint)


def _load_json(path: Path) -> dict[str, Any]:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{path}: not a regular file", "give a directory that `tcache pack` wrote")
            if status.st_size > _LARGEST_JSON:
                raise BundleError(f"{path}: larger than {_LARGEST_JSON} bytes", "pack it again")
            text = file.read(_LARGEST_JSON)
        data = parse_json(text)
    except FileNotFoundError as error:
        raise _no_bundle(path.parent) from error
    except NotADirectoryError as error:
        wheel = path.parent.suffix == ".whl"
        wanted = "a wheel: install it with pip, and it is found by itself" if wheel else "a file, expected a directory"
        raise BundleError(f"{path.parent}: not a bundle: {wanted}") from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: corrupt, expected JSON: {error}", "pack it again") from error
    if not isinstance(data, dict):
        raise BundleError(f"{path}: corrupt, expected a JSON object", "pack it again")
    return data
