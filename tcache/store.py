"""Best configs: JSON files meant to be read, diffed and merged in git, one per (GPU, kernel)."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache._fs import atomic_write, sha256_bytes
from tcache.errors import StoreError
from tcache.keys.bucket import bucket_text
from tcache.keys.gpu import GPU
from tcache.keys.shape import ShapeKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["SCHEMA", "Entry", "Kernel", "Record", "Store", "Timing", "default_store"]

SCHEMA = 1


@dataclass(frozen=True)
class Timing:
    """What benchmarking one config gave.

    Attributes:
        median, p20, p80: milliseconds per launch; None when the config failed.
        reps: launches timed; None where the benchmark did not say.
        failed: why the config cannot run, else None.
        extra: fields this version does not know, kept on rewrite.
    """

    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    reps: int | None = None
    failed: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Timing:
        times: dict[str, Any] = {name: data.get(f"{name}_ms") for name in ("median", "p20", "p80")}
        for name, value in times.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"{name}_ms is {value!r}, expected a number")
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}_ms is {value!r}, expected a time")
        rest = {k: v for k, v in data.items() if k not in ("median_ms", "p20_ms", "p80_ms", "reps", "failed")}
        return cls(**times, reps=data.get("reps"), failed=data.get("failed"), extra=rest)

    def plain(self) -> dict[str, Any]:
        times = {"median_ms": self.median, "p20_ms": self.p20, "p80_ms": self.p80}
        found: dict[str, Any] = {name: _rounded(value) for name, value in times.items() if value is not None}
        if self.reps is not None:
            found["reps"] = self.reps
        if self.failed is not None:
            found["failed"] = self.failed
        return {**self.extra, **found}


@dataclass(frozen=True)
class Entry:
    """What is known for one shape key.

    Attributes:
        shape: the shape key.
        config: config key of the winner; None while no config has run.
        timings: config key -> timing, for every config tried.
        source: identity of the kernel's source when tuned.
        space: identity of the config space once every config of it was tried, else None.
        triton: Triton release used for tuning.
        tuned: when, ISO 8601 in UTC.
        tied: configs that the benchmark could not tell from the winner, the winner among them.
        extra: fields this version does not know, kept on rewrite.
    """

    shape: ShapeKey
    config: str | None
    timings: dict[str, Timing]
    source: str
    space: str | None
    triton: str
    tuned: str
    tied: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, shape: str, data: dict[str, Any]) -> Entry:
        timings = {key: Timing.parse(timing) for key, timing in data["timings"].items()}
        text = {name: data[name] for name in ("source", "triton", "tuned")}
        for name, value in {**text, "config": data.get("config") or "", "space": data.get("space") or ""}.items():
            if not isinstance(value, str):
                raise ValueError(f"{name} is {value!r}, expected text")
        known = {"config", "timings", "source", "space", "tied", "triton", "tuned", "median_ms", "p20_ms", "p80_ms"}
        rest = {k: v for k, v in data.items() if k not in known}
        return cls(
            ShapeKey.parse(shape),
            data.get("config"),
            timings,
            space=data.get("space"),
            tied=tuple(data.get("tied", ())),
            extra=rest,
            **text,
        )

    def plain(self) -> dict[str, Any]:
        best = self.timings.get(self.config or "", Timing()).plain()
        return {
            **self.extra,
            "config": self.config,
            **{name: best[name] for name in ("median_ms", "p20_ms", "p80_ms") if name in best},
            "source": self.source,
            "space": self.space,
            "timings": {key: self.timings[key].plain() for key in sorted(self.timings)},
            "triton": self.triton,
            "tuned": self.tuned,
            **({"tied": sorted(self.tied)} if self.tied else {}),
        }

    def keeping(self, old: Entry | None) -> Entry:
        """Return this entry with the unknown fields of the one it replaces."""
        return replace(self, extra=old.extra) if old is not None and not self.extra else self


@dataclass(frozen=True)
class Kernel:
    """Which kernel a record belongs to.

    Attributes:
        module, qualname: where Python found the function when it was tuned.
        key: names of the autotune key arguments.
    """

    module: str
    qualname: str
    key: tuple[str, ...]

    @property
    def id(self) -> str:
        """The store's file name without its ending."""
        return re.sub(r"[^\w.-]", "_", f"{self.module}.{self.qualname}")

    @property
    def ref(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Record:
    """One store file: all entries of a kernel on a GPU."""

    gpu: GPU
    kernel: Kernel
    entries: dict[ShapeKey, Entry]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, path: Path) -> Record:
        """Parse a store file.

        Raises:
            StoreError: the text is no JSON, has another schema, or lacks a field.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise StoreError(f"{path}: corrupt store file, nested too deeply", _REPAIR) from error
        except ValueError as error:
            line = getattr(error, "lineno", None)
            where = f"{path}:{line}:{error.colno}" if isinstance(error, json.JSONDecodeError) else str(path)
            raise StoreError(f"{where}: corrupt store file, expected JSON: {error}", _REPAIR) from error
        if not isinstance(data, dict) or "schema" not in data:
            raise StoreError(f"{path}: not a tcache store file: no 'schema' field", _REPAIR)
        if data["schema"] != SCHEMA:
            raise StoreError(
                f"{path}: store schema {data['schema']!r}, expected {SCHEMA}",
                "use the tcache release that wrote it, or move the file away and tune again",
            )
        try:
            head = data["kernel"]
            module, qualname = head["ref"].split(":")
            entries = [Entry.parse(shape, entry) for shape, entry in data["entries"].items()]
            rest = {k: v for k, v in data.items() if k not in ("schema", "gpu", "kernel", "entries")}
            rest["kernel"] = {k: v for k, v in head.items() if k not in ("ref", "key")}
            gpu = GPU(**{name: data["gpu"][name] for name in GPU("", "", 0, 0, 0).identity()})
            return cls(
                gpu, Kernel(module, qualname, tuple(head["key"])), {entry.shape: entry for entry in entries}, rest
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise StoreError(f"{path}: corrupt store file: {what}", _REPAIR) from error

    def text(self) -> str:
        """Return the file's text: sorted, one line per timing, so that diffs and merges stay small."""
        head = {
            "schema": SCHEMA,
            **{k: v for k, v in self.extra.items() if k != "kernel"},
            "gpu": self.gpu.identity(),
            "kernel": {**self.extra.get("kernel", {}), "ref": self.kernel.ref, "key": list(self.kernel.key)},
        }
        lines = ["{"]
        lines += [f"  {_json(name)}: {_json(value)}," for name, value in head.items()]
        lines.append('  "entries": {')
        ordered = sorted(self.entries.values(), key=lambda entry: _natural(str(entry.shape)))
        for number, entry in enumerate(ordered):
            lines.append(f"    {_json(str(entry.shape))}: {{")
            plain = entry.plain()
            timings = plain.pop("timings")
            lines += [f"      {_json(name)}: {_json(plain[name])}," for name in sorted(plain)]
            lines.append('      "timings": {')
            lines.append(",\n".join(f"        {_json(key)}: {_json(value)}" for key, value in timings.items()))
            lines.append("      }")
            lines.append("    }," if number + 1 < len(ordered) else "    }")
        lines += ["  }", "}"]
        return "\n".join(filter(None, lines)) + "\n"


