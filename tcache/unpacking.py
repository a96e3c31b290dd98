"""Unpacking archives that somebody else may have made.

No member leaves its root: no ``..``, no absolute path, no link, no device, no name twice; and nothing unpacks to more
than a limit, whatever its header says.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import stat
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from tcache.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LIMITS", "Limits", "changed", "inside", "unpack_tar", "unpack_zip"]


@dataclass(frozen=True)
class Limits:
    """What an archive may unpack to.

    Attributes:
        bytes: of all its files together.
        files: how many members.
    """

    bytes: int = 16 * 1024**3
    files: int = 1_000_000


LIMITS = Limits()
"""Beyond any bundle."""


def changed(file: IO[bytes], prefix: str) -> str | None:
    """Return what a layer adds or removes at, above or below ``prefix``; None when nothing but directories.

    Source of the marks of removal: https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts.
    """
    with _opened_tar(file) as archive:
        for info in archive:
            name = info.name.removeprefix("./")
            folder, _, last = name.rpartition("/")
            if last == ".wh..wh..opq":
                name = folder
            elif last.startswith(".wh."):
                name = f"{folder}/{last.removeprefix('.wh.')}".removeprefix("/")
            elif info.isdir():
                continue
            if not name or f"{prefix}/".startswith(f"{name}/") or name.startswith(f"{prefix}/"):
                return name
    return None


def unpack_tar(file: IO[bytes], target: Path, limits: Limits, *, what: str, prefix: str = "") -> None:
    """Unpack regular files and directories of a tar archive, compressed with gzip or not.

    Args:
        file: the archive, seekable.
        target: an existing directory.
        limits: what it may unpack to.
        what: the archive's name, for messages.
        prefix: only members below it are unpacked and judged.

    Raises:
        BundleError: it is damaged, or a member is not what a bundle may have; ``target`` then has some of the others.
    """
    box = _Box(target, limits, what)
    try:
        with _opened_tar(file) as archive:
            for number, info in enumerate(archive):
                if info.size < 0 or number >= limits.files:  # the former leads backwards, for ever
                    reason = f"more than {limits.files} members" if info.size >= 0 else f"a size of {info.size} bytes"
                    raise BundleError(f"{what}: {reason}")
                name = info.name.removeprefix("./") or "."
                if prefix and name != prefix and not name.startswith(f"{prefix}/"):
                    continue
                if info.isdir():
                    box.folder(name)
                elif info.isreg() and not info.issparse():
                    source = archive.extractfile(info)
                    assert source is not None
                    box.file(name, source, info.size)
                else:
                    raise BundleError(f"{what}: member {info.name!r} is neither a file nor a directory")
            assert archive.fileobj is not None
            archive.fileobj.seek(archive.offset)  # where the next header would be
            if archive.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise BundleError(f"{what}: damaged archive: it has no end", "copy or pack it again")
    except Exception as error:
        judged = _judged(error, what)
        if judged is error:
            raise
        raise judged from error


@contextlib.contextmanager
def _opened_tar(file: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """Open a tar archive, compressed with gzip or not; nothing larger than :data:`_LARGEST_HEADER` is read at once.

    tarfile reads long names and PAX headers in one piece, whatever their size: of zeros, gigabytes fit in a few
    megabytes of gzip.
    """
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    with contextlib.ExitStack() as stack:
        source: Any = stack.enter_context(gzip.GzipFile(fileobj=file)) if compressed else file
        yield stack.enter_context(tarfile.open(fileobj=_Sparing(source), mode="r:"))  # type: ignore[call-overload]


_LARGEST_HEADER = 16 * 1024 * 1024


class _Sparing:
    """A seekable file that refuses to be read in one large piece."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return bytes(self._file.read(size))


def unpack_zip(path: Path, target: Path, limits: Limits = LIMITS) -> None:
    """Unpack a zip archive into an existing directory.

    Raises:
        BundleError: it is damaged, or a member is not what a bundle may have.
    """
    box = _Box(target, limits, str(path))
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                if info.flag_bits & 0x1:
                    raise BundleError(f"{path}: member {info.filename!r} is encrypted")
                if info.is_dir():
                    box.folder(info.filename.rstrip("/"))
                elif kind in (0, stat.S_IFREG):
                    with archive.open(info) as source:
                        box.file(info.filename, source, info.file_size)
                else:
                    raise BundleError(f"{path}: member {info.filename!r} is neither a file nor a directory")
    except Exception as error:
        judged = _judged(error, str(path))
        if judged is error:
            raise
        raise judged from error


class _Box:
    """A directory that members are put into, and never beside."""

    def __init__(self, target: Path, limits: Limits, what: str) -> None:
        self._target, self._limits, self._what = target, limits, what
        self._left = limits.bytes
        self._count = 0
        self._seen: set[str] = set()

    def _place(self, name: str) -> Path:
        inside(name, self._what)
        self._count += 1
        if self._count > self._limits.files:
            raise BundleError(f"{self._what}: more than {self._limits.files} members")
        return self._target / name

    def folder(self, name: str) -> None:
        if name != ".":
            self._made(self._place(name))

    def _made(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise BundleError(f"{self._what}: {path.relative_to(self._target)} is both file and directory") from error

    def file(self, name: str, source: IO[bytes], size: int) -> None:
        path = self._place(name)
        if name in self._seen or path.exists():
            raise BundleError(f"{self._what}: member {name!r} stands twice")
        self._seen.add(name)
        self._made(path.parent)
        count = 0
        with path.open("xb") as file:
            for block in iter(lambda: source.read(1 << 20), b""):
                count += len(block)
                if count > min(size, self._left):
                    reason = f"is larger than the {size} bytes it says" if count > size else "exceeds the limit"
                    raise BundleError(f"{self._what}: member {name!r} {reason}")
                file.write(block)
        if count != size:
            raise BundleError(f"{self._what}: member {name!r} has {count} bytes, not the {size} it says")
        self._left -= count


def inside(name: str, what: str) -> str:
    """Return a member's name.

    Raises:
        BundleError: it leads out of the archive's root, or is no plain name.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name or "\0" in name or name == ".":
        raise BundleError(f"{what}: member {name!r} leaves the archive's root")
    return name


_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE)


def _judged(error: Exception, what: str) -> Exception:
    """Return what an exception met while unpacking means: the standard library's parsers raise whatever comes."""
    if isinstance(error, BundleError) or (isinstance(error, OSError) and error.errno in _OURS):
        return error
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return BundleError(f"{what}: damaged archive: {line[:200]}", "copy or pack it again")
