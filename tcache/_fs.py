"""The file system, once: atomic writes, sorted walks, digests, all-or-nothing output directories."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tcache.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["atomic_write", "new_directory", "new_file", "sha256_bytes", "sha256_file", "sorted_walk", "tree_size"]


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def atomic_write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` so that a reader or a crash sees the old bytes or the new, never a mixture.

    Raises:
        OSError: the directory is not writable; nothing has changed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def sorted_walk(root: Path) -> Iterator[str]:
    """Yield the regular files below ``root`` as sorted POSIX paths relative to it.

    Symbolic links are not followed and not listed: nothing that tcache writes is one.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                found.append(path.relative_to(root).as_posix())
    yield from sorted(found)


def tree_size(root: Path) -> int:
    """Return the bytes of all regular files below ``root``."""
    return sum((root / name).stat().st_size for name in sorted_walk(root))


@contextlib.contextmanager
def new_directory(target: Path, *, force: bool = False, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Build a directory beside ``target`` and move it there when the block ends without an exception.

    A failure leaves nothing behind, and an existing ``target`` is never touched unless ``force`` is set.

    Args:
        target: where the directory shall be.
        force: replace an existing directory that is empty or ``ours``.
        ours: says of an existing directory whether it may be deleted: a slip of the hand is no request.

    Raises:
        OutputError: ``target`` exists, or its parent cannot be written.
    """
    _free(target, force=force)
    if target.exists() and any(target.iterdir()) and not ours(target):
        raise OutputError(
            f"{target}: holds other things than `tcache pack` writes and is not replaced",
            "choose another --output, or delete it yourself",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise _refused(target, error) from error
    try:
        staging.chmod(0o755)
        yield staging
        old = _aside(target)
        try:
            os.rename(staging, target)
        except OSError:
            if old is not None:
                os.rename(old / target.name, target)
            raise
        finally:
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise _refused(target, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _aside(target: Path) -> Path | None:
    """Move an existing directory into one beside it: deleting it may fail half-way, moving it back does not."""
    if not target.exists():
        return None
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        os.rename(target, folder / target.name)
    except OSError:
        folder.rmdir()
        raise
    return folder


def new_file(target: Path, data: bytes, *, force: bool = False) -> None:
    """Write a file that a failure leaves absent, or as it was.

    Args:
        target: where the file shall be.
        data: its bytes.
        force: replace an existing file.

    Raises:
        OutputError: ``target`` exists, or cannot be written.
    """
    _free(target, force=force, directory=False)
    try:
        atomic_write(target, data)
    except OSError as error:
        raise _refused(target, error) from error


def _free(target: Path, *, force: bool, directory: bool = True) -> None:
    """Refuse a name that is taken: by the other kind of thing always, by the same kind unless ``force``."""
    if len(target.name.encode()) > 200:
        raise OutputError(f"{target.name[:40]}…: the name is too long", "choose another --output")
    replaceable = force and (target.is_dir() if directory else target.is_file())
    if target.is_symlink() or (target.exists() and not replaceable):
        kind = "link" if target.is_symlink() else "directory" if target.is_dir() else "file"
        other = "choose another --output"
        same = not target.is_symlink() and target.is_dir() == directory
        raise OutputError(
            f"{target}: output exists already (a {kind})", f"{other}, or pass --force to replace it" if same else other
        )


def _refused(target: Path, error: OSError) -> OutputError:
    blocked = isinstance(error, (FileExistsError, NotADirectoryError))
    reason = "a parent is a file" if blocked else error.strerror or error
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "free some space, or choose another --output; nothing was left behind" if full else "choose another --output"
    return OutputError(f"{target}: cannot write here: {reason}", hint)