_REPAIR = "restore it from version control, or move it away and tune again"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _natural(text: str) -> list[Any]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text) if part]


class Store:
    """A directory of best configs.

    Args:
        root: the directory; it need not exist until something is written.

    Reads take no lock. Writes take the record's lock, read again, merge, and replace the file atomically.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._read: dict[Path, tuple[tuple[int, int, int], Record]] = {}

    def path(self, gpu: GPU, kernel: Kernel) -> Path:
        return self.root / gpu.slug / f"{kernel.id}.json"

    def read(self, path: Path) -> Record | None:
        """Return the record in a file, or None when there is no such file.

        Raises:
            StoreError: the file is there and is not a store file of this schema, or cannot be read.
        """
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._read.get(path)
            if known is None or known[0] != stamp:
                known = self._read[path] = (stamp, Record.parse(path.read_text("utf-8"), path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnicodeDecodeError as error:
            raise StoreError(f"{path}: corrupt store file, expected UTF-8", _REPAIR) from error
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}", "check the file's permissions") from error
        return known[1]

    def get(self, gpu: GPU, kernel: Kernel, shape: ShapeKey, source: str) -> Entry | None:
        """Return the entry for a shape, stale or not, or None.

        A record of the same function under another module name counts when the source identity is the same: moving a
        file changes nothing.

        Args:
            gpu: on which GPU.
            kernel: which kernel.
            shape: which shape key.
            source: the kernel's source identity now.

        Raises:
            StoreError: the record is corrupt, or belongs to another GPU of the same slug.
        """
        record = self._checked(self.path(gpu, kernel), gpu)
        if record is not None and shape in record.entries:
            return record.entries[shape]
        suffix = Kernel("", kernel.qualname, ()).id + ".json"
        for path in sorted((self.root / gpu.slug).glob(f"*{_escaped(suffix)}")):
            moved = self._checked(path, gpu)
            if moved is not None and moved.kernel.qualname == kernel.qualname:
                entry = moved.entries.get(shape)
                if entry is not None and entry.source == source:
                    return entry
        return None

    def shapes(self, gpu: GPU, kernel: Kernel, source: str) -> dict[ShapeKey, Entry]:
        """Return all entries of a kernel whose source is the present one, for a search of the nearest."""
        record = self._checked(self.path(gpu, kernel), gpu)
        found = record.entries if record is not None else {}
        return {shape: entry for shape, entry in found.items() if entry.source == source}

    def _checked(self, path: Path, gpu: GPU) -> Record | None:
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
            record = self._checked(path, gpu) or Record(gpu, kernel, {})
            head = dict(record.extra.get("kernel", {}))
            head.pop("buckets", None)
            if buckets:
                head["buckets"] = {name: bucket_text(spec) for name, spec in buckets.items()}
            extra = {**record.extra, "kernel": head}
            entry = change(record.entries.get(shape))
            entries = {**record.entries, shape: entry}
            try:
                atomic_write(path, Record(record.gpu, kernel, entries, extra).text().encode())
            except OSError as error:
                raise self._unwritable(path, error) from error
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
        import filelock

        path = self._scratch(gpu) / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ignore = path.parent / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
            lock = filelock.FileLock(path)
            lock.acquire()
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
                yield path, record

    def gpus(self) -> dict[str, GPU]:
        """Return the GPUs the store has best configs for, by name."""
        return {record.gpu.name: record.gpu for _, record in self.records()}


def _escaped(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


def default_store() -> Path | None:
    """Return the store used when nothing else is said, ``~/.tcache/store``; None for a user without a home."""
    home = os.path.expanduser("~")
    return Path(home, ".tcache", "store") if os.path.isabs(home) else None
