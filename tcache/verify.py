"""Prove a bundle: replay its manifests in a fresh process, frozen, from another directory, with no other cache.

The parent moves a copy of the bundle, starts the child below with an environment in which only that copy can answer,
and reads its report. The child replays every case under the stub driver through the very code a service runs.
"""

from __future__ import annotations

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
from tcache.errors import BundleError, CacheMiss, TcacheError
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
    """

    launches: int = 0
    hits: int = 0
    entries: int = 0
    misses: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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
    with tempfile.TemporaryDirectory(prefix="tcache-verify-") as scratch:
        moved = Path(scratch, "elsewhere")
        try:
            shutil.copytree(path, moved, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise BundleError(f"{path}: cannot be copied: {error}".splitlines()[0][:300], "pack it again") from error
        empty = Path(scratch, "empty")
        empty.mkdir(mode=0o555)
        for gpu in bundle.gpus:
            request = {"gpu": gpu, "manifests": [str(manifest.resolve()) for manifest in chosen]}
            _merge(report, _child(request, moved, empty))
    return report


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
        "TCACHE_MODE": "frozen",
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


def child() -> None:
    """Replay what standard input asks for and print a report: the fresh process of :func:`verify`."""
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what kernel files print is no answer
    try:
        report = _replay(request)
    except TcacheError as error:
        answer = {"error": error.message, "hint": error.hint}
    else:
        answer = asdict(report)
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _replay(request: dict[str, Any]) -> Report:
    from tcache._triton.cache import compile_events
    from tcache.active import active
    from tcache.keys.gpu import GPU
    from tcache.manifest import load_manifest
    from tcache.replay import launches, machine

    gpu = GPU(**request["gpu"])
    report = Report()
    settings = active()
    if not settings.bundles:
        _, reason = settings.skipped[0]
        raise BundleError(
            f"the bundle cannot serve this process: {reason}", "verify with the Triton and Python it was packed for"
        )
    entries: set[str] = set()
    compiled: list[str] = []
    with (
        machine(gpu),
        compile_events(lambda name, hit: None if hit else compiled.append(name)),
    ):
        for manifest in request["manifests"]:
            for case in load_manifest(Path(manifest)).cases(gpu.name):
                for launch in launches(case):
                    report.launches += 1
                    why = _launch(launch, settings.bundles[0], entries)
                    if why is None and compiled:
                        why = f"compiled {', '.join(compiled)}"
                    compiled.clear()
                    if why is None:
                        report.hits += 1
                    else:
                        report.misses.append({"where": launch.where, "launch": str(case), "why": why})
    report.entries = len(entries)
    return report


def _launch(launch: Any, bundle: Bundle, entries: set[str]) -> str | None:
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
    entries |= found
    for source in helper_sources([kernel], bundle.hip_library):
        helper = bundle.helper(source=source.digest)
        if helper is None:
            return f"native helper {source.name} (source {source.digest[:12]}) is not packed"
        if isinstance(helper, Rejected):
            return helper.reason
    return None
