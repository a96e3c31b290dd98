"""Which Triton this is, without reading it: the digests that its installer recorded, and whether they hold.

``triton_key`` hashes 415 MB of ``libtriton`` in every process. An installed wheel has a ``RECORD`` with the SHA-256 and
the size of each file, written after the files were. One digest over these rows names the distribution; a file that is
missing, of another size, or written after ``RECORD`` is hashed itself before it is believed.

Source: the ``RECORD`` file of the specification of installed projects (packaging.python.org); what enters Triton's
key: ``triton_key`` in ``triton/runtime/cache.py`` and ``CUDABackend.hash`` in ``triton/backends/nvidia/compiler.py``.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import os
from dataclasses import dataclass

import triton

__all__ = ["Distribution", "distribution"]

_ELSEWHERE = (
    "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_MOCK_PTX_VERSION",
)  # fmt: skip
"""Variables that put a file of another origin in the place of one of the distribution's."""


@dataclass(frozen=True)
class Distribution:
    """The installed Triton.

    Attributes:
        digest: SHA-256 over the recorded digests; empty where there is no record.
        problem: why the digest does not describe what would run; None when it does.
    """

    digest: str
    problem: str | None = None


def distribution(root: str | None = None, version: str | None = None) -> Distribution:
    """Describe the installed Triton: about a millisecond.

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
    except (OSError, ValueError) as error:
        return Distribution("", f"Triton was not installed from a wheel: {error}")
    if not any(name.startswith("triton/_C/libtriton") for name, *_ in rows):
        return Distribution("", f"{record} does not list libtriton")
    summed = hashlib.sha256("\n".join(map(",".join, rows)).encode()).hexdigest()
    for name, digest, size in rows:
        path = os.path.join(root, name)
        try:
            found = os.stat(path)
        except OSError as error:
            return Distribution(summed, f"{path}: {error.strerror}")
        if found.st_size != int(size):
            return Distribution(summed, f"{path}: {found.st_size} bytes, installed with {size}")
        if found.st_mtime_ns > written and _digest(path) != digest:
            return Distribution(summed, f"{path}: edited after it was installed")
    added = _added(root, {name for name, *_ in rows})
    return Distribution(summed, f"{added}: not of the installed release" if added else None)


def _added(root: str, recorded: set[str]) -> str | None:
    """Return a module that ``triton_key`` would find and no record lists: a backend plugged in, say."""
    places = {
        "/".join(name.split("/")[:depth]) for name in recorded if name.startswith(_WALKED) for depth in _depths(name)
    }
    for place in sorted(places):
        try:
            with os.scandir(os.path.join(root, place)) as listing:
                for row in listing:
                    package = row.is_dir() and os.path.isfile(os.path.join(row.path, "__init__.py"))
                    name = f"{place}/{row.name}/__init__.py" if package else f"{place}/{row.name}"
                    if (package or row.name.endswith((".py", ".so"))) and name not in recorded:
                        return os.path.join(root, name)
        except OSError as error:
            return f"{place} ({error.strerror})"
    return None


def _depths(name: str) -> range:
    """Return how many parts the directories above a file have, from ``triton/compiler`` down."""
    return range(2, name.count("/") + 1)


_WALKED = ("triton/compiler/", "triton/backends/", "triton/language/")
"""Below these, ``triton_key`` hashes every module it finds."""


def _counts(row: list[str]) -> bool:
    """Return whether a file may change what is compiled: sources, libraries, tools; no headers and no tests."""
    name, digest, size = row
    if not name.startswith("triton/") or not digest.startswith("sha256=") or not size.isdigit():
        return False
    return name.endswith((".py", ".so", ".pyd", ".bc", ".c")) or "/bin/ptxas" in name


def _digest(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return "sha256=" + base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()
