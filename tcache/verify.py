"""Prove a bundle: replay its manifests in a fresh process, frozen, from another directory, with no other cache.

The parent moves a copy of the bundle, starts the child below with an environment in which only that copy can answer,
and reads its report. The child replays every case under the stub driver through the very code a service runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tcache.archives import opened
from tcache.bundle import Bundle, Rejected
from tcache.errors import BundleError, CacheMiss, KernelError, OutputError, TcacheError
from tcache.project import project_root

__all__ = ["Report", "verify"]


@dataclass
class Report:
    """What a verification found.

    Attributes:
        launches: launches replayed.
        hits: launches that found their best config, their entry and their native helpers in the bundle.
        entries: distinct entries read.
        misses: ``{"where", "launch", "why"}`` for every launch that did not.
        problems: files that are damaged or not trusted.
        notes: what a reader should know, such as a bundle without native helpers.
        unreplayed: launches of the bundle's index that no replay made, as ``{"gpu", "ref", "shape", "entry"}``.
        unindexed: launches that were replayed and hit, and that the index does not know, likewise.
    """

    launches: int = 0
    hits: int = 0
    entries: int = 0
    misses: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreplayed: list[dict[str, Any]] = field(default_factory=list)
    unindexed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        return self.launches > 0 and not self.misses and not self.problems


def verify(path: Path, manifests: list[Path], root: Path) -> Report:
    """Verify a bundle.

    Args:
        path: the bundle: a directory, a wheel, an image layout, or an archive of one.
        manifests: manifests to replay; empty for those the bundle was packed from.
        root: the directory that manifests in the bundle are relative to (the project's root).

    Raises:
        BundleError: it is no bundle, or it does not say where its manifests' kernels are and none were given.
        TcacheError: the child could not replay at all.
    """
    with opened(path) as folder:
        report = _verify(folder, manifests, root)
        # what was unpacked is gone when the reader sees this
        report.problems = [problem.replace(str(folder), str(path)) for problem in report.problems]
    return report


def _verify(path: Path, manifests: list[Path], root: Path) -> Report:
    bundle = Bundle(path)
    report = Report(problems=bundle.problems(), notes=list(bundle.notes))
    chosen = manifests or _packed_manifests(bundle, root)
    with tempfile.TemporaryDirectory(prefix="tcache-verify-", dir=_scratch()) as scratch:
        moved = Path(scratch, "elsewhere")
        try:
            shutil.copytree(path, moved, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise BundleError(f"{path}: cannot be copied: {error}".splitlines()[0][:300], "pack it again") from error
        empty = Path(scratch, "empty")
        empty.mkdir(mode=0o555)
        for gpu in bundle.gpus:
            request = {"gpu": gpu, "manifests": [str(manifest.resolve()) for manifest in chosen]}
            found = _child(request, moved, empty)
            _merge(report, found)
            _compare(report, bundle, gpu["name"], found["replayed"])
    return report


_MEMORY = "/dev/shm"  # noqa: S108 - the directory made there is private


def _scratch() -> str | None:
    """Return where temporary directories can be made; a container with a read-only root may have only /dev/shm.

    Raises:
        OutputError: nowhere.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if os.access(_MEMORY, os.W_OK | os.X_OK):
            return _MEMORY
    raise OutputError(
        "there is no writable temporary directory to copy the bundle to",
        "mount one, for example `docker run --tmpfs /tmp`, or set TMPDIR",
    )


def _compare(report: Report, bundle: Bundle, gpu: str, replayed: list[dict[str, Any]]) -> None:
    """Compare what was replayed on a GPU with the launches that the index says were packed for it."""
    try:
        packed = [row for row in bundle.index().launches if row["gpu"] == gpu]
    except (BundleError, KeyError, TypeError):
        return  # reported as damaged
    fields = ("gpu", "ref", "shape", "entry")
    made = {(row["shape"], row["entry"]) for row in replayed}
    known = {(row["shape"], row["entry"]) for row in packed}
    unreplayed = [{name: row[name] for name in fields} for row in packed if (row["shape"], row["entry"]) not in made]
    unindexed = [{"gpu": gpu, **row} for row in replayed if (row["shape"], row["entry"]) not in known]
    report.unreplayed += unreplayed
    report.unindexed += unindexed
    for rows, what in ((unreplayed, "in the index and not replayed"), (unindexed, "replayed and not in the index")):
        if rows:
            first = f"{rows[0]['ref']} [{rows[0]['shape'] or 'no autotuner'}] -> {rows[0]['entry']}"
            report.notes.append(f"{len(rows)} launches on {gpu} are {what}, the first: {first}")


def _packed_manifests(bundle: Bundle, root: Path) -> list[Path]:
    found = []
    for row in bundle.manifests:
        relative = row.get("path")
        places = [root, *([inside] if (inside := project_root(root)) is not None else [])]
        root = next((place for place in places if relative and (place / relative).is_file()), root)
        if relative is None or not (root / relative).is_file():
            name = relative or Path(row["file"]).name
            raise BundleError(
                f"manifest {name} of the bundle is not at {root}: its kernels cannot be found",
                "run from the project's root (without a pyproject.toml: the manifest's folder), pass --root, or give "
                "the manifest as a further argument",
            )
        checked = bundle.check(row["file"])
        if isinstance(checked, Rejected):
            raise BundleError(checked.reason, "pack it again, or give the manifest as a further argument")
        if (root / relative).read_bytes() != (bundle.root / row["file"]).read_bytes():
            raise BundleError(
                f"{root / relative}: changed after packing",
                "pack again, or give the manifest as a further argument to verify against the new one",
            )
        if not row["part"]:
            found.append(root / relative)
    return found


def _child(request: dict[str, Any], moved: Path, empty: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {
        "HOME": str(empty),
        "TCACHE_BUNDLES": str(moved),
        "TCACHE_GPU_NAME": request["gpu"]["name"],
        "TCACHE_INSTALLED_BUNDLES": "0",
        "TCACHE_MODE": "frozen",
        "TMPDIR": str(moved.parent),
        "TRITON_CACHE_DIR": str(empty),
        "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager",
        "TRITON_HOME": str(empty),
    }
    # the child imports what this process could import, whatever its working directory
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    command = [sys.executable, "-c", "from tcache.verify import child; child()"]
    done = subprocess.run(
        command, input=json.dumps(request), env=environment, cwd=empty, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TcacheError(f"the verifying process ended with code {done.returncode}: {last}") from None
    if "error" in answer:
        raise TcacheError(answer["error"], answer["hint"])
    return answer


def _merge(report: Report, found: dict[str, Any]) -> None:
    report.launches += found["launches"]
    report.hits += found["hits"]
    report.entries += found["entries"]
    report.misses += found["misses"]
    report.notes += [note for note in found["notes"] if note not in report.notes]


def child() -> None:
    """Replay what standard input asks for and print a report: the fresh process of :func:`verify`."""
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what kernel files print is no answer
    answer: dict[str, Any]
    try:
        report = _replay(request)
    except TcacheError as error:
        answer = {"error": error.message, "hint": error.hint}
    else:
        answer = {**asdict(report[0]), "replayed": report[1]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _replay(request: dict[str, Any]) -> tuple[Report, list[dict[str, Any]]]:
    from tcache._triton.cache import compile_events
    from tcache.active import active
    from tcache.adopting import adopt
    from tcache.keys.gpu import GPU
    from tcache.manifest import load_manifest
    from tcache.replay import launches, machine

    gpu = GPU(**request["gpu"])
    report = Report()
    settings = active()
    if not settings.bundles:
        reason = settings.skipped[0].reason
        raise BundleError(
            f"the bundle cannot serve this process: {reason}", "verify with the Triton and Python it was packed for"
        )
    replayed: dict[tuple[str | None, str], dict[str, Any]] = {}
    compiled: list[str] = []
    adopted: set[str] = set()
    with (
        machine(gpu),
        compile_events(lambda name, hit: None if hit else compiled.append(name)),
    ):
        for manifest in request["manifests"]:
            for case in load_manifest(Path(manifest)).cases(gpu.name):
                for launch in launches(case):
                    report.launches += 1
                    with contextlib.suppress(KernelError):  # nothing autotuned, or not by triton.autotune
                        adopted |= {*adopt(launch.kernel)} if not _served(launch.kernel) else set()
                    why = _launch(launch, settings.bundles[0], replayed)
                    if why is None and compiled:
                        why = f"compiled {', '.join(compiled)}"
                    compiled.clear()
                    if why is None:
                        report.hits += 1
                    else:
                        report.misses.append({"where": launch.where, "launch": str(case), "why": why})
    report.entries = len({entry for _, entry in replayed})
    if adopted:
        names = ", ".join(sorted(adopted)[:3]) + (", …" if len(adopted) > 3 else "")
        report.notes.append(f"{len(adopted)} kernels are tuned by others and hit after tcache.adopt only: {names}")
    return report, list(replayed.values())


def _served(kernel: Any) -> bool:
    """Return whether the kernel's winners come from the bundle without ``tcache.adopt``."""
    from tcache._triton.kernels import Heuristics
    from tcache.autotuner import Autotuner

    while isinstance(kernel, Heuristics):
        kernel = kernel.fn
    return isinstance(kernel, Autotuner)


def _shape(launch: Any) -> str | None:
    """Return a launch's shape key as text, None for a kernel without a choice of configs."""
    from tcache._triton.kernels import through_decorators
    from tcache.lookup import named_arguments, shape_of

    found = []

    def choose(autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        found.append(str(shape_of(autotuner, named_arguments(autotuner, args, kwargs))))
        return []

    for _ in through_decorators(launch.kernel, launch.args, launch.kwargs, choose):
        pass
    return found[0] if found else None


def _launch(launch: Any, bundle: Bundle, replayed: dict[tuple[str | None, str], dict[str, Any]]) -> str | None:
    """Go through one launch up to the point where a GPU is needed; return why it missed, None for a hit."""
    from tcache._triton.native import helper_sources

    try:
        kernel = launch.kernel.run(*launch.args, grid=(1, 1, 1), warmup=True, **launch.kwargs)
    except CacheMiss as miss:
        return str(miss)
    except TcacheError as error:
        return error.message
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    found = {Path(file).parent.name for file in kernel.metadata_group.values()}
    if not found <= bundle.entries:
        return f"entry {', '.join(sorted(found))} did not come from the bundle"
    shape = _shape(launch)
    for entry in found:
        replayed.setdefault((shape, entry), {"ref": launch.ref, "shape": shape, "entry": entry})
    for source in helper_sources([kernel], bundle.hip_library):
        helper = bundle.helper(source=source.digest)
        if helper is None:
            return f"native helper {source.name} (source {source.digest[:12]}) is not packed"
        if isinstance(helper, Rejected):
            return helper.reason
    return None
