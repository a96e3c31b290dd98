"""The bundle format: what ``pack`` writes and ``load`` reads.

    bundle.json        schema, name, environment, GPUs, targets, every file's size and SHA-256
    index.json         see :mod:`tcache.index`
    store/             the best configs referenced
    entries/<KEY>/     kernel.json and the binary
    native/            native helpers
    manifests/         the manifests it was packed from

Nothing in a bundle is written at load time, and no file is used before its digest was compared. Opening reads
``bundle.json`` and nothing else; a file is looked at when it is asked for, and again when it has changed since.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path, PurePosixPath

from tcache._binary import entry_problem, needed_glibc
from tcache.environment import Accepted, Environment, Rejected, compatible, environment_fields, libc, library_tag
from tcache.errors import BundleError
from tcache.head import MANIFEST, SCHEMA, Helper, read_head
from tcache.index import Index

__all__ = [
    "SCHEMA",
    "Accepted",
    "Bundle",
    "Environment",
    "Helper",
    "Index",
    "Rejected",
    "compatible",
    "environment_fields",
    "library_tag",
]

_INDEX = "index.json"
_LARGEST_FILE = 1024 * 1024 * 1024
_SMALL = 256 * 1024
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Neither a link nor, should somebody have put one there, a pipe that blocks."""
_Stamp = tuple[int, int, int, int]


