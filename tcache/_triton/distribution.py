"""Which Triton this is, without reading all of it: the digests that its installer recorded, and whether they hold.

``triton_key`` hashes 415 MB of ``libtriton`` in every process. An installed wheel has a ``RECORD`` with the SHA-256 and
the size of each file, written after the files were. One digest over these rows names the distribution. Python sources
are read and compared, 1 MB in all: a patched one may be as large as before, and how old it looks says nothing where it
was copied over the installed one (``COPY`` in a Dockerfile keeps its time) or where an image has one time for all of
its files. Libraries and tools are hashed only where they were written after ``RECORD``; their sizes must agree.

Source: the ``RECORD`` file of the specification of installed projects (packaging.python.org); what enters Triton's
key: ``triton_key`` in ``triton/runtime/cache.py`` and ``CUDABackend.hash`` in ``triton/backends/nvidia/compiler.py``.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.machinery
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import triton

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Distribution", "distribution"]

_ELSEWHERE = (
    "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_MOCK_PTX_VERSION",
)  # fmt: skip
"""Variables that put a file of another origin in the place of one of the distribution's."""


@dataclass(frozen=True)
class Distribution:
    """The installed Triton.

    Attributes:
        digest: SHA-256 over the recorded digests; empty where there is no record, or a problem: what an edited Triton
            compiled must not be taken for the release's.
        problem: why the digest does not describe what would run; None when it does.
        files: name -> SHA-256 in hexadecimal, as recorded.
    """

    digest: str
    problem: str | None = None
    files: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def distribution(root: str | None = None, version: str | None = None) -> Distribution:
    """Describe the installed Triton: some milliseconds.

    Args:
        root: the directory that ``triton`` is installed in.
        version: its release.
    """
    root = root or os.path.dirname(os.path.dirname(os.path.abspath(triton.__file__)))
    record = os.path.join(root, f"triton-{version or triton.__version__}.dist-info", "RECORD")
    for name in _ELSEWHERE:
        if os.environ.get(name):
            return Distribution("", f"{name} is set")
    return _compared(root, record)


@functools.cache  # as Triton computes its own key once in a process
def _compared(root: str, record: str) -> Distribution:
    try:
        written = os.stat(record).st_mtime_ns
        with open(record, encoding="utf-8", newline="") as file:
            rows = sorted((row[0], row[1], row[2]) for row in csv.reader(file) if len(row) == 3 and _counts(row))
        summed = hashlib.sha256("\n".join(map(",".join, rows)).encode()).hexdigest()
        files = {name: _hexadecimal(digest) for name, digest, _ in rows}
    except (OSError, ValueError, csv.Error) as error:
        return Distribution("", f"Triton was not installed from a wheel: {error}")
    if not any(name.startswith("triton/_C/libtriton") for name in files):
        return Distribution("", f"{record} does not list libtriton")
    for name, digest, size in rows:
        path = os.path.join(root, name)
        try:
            problem = _problem(path, digest, int(size), written)
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        if problem is not None:
            return Distribution("", f"{path}: {problem}")
    added = _added(root, {name for name, *_ in rows})
    if added is not None:
        return Distribution("", f"{added}: not of the installed release")
    return Distribution(summed, None, files)


def _problem(path: str, digest: str, size: int, written: int) -> str | None:
    found = os.stat(path)
    if found.st_size != size:
        return f"{found.st_size} bytes, installed with {size}"
    if (path.endswith(".py") or found.st_mtime_ns > written) and _digest(path) != digest:
        return "edited after it was installed"
    return None


def _added(root: str, recorded: set[str]) -> str | None:
    """Return a module that ``triton_key`` would find and no record lists: a backend plugged in, say."""
    places = {
        "/".join(name.split("/")[:depth]) for name in recorded if name.startswith(_WALKED) for depth in _depths(name)
    }
    for place in sorted(places):
        try:
            with os.scandir(os.path.join(root, place)) as listing:
                for row in listing:
                    package = row.is_dir() and _initializer(row.path)
                    name = f"{place}/{row.name}/{package}" if package else f"{place}/{row.name}"
                    if (package or row.name.endswith((".py", ".so", ".pyc"))) and name not in recorded:
                        return os.path.join(root, name)
        except OSError as error:
            return f"{place} ({error.strerror})"
    return None


def _initializer(place: str) -> str | None:
    """Return the file that makes a directory a package, in the order in which Python looks for one."""
    suffixes = importlib.machinery.all_suffixes()
    return next((f"__init__{end}" for end in suffixes if os.path.isfile(os.path.join(place, f"__init__{end}"))), None)


def _depths(name: str) -> range:
    """Return how many parts the directories above a file have, from ``triton/compiler`` down."""
    return range(2, name.count("/") + 1)


_WALKED = ("triton/compiler/", "triton/backends/", "triton/language/", "triton/runtime/")
"""Below the first three, ``triton_key`` hashes every module it finds; a package below the last would hide a module."""


def _counts(row: list[str]) -> bool:
    """Return whether a file may change what is compiled: sources, libraries, tools; no headers and no tests."""
    name, digest, size = row
    if not name.startswith("triton/") or not digest.startswith("sha256=") or not (size.isascii() and size.isdigit()):
        return False
    return name.endswith((".py", ".so", ".pyd", ".bc", ".c")) or "/bin/ptxas" in name


def _hexadecimal(digest: str) -> str:
    """Return a digest as ``triton_key`` writes it, from ``sha256=`` and unpadded base 64."""
    text = digest.partition("=")[2]
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()


def _digest(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return "sha256=" + base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()
