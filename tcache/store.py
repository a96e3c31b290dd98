"""Best configs: a directory of JSON files meant to be read, diffed and merged in git, one per (GPU, kernel)."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache._fs import atomic_write, sha256_bytes
from tcache.entries import REPAIR, SCHEMA, Entry, Kernel, Record, Timing
from tcache.errors import StoreError
from tcache.keys.bucket import bucket_text
from tcache.keys.gpu import GPU
from tcache.keys.shape import ShapeKey
from tcache.scan import Scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import filelock

__all__ = ["SCHEMA", "Entry", "Kernel", "Record", "Store", "Timing", "default_store"]


class Store:
    """A directory of best configs.

    Args:
        root: the directory; it need not exist until something is written.

    Reads take no lock. Writes take the record's lock, read again, merge, and replace the file atomically. An entry
    found once is answered from memory; whatever is not in memory is looked for in the file as it is now.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._read: dict[Path, tuple[tuple[int, int, int], Scan]] = {}
        self._seen: dict[tuple[str, str, str, ShapeKey, str], Entry] = {}

    def path(self, gpu: GPU, kernel: Kernel) -> Path:
        return self.root / gpu.slug / f"{kernel.id}.json"

    def read(self, path: Path) -> Scan | None:
        """Return the record in a file, or None when there is no such file.

        Raises:
            StoreError: the file is there and is not a store file of this schema, or cannot be read.
        """
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._read.get(path)
            if known is None or known[0] != stamp:
                known = self._read[path] = (stamp, Scan(path.read_text("utf-8"), path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnicodeDecodeError as error:
            raise StoreError(f"{path}: corrupt store file, expected UTF-8", REPAIR) from error
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}", "check the file's permissions") from error
        return known[1]

    def get(self, gpu: GPU, kernel: Kernel, shape: ShapeKey, source: str, *, fresh: bool = False) -> Entry | None:
        """Return the entry for a shape, stale or not, or None.

        A record of the same function under another module name counts when the source identity is the same: moving a
        file changes nothing.

        Args:
            gpu: on which GPU.
            kernel: which kernel.
            shape: which shape key.
            source: the kernel's source identity now.
            fresh: look into the file, also for an entry found before: another process may have tuned it again.

        Raises:
            StoreError: the entry or the record's head is corrupt, or belongs to another GPU of the same slug.
        """
        key = (gpu.name, kernel.module, kernel.qualname, shape, source)
        if not fresh:
            entry = self._seen.get(key)
            if entry is not None:
                return entry
        entry = self._find(gpu, kernel, shape, source)
        if entry is not None and entry.source == source:
            self._seen[key] = entry
        return entry

    def _find(self, gpu: GPU, kernel: Kernel, shape: ShapeKey, source: str) -> Entry | None:
        record = self._checked(self.path(gpu, kernel), gpu)
        entry = record.get(shape) if record is not None else None
        if entry is not None:
            return entry
        suffix = Kernel("", kernel.qualname, ()).id + ".json"
        for path in sorted((self.root / gpu.slug).glob(f"*{_escaped(suffix)}")):
            moved = self._checked(path, gpu)
            if moved is not None and moved.qualname == kernel.qualname:
                entry = moved.get(shape)
                if entry is not None and entry.source == source:
                    return entry
        return None

    def shapes(self, gpu: GPU, kernel: Kernel, source: str) -> dict[ShapeKey, Entry]:
        """Return all entries of a kernel whose source is the present one, for a search of the nearest."""
        record = self._checked(self.path(gpu, kernel), gpu)
        found = record.record().entries if record is not None else {}
        return {shape: entry for shape, entry in found.items() if entry.source == source}

    def _checked(self, path: Path, gpu: GPU) -> Scan | None:
        record = self.read(path)
        if record is not None and record.gpu.name != gpu.name:
            raise StoreError(
                f"{path}: belongs to {record.gpu.name!r}, not {gpu.name!r}", "keep the two in separate stores"
            )
        return record

    def update(
        self,
        gpu: GPU,
        kernel: Kernel,
        shape: ShapeKey,
        change: Callable[[Entry | None], Entry],
        buckets: dict[str, Any] | None = None,
    ) -> Entry:
        """Replace one entry by ``change(entry)`` under the record's lock and return the new entry.

        ``buckets`` is noted in the record's head for its readers.

        Raises:
            StoreError: the store cannot be written or locked, or the record is corrupt.
        """
        path = self.path(gpu, kernel)
        with self._lock(gpu, kernel.id):
            record = self._checked(path, gpu) or Scan(Record(gpu, kernel, {}).text(), path)
            head = dict(record.extra.get("kernel", {}))
            head.pop("buckets", None)
            if buckets:
                head["buckets"] = {name: bucket_text(spec) for name, spec in buckets.items()}
            entry = change(record.get(shape))
            text = record.replacing(entry, {**record.extra, "kernel": head})
            try:
                atomic_write(path, text.encode())
            except OSError as error:
                raise self._unwritable(path, error) from error
        self._seen.pop((gpu.name, kernel.module, kernel.qualname, shape, entry.source), None)
        return entry

    def tuning_lock(self, gpu: GPU, kernel: Kernel, shape: str) -> contextlib.AbstractContextManager[None]:
        """Return the lock of tuning one shape: of N processes one holds it, and a holder that dies releases it.

        Raises:
            StoreError: when entered: the directory cannot be written, or the file system has no locks.
        """
        return self._lock(gpu, f"{kernel.id}-{sha256_bytes(shape.encode())[:12]}")

    def journal(self, gpu: GPU, kernel: Kernel, shape: str) -> Path:
        """Return where the results of a running tuning are kept until they are in the record."""
        return self._scratch(gpu) / f"{kernel.id}-{sha256_bytes(shape.encode())[:12]}.jsonl"

    def _scratch(self, gpu: GPU) -> Path:
        return self.root / gpu.slug / ".tuning"

    @contextlib.contextmanager
    def _lock(self, gpu: GPU, name: str) -> Iterator[None]:
        path = self._scratch(gpu) / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ignore = path.parent / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
            lock = _acquired(path)
        except (OSError, NotImplementedError) as error:
            raise self._unwritable(path, error) from error
        try:
            yield
        finally:
            lock.release()

    def _unwritable(self, path: Path, error: Exception) -> StoreError:
        reason = getattr(error, "strerror", None) or error
        return StoreError(
            f"{path}: cannot write the store: {reason}",
            "point TCACHE_STORE to a writable directory on a file system with locks",
        )

    def records(self) -> Iterator[tuple[Path, Record]]:
        """Yield every record of the store in sorted order.

        Raises:
            StoreError: a file is corrupt.
        """
        for path in sorted(self.root.glob("*/*.json")):
            record = self.read(path)
            if record is not None:
                yield path, record.record()

    def gpus(self) -> dict[str, GPU]:
        """Return the GPUs the store has best configs for, by name."""
        return {record.gpu.name: record.gpu for _, record in self.records()}


def _acquired(path: Path) -> filelock.BaseFileLock:
    """Take a lock that its holder's death releases.

    Releases of filelock from 3.21 on take a lock file without that property where the file system has no locks; some
    can be told not to, some say it by the lock's class.

    Raises:
        OSError, NotImplementedError: the file system has no locks or takes no files.
    """
    import filelock

    known = inspect.signature(filelock.FileLock.__init__).parameters
    options: dict[str, Any] = {"fallback_to_soft": False} if "fallback_to_soft" in known else {}
    lock = filelock.FileLock(path, **options)
    lock.acquire()
    if isinstance(lock, filelock.SoftFileLock):
        lock.release()
        raise NotImplementedError("the file system has no locks")
    return lock


def _escaped(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


def default_store() -> Path | None:
    """Return the store used when nothing else is said, ``~/.tcache/store``; None for a user without a home."""
    home = os.path.expanduser("~")
    return Path(home, ".tcache", "store") if os.path.isabs(home) else None