class Bundle:
    """A bundle directory, opened for reading.

    Args:
        root: the directory.

    Attributes:
        root: the directory as given.
        place: the same, absolute and free of links: a service may change its working directory, and a link that is
            turned to another bundle later does not mix the two.
        files: name -> size and SHA-256 of every file.

    Raises:
        BundleError: it is no bundle, has another schema, or its ``bundle.json`` does not hold together.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.place = Path(os.path.realpath(root))
        self._prefix = os.path.join(self.place, "")
        self._head = self._stamp(MANIFEST)
        head = read_head(self.root)
        self.name, self.environment, self.targets = head.name, head.environment, head.targets
        self.gpus, self.manifests, self.helpers, self.files = head.gpus, head.manifests, head.helpers, head.files
        self.notes, self.hip_library = head.notes, head.hip_library
        self._grouped: dict[str, dict[str, str]] | None = None
        self._checked: dict[str, _Stamp] = {}
        self._opened: dict[tuple[str, tuple[_Stamp, ...]], dict[str, Path]] = {}
        self._index: Index | None = None

    def __repr__(self) -> str:
        return f"Bundle({str(self.root)!r})"

    def _groups(self) -> dict[str, dict[str, str]]:
        if self._grouped is None:
            grouped: dict[str, dict[str, str]] = {}
            for name in self.files:
                if name.startswith("entries/"):
                    parts = name.split("/")
                    if len(parts) == 3:
                        grouped.setdefault(parts[1], {})[parts[2]] = name
            self._grouped = grouped
        return self._grouped

    @property
    def entries(self) -> set[str]:
        """Names of the packed entries."""
        return set(self._groups())

    def entry_files(self, key: str) -> dict[str, Path] | Rejected | None:
        """Return the files of an entry by name, None when it is not packed, or why it cannot be used.

        It is the same object until a file changes: who has read the files asks again, to know what was read.
        """
        names = self._groups().get(key)
        if names is None:
            return None
        stamps = []
        for name in names.values():
            stamp = self._stamp(name)
            if isinstance(stamp, Rejected):
                return self._since_opened(stamp)
            stamps.append(stamp)
        known = self._opened.get((key, tuple(stamps)))
        if known is not None:
            return known
        problem = self._entry_problem(key, names)
        if problem is not None:
            return self._since_opened(
                problem
            )  # not kept: no descriptor left, or a network's error, may be over at the next launch
        files = {file: self.place / name for file, name in names.items()}
        return self._opened.setdefault((key, tuple(stamps)), files)

    def _since_opened(self, problem: Rejected) -> Rejected:
        """Say of a problem that the whole bundle is another one now: copied or installed over the one in use."""
        now = self._stamp(MANIFEST)
        if isinstance(now, Rejected) or now == self._head:
            return problem
        return Rejected(f"{problem.reason}; the bundle was replaced after this process opened it", problem.kind)

    def _entry_problem(self, key: str, names: dict[str, str]) -> Rejected | None:
        contents = {}
        for file, name in names.items():
            data = self.read(name)
            if isinstance(data, Rejected):
                return data
            contents[file] = data
        problem = entry_problem(key, contents)
        return None if problem is None else Rejected(f"{self.root / 'entries' / key}: {problem}")

    def _problem(self, name: str) -> Rejected | None:
        data = self.read(name)
        return data if isinstance(data, Rejected) else None

    def check(self, name: str) -> Accepted | Rejected:
        """Compare a file with the size and digest in ``bundle.json``; what agrees does while the file is unchanged."""
        stamp = self._stamp(name)
        if isinstance(stamp, Rejected):
            return stamp
        if self._checked.get(name) != stamp:
            data = self.read(name)
            if isinstance(data, Rejected):
                return data
            self._checked[name] = stamp
        return Accepted()

    def _stamp(self, name: str) -> _Stamp | Rejected:
        try:
            found = os.lstat(self._prefix + name)
        except (OSError, ValueError) as error:
            return Rejected(f"{self.root / name}: {_said(error)}")
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def read(self, name: str) -> bytes | Rejected:
        """Return a file's bytes if they are those packed, else why not."""
        if name not in self.files:
            return Rejected(f"{self.root / name}: not listed in bundle.json")
        size, digest = self.files[name]
        if size > _LARGEST_FILE:
            return Rejected(f"{self.root / name}: larger than {_LARGEST_FILE} bytes")
        try:
            handle = os.open(self._prefix + name, _READ)
            try:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    return Rejected(f"{self.root / name}: not a regular file")
                if found.st_size != size:
                    return Rejected(f"{self.root / name}: {found.st_size} bytes, expected {size}")
                data = os.read(handle, size + 1)
                while len(data) < size and (more := os.read(handle, size - len(data))):
                    data += more
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:
            return Rejected(f"{self.root / name}: {_said(error)}")
        if len(data) != size:
            return Rejected(f"{self.root / name}: changed while it was read")
        if hashlib.sha256(data).hexdigest() != digest:
            return Rejected(f"{self.root / name}: digest differs from bundle.json")
        return data

    def helper(self, *, key: str | None = None, source: str | None = None, name: str = "") -> Path | Rejected | None:
        """Return the native helper of that key or source digest, None when none is packed, or why it is refused."""
        for helper in self.helpers:
            if (key is not None and key in helper.keys and PurePosixPath(helper.path).name == name) or (
                source is not None and source == helper.source
            ):
                checked = self._trusted(helper.path)
                return checked if isinstance(checked, Rejected) else self.place / helper.path
        return None

    def helper_of(self, file: str, digest: str) -> Path | None:
        """Return the native helper of that file name and SHA-256, None when none is packed that may be used."""
        for helper in self.helpers:
            wanted = PurePosixPath(helper.path).name == file and self.files.get(helper.path, (0, ""))[1] == digest
            if wanted and isinstance(self._trusted(helper.path), Accepted):
                return self.place / helper.path
        return None

    def _trusted(self, name: str) -> Accepted | Rejected:
        """Helpers are code that this process runs: they must be intact, nobody else's to change, and loadable."""
        path = self.place / name
        if os.path.realpath(path) != str(path):
            return Rejected(f"{self.root / name}: reached through a link")
        inside = [parent for parent in path.parents if parent.is_relative_to(self.place)]
        for place in (path, *inside, self.place / MANIFEST):  # bundle.json says what intact means
            try:
                found = place.stat()
            except (OSError, ValueError) as error:
                return Rejected(f"{place}: {_said(error)}")
            if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
                return Rejected(f"{place}: writable by everyone")
            if found.st_uid not in (0, os.getuid()):
                return Rejected(f"{place}: owned by uid {found.st_uid}, neither root nor this user")
        data = self.read(name)
        return data if isinstance(data, Rejected) else _loadable(f"{self.root / name}", needed_glibc(data), libc())

    def index(self) -> Index:
        """Return what is packed; read once.

        Raises:
            BundleError: the index is missing, its digest differs, or it does not hold together.
        """
        if self._index is None:
            data = self.read(_INDEX)
            if isinstance(data, Rejected):
                raise BundleError(data.reason, "pack it again")
            try:
                self._index = Index(data)
            except ValueError as error:
                raise BundleError(f"{self.root / _INDEX}: {error}", "pack it again") from error
        return self._index

    def problems(self) -> list[str]:
        """Look at every file of the bundle; return what is wrong, empty when it is intact."""
        from concurrent.futures import ThreadPoolExecutor

        from tcache.forking import cores, spread

        groups = self._groups()
        large = {name for name, (size, _) in self.files.items() if size >= _SMALL}
        slow = {key for key, names in groups.items() if not large.isdisjoint(names.values())} if large else set()
        apart = self.files.keys() - {name for names in groups.values() for name in names.values()}
        many: list[tuple[str, dict[str, str]]] = sorted((key, groups[key]) for key in groups.keys() - slow)
        few: list[tuple[str, dict[str, str]]] = sorted((key, groups[key]) for key in slow)

        def rest() -> list[str]:
            # hashing runs outside the GIL, but for a small file a thread costs more than it gains
            with ThreadPoolExecutor(max_workers=min(16, cores())) as pool:
                waiting = [pool.submit(self._entry_problem, *group) for group in few]
                waiting += [pool.submit(self._problem, name) for name in sorted(apart & large)]
                rows = [self._problem(name) for name in sorted(apart - large)]
                rows += [future.result() for future in waiting]
            return _reasons(rows)

        found = spread(lambda part: _reasons([self._entry_problem(*group) for group in part]), many, rest)
        found += [row.reason for helper in self.helpers if isinstance(row := self._trusted(helper.path), Rejected)]
        return list(dict.fromkeys(found))


def _reasons(rows: list[Rejected | None]) -> list[str]:
    return [row.reason for row in rows if row is not None]


def _loadable(where: str, needed: tuple[int, int], here: str) -> Accepted | Rejected:
    """Say beforehand what the dynamic linker would say about an older glibc than a helper was linked against."""
    family, _, version = here.partition(" ")
    parts = version.split(".")
    if family == "glibc" and len(parts) >= 2 and all(part.isdigit() for part in parts[:2]):
        ours = (int(parts[0]), int(parts[1]))
        if needed > ours:
            text = f"{where}: needs glibc {needed[0]}.{needed[1]}, this process has {version}"
            return Rejected(text, "libc")
    return Accepted()


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:  # O_NOFOLLOW
        return "a symbolic link, which is not followed: copy the bundle with its files, as `cp -rL` does"
    return (isinstance(error, OSError) and error.strerror) or str(error)
