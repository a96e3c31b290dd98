"""A small project for tests of packing: a plain kernel, and one that stock ``triton.autotune`` decorates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KERNELS = '''\
"""Kernels of a project that uses stock Triton only."""

import triton
import triton.language as tl


@triton.jit
def plain(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n) * 2, mask=o < n)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=1), triton.Config({"BLOCK": 128}, num_warps=2)],
    key=["n"],
    cache_results=True,
)
@triton.jit
def tuned(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n) + 1, mask=o < n)
'''
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - kernel: ../src/kernels.py:plain
    args: {x_ptr: {shape: [n], dtype: float32}, y_ptr: {shape: [n], dtype: float32}, n: n, BLOCK: 64}
    grid: [cdiv(n, BLOCK)]
    cases: [{n: [4096, 4097]}]
  - kernel: ../src/kernels.py:tuned
    args: {x_ptr: {shape: [n], dtype: float32}, y_ptr: {shape: [n], dtype: float32}, n: n}
    grid: [cdiv(n, BLOCK)]
    cases: [{n: 4096}]
"""
STORE = """\
import sys
from pathlib import Path
from tcache.entries import Entry, Record, Timing
from tcache.keys.config import config_key, space_identity
from tcache.keys.gpu import catalogue
from tcache.keys.shape import ShapeKey
from tcache.lookup import kernel_of, source_of
from tcache.replay.ref import KernelRef, load
from tcache.store import Store
from tcache._triton import release

winner, ms, names = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
tuner = load(KernelRef.parse("src/kernels.py:tuned"), Path("."))
keys = [config_key(config) for config in tuner.configs]
times = {key: Timing(ms if i == winner else 2 * ms, ms, 2 * ms, 100) for i, key in enumerate(keys)}
shape = ShapeKey.parse("n=4096 | x_ptr=torch.float32 y_ptr=torch.float32")
entry = Entry(shape, keys[winner], times, source_of(tuner), space_identity(keys), release, "2026-01-01T00:00:00Z")
for name in names:
    gpu = catalogue()[name]
    path = Store("best").path(gpu, kernel_of(tuner))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Record(gpu, kernel_of(tuner), {shape: entry}).text())
"""


def environment(root: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that works on a project with a Triton cache of its own."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    return found | {"TRITON_CACHE_DIR": str(root / ".cache"), "HOME": str(root / "home")} | more


def python(root: Path, *args: str, cwd: Path | None = None, code: int = 0, **more: str) -> subprocess.CompletedProcess:
    """Run Python in a project and return what it printed."""
    env = environment(root, **more)
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, cwd=cwd or root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


BATCH = """
import contextlib, io, json, os, resource, sys
from tcache.cli import main

answers = []
limit, commands = json.loads(sys.argv[1])
if limit is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["tcache", *command]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(command, prog_name="tcache")
        except SystemExit as end:
            code = end.code or 0
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def batch(root: Path, *commands: list[object], limit: int | None = None, **options) -> list[Answer]:
    """Run several commands in one process: what a process costs is imports.

    Args:
        root: the project.
        commands: arguments of each.
        limit: bytes that no file may exceed.
        options: as for :func:`python`.
    """
    words = json.dumps([limit, [[str(word) for word in command] for command in commands]])
    done = python(root, "-c", BATCH, words, **options)
    return [Answer(*row) for row in json.loads(done.stdout.splitlines()[-1])]


@dataclass
class Answer:
    """How a command ended and what it printed."""

    code: int
    stdout: str
    stderr: str

    def ok(self) -> str:
        assert self.code == 0, f"exit {self.code}\n{self.stdout}\n{self.stderr}"
        return self.stdout


def store(root: Path, winner: int, ms: float, *gpus: str) -> None:
    """Write best configs for the project's tuned kernel."""
    python(root, "-c", STORE, str(winner), str(ms), *gpus)


def make_project(root: Path, *, winner: int = 1, ms: float = 0.5, gpus: tuple[str, ...] = ("NVIDIA H200",)) -> Path:
    """Write a project with best configs for its tuned kernel; nothing is compiled yet."""
    (root / "src").mkdir(parents=True)
    (root / "shapes").mkdir()
    (root / "src" / "kernels.py").write_text(KERNELS)
    (root / "shapes" / "m.yaml").write_text(MANIFEST)
    (root / "shapes" / "plain.yaml").write_text(MANIFEST[: MANIFEST.index("  - kernel: ../src/kernels.py:tuned")])
    (root / "pyproject.toml").write_text('[tool.tcache]\nstore = "best"\n')
    if gpus:
        store(root, winner, ms, *gpus)
    return root
