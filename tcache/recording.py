"""Record the launches of a running program, for manifests that say ``launches: FILE``.

What is written for a launch is what the program passed, at the level of the object it launched, so that heuristics,
autotuner and binder run again when it is replayed: for any GPU, with that GPU's winners.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache import startup
from tcache._triton import release, watch
from tcache._triton.kernels import jit_of
from tcache._triton.values import Indescribable, describe, holds_tensor
from tcache.capture import capture, captured_folder
from tcache.errors import UsageError
from tcache.keys.source import source_identity
from tcache.lookup import current_gpu, named_arguments, shape_of
from tcache.naming import ref_of
from tcache.rows import Appender, fold, identity, read_rows, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tcache._triton.watch import Sight

__all__ = ["Recorder", "record", "start_from_environment"]

_log = logging.getLogger("tcache")
_EVERY = 2.0
"""Seconds between writes of counts, where they are asked for."""


class Recorder:
    """Writes rows about launches.

    Args:
        path: the file to append to; kernels of the project are named relative to its directory.
        counts: whether to write how often each launch was made.
    """

    def __init__(self, path: Path, *, counts: bool = False) -> None:
        self.path = path.absolute()
        self._file = Appender(self.path)
        self._lock = threading.Lock()
        self._raw: dict[str, str] = {}  # text of the arguments -> id
        self._ids, self._captured = _known(self.path)
        self._sources: dict[int, str | None] = {}
        self._missed: set[str] = set()
        self._gpus: dict[int, str | None] = {}
        self._counts = counts
        self._written: dict[str, int] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Record from now on.

        Raises:
            UsageError: this process records already.
        """
        global _recorder  # noqa: PLW0603 - one per process: it watches Triton's classes
        if _recorder is not None:
            raise UsageError(f"this process records already, to {_recorder.path}", "nest no recordings")
        _recorder = self
        try:
            watch.start(self.note)
        except BaseException:
            self.stop()
            raise
        startup.on_miss = self.missed
        if self._counts:
            self._count()
            os.register_at_fork(after_in_child=self._forked)
            atexit.register(self.write_counts)

    def stop(self) -> None:
        """Record no more, and write what is left."""
        global _recorder  # noqa: PLW0603
        self.write_counts()
        self._stopped.set()
        watch.stop()
        startup.on_miss = None
        self._file.close()
        _recorder = None

    def note(self, sight: Sight) -> str:
        """Append a launch unless it was before; return its id."""
        row = self._row(sight)
        # one benchmark stands for those of all configs, whose hooks may change the arguments
        names = ("kernel", "shape") if sight.benchmark else ("kernel", "args", "kwargs")
        raw = text_of({name: row.get(name) for name in names})
        with self._lock:
            known = self._raw.get(raw)
            if known is not None and (sight.specialization is None or sight.tuner):
                return known  # the same launch, perhaps with another config
            self._raw[raw] = row["id"]
            if not _names(row) <= self._ids:
                self._ids |= _names(row)
                self._file.append(row)
        return str(row["id"])

    def missed(self, reason: str) -> None:
        """Append that the launch in progress missed, and the launch itself unless it was noted before."""
        try:
            sight = watch.launch_in_progress()
            name = self.note(sight) if sight is not None else None
            if name is not None and name not in self._missed:
                self._missed.add(name)
                self._file.append({"id": name, "miss": reason})
        except Exception as error:  # the miss is what the service shall hear of
            _log.warning("tcache: a miss is not recorded: %s: %s", type(error).__name__, error)

    def _row(self, sight: Sight) -> dict[str, Any]:
        folder = self.path.parent
        function = jit_of(sight.kernel)
        ref, problem = ref_of(sight.kernel, function.fn, folder)
        row: dict[str, Any] = {"kernel": ref, "triton": release}
        try:
            row["args"] = [describe(value, self._ref) for value in sight.args]
            row["kwargs"] = {name: describe(value, self._ref) for name, value in sight.kwargs.items()}
            _check_constants(function, {**dict(zip(function.arg_names, row["args"], strict=False)), **row["kwargs"]})
        except Indescribable as error:
            row |= {"args": [], "kwargs": {}, "problem": str(error)}
        if sight.foreign:
            problem = f"compiled in {_origin(function)}, and not launched by Triton but by what compiled it"
        if problem is not None:
            row["problem"] = problem
        row["source"] = self._source(function)
        if sight.files:
            self._capture(sight, row)
        row["grid"] = list(sight.grid) if sight.grid is not None else None
        gpu = self._gpu() if not sight.foreign or _uses_gpu() else None
        row["gpus"] = [gpu] if gpu is not None else []
        row["shape"] = None
        if sight.tuner is not None:
            tuner, args, kwargs = sight.tuner
            row["shape"] = str(shape_of(tuner, named_arguments(tuner, args, kwargs)))
        row["specialization"], row["options"], row["config"] = _without_config(sight)
        row["id"] = identity(row)
        return row

    def _capture(self, sight: Sight, row: dict[str, Any]) -> None:
        """Keep what others compiled: it is the entry or nothing, since its launch cannot be replayed."""
        assert sight.compilation is not None
        try:
            found = capture(sight.compilation, sight.files, row["source"], captured_folder(self.path), self._captured)
            row["captured"], self._captured[found["entry"]] = found, found["files"]
        except (OSError, ValueError) as error:
            _log.warning("tcache: the entry of %s is not captured: %s", row["kernel"], error)

    def _source(self, function: Any) -> str | None:
        key = id(function)  # looking at a function's hash would compute it
        if key not in self._sources:
            try:
                self._sources[key] = source_identity(function)
            except Exception:  # a kernel whose source cannot be looked at is recorded without
                self._sources[key] = None
        return self._sources[key]

    def _ref(self, value: Any) -> str:
        function = value if isinstance(value, type) else getattr(value, "fn", value)
        ref, problem = ref_of(value, function, self.path.parent)
        if problem is not None:
            raise Indescribable(f"argument {ref}: {problem}")
        return ref

    def _gpu(self) -> str | None:
        try:
            from tcache._triton.driver import current_device

            device = current_device()
            if device not in self._gpus:
                self._gpus[device] = current_gpu().name
            return self._gpus[device]
        except Exception:  # no driver answers for a name: the launch counts all the same
            return None

    def write_counts(self) -> None:
        """Append what was launched since counts were last written."""
        if not self._counts or self._stopped.is_set():
            return
        with self._lock:
            for name, count in watch.counts().items():
                new = count - self._written.get(name, 0)
                if new > 0:
                    self._written[name] = count
                    self._file.append({"id": name, "count": new})

    def _count(self) -> None:
        def run() -> None:
            while not self._stopped.wait(_EVERY):
                self.write_counts()

        threading.Thread(target=run, name="tcache-counts", daemon=True).start()

    def _forked(self) -> None:
        """Go on in a forked child: threads and locks stay behind, and the parent's launches are not the child's."""
        if _recorder is not self or self._stopped.is_set():
            return
        self._lock = threading.Lock()
        self._written = {}
        watch.reset_counts()
        self._count()
        pool = sys.modules.get("multiprocessing.util")
        if pool is not None:  # children of multiprocessing end without atexit, and forget finalizers at their start
            pool.register_after_fork(self, lambda own: pool.Finalize(None, own.write_counts, exitpriority=100))


