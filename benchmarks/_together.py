"""Fresh processes that start together and then work alone, one after the other: start-up is not what is measured.

A process prints ``ready`` where its clock would begin, waits for a line, works, and prints its result as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from _machine import ROOT


def start(program: str, *arguments: str, cache: Path, **more: str) -> subprocess.Popen:
    """Start ``program`` (a text) with a Triton cache and a home of its own and none of this process's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {"ROOT": str(ROOT), "TRITON_CACHE_DIR": str(cache), "HOME": str(cache), **more}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environment, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def frozen(bundle: Path) -> dict[str, str]:
    """Return the variables that make a process use a bundle and nothing else."""
    return {
        "TCACHE_BUNDLES": str(bundle),
        "TCACHE_MODE": "frozen",
        "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager",
    }


def finish(process: subprocess.Popen) -> dict:
    """Let a process go on, wait for it, and return its result."""
    out, errors = process.communicate("\n")
    if process.returncode:
        raise SystemExit(errors)
    return json.loads(out.splitlines()[-1])


def batch(started: list[tuple[str, subprocess.Popen]], rows: dict[str, list[dict]]) -> None:
    """Wait until each process is ready, then let them go on one at a time; results are added to ``rows``."""
    for _, process in started:
        process.stdout.readline()
    for name, process in started:
        rows[name].append(finish(process))