def _check_constants(function: Any, given: dict[str, Any]) -> None:
    """Refuse a tensor as a constexpr: its text, contents and all, would be part of the kernel."""
    for name in (function.arg_names[number] for number in function.constexprs):
        if holds_tensor(given.get(name)):
            raise Indescribable(f"argument {name} is a constexpr, and a tensor was passed")


def _known(path: Path) -> tuple[set[tuple[str, ...]], dict[str, Any]]:
    """Return what a recording has, so that a restarted service adds only what is new: the names of its rows, and for
    captured entries their files.
    """
    rows = [row for _, row in fold(read_rows(path)[0])]
    names = {name for row in rows for name in _names(row)}
    captured = [row["captured"] for row in rows if isinstance(row.get("captured"), dict)]
    return names, {str(one.get("entry")): one.get("files") for one in captured}


def _names(row: dict[str, Any]) -> set[tuple[str, ...]]:
    """Return what a row adds: a launch on each of its GPUs, and the files of a captured entry."""
    captured = row.get("captured")
    files = text_of(captured.get("files", {})) if isinstance(captured, dict) else ""
    return {(str(row.get("id")), str(gpu), files) for gpu in row.get("gpus") or [""]}


_recorder: Recorder | None = None


def _uses_gpu() -> bool:
    """Return whether this process has set up CUDA: one that only compiles shall not be made to."""
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.cuda.is_initialized())


def _origin(function: Any) -> str:
    """Return where generated code came from, without a path of this machine."""
    return f"{function.fn.__module__}, file {Path(function.fn.__code__.co_filename).name}"


def _without_config(sight: Sight) -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any] | None]:
    """Return specialization and options without what an autotuner's config adds, which is the GPU's, and that part."""
    if sight.specialization is None or sight.options is None:
        return None, None, None
    tuner = sight.tuner[0] if sight.tuner is not None else None
    added = {name for config in tuner.configs for name in config.all_kwargs()} if tuner is not None else set()
    specialization = {
        group: {name: value for name, value in found.items() if name.split(".")[0] not in added}
        for group, found in sight.specialization.items()
    }
    options = {name: value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
               for name, value in sight.options.items()}  # fmt: skip
    config = {name: value for name, value in {**sight.specialization["constants"], **options}.items() if name in added}
    own = {name: value for name, value in options.items() if name not in added}
    return specialization, own, config if tuner is not None else None


def start_from_environment() -> None:
    """Start recording to ``TCACHE_RECORD`` (with ``TCACHE_RECORD_COUNTS=1``: counts too) unless this process does."""
    path = os.environ.get("TCACHE_RECORD")
    if path and _recorder is None:
        Recorder(Path(path), counts=os.environ.get("TCACHE_RECORD_COUNTS", "") not in ("", "0")).start()


@contextlib.contextmanager
def record(path: str | os.PathLike[str], *, counts: bool = False) -> Iterator[Path]:
    """Record every kernel launch inside the block, of all threads, and of children that are forked inside it.

    Launches that were made before are recorded when they are made again. The file is appended to: name it in a shape
    manifest as ``- launches: FILE``.

    Args:
        path: the recording, such as ``serve.launches.json``.
        counts: also write how often each launch was made.

    Yields:
        The recording's absolute path.

    Raises:
        OutputError: the file cannot be written.
        UsageError: this process records already.
    """
    recorder = Recorder(Path(path), counts=counts)
    recorder.start()
    try:
        yield recorder.path
    finally:
        recorder.stop()
