"""A project with a bundle of it, for tests that load: packed once, copied and damaged at will."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys

KERNELS = '''\
"""Kernels of a project, tuned and stock."""

import triton
import triton.language as tl

import tcache


@triton.jit
def helper(x):
    return x * 2


@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, helper(tl.load(x_ptr + o, mask=o < n)), mask=o < n)


@triton.jit
def wrapped(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + o, mask=o < n) + 1, mask=o < n)


def increment(x):
    wrapped[(1,)](x, x.numel(), BLOCK=64, num_warps=2)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32)]


@tcache.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def tuned(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@triton.jit
def unpacked(x_ptr, n):
    tl.store(x_ptr, n)
'''
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - kernel: loadables.py:scale
    args: {x_ptr: {shape: [n], dtype: float32}, y_ptr: {shape: [n], dtype: float32}, n: n, BLOCK: 64}
    grid: [cdiv(n, BLOCK)]
    cases: [{n: 4096}]
  - call: loadables.py:increment
    args: {x: {shape: [n], dtype: bfloat16}}
    cases: [{n: 64}]
  - kernel: loadables.py:tuned
    args: {x_ptr: {shape: [n], dtype: float32}, n: n}
    grid: [1]
    cases: [{n: 16}]
"""
NAME = "loadables"


def run(root, *args, code=0, **env):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {"TRITON_CACHE_DIR": str(root / "cache"), **env}
    done = subprocess.run(
        [sys.executable, "-m", "tcache", *map(str, args)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def make(root, kernels=KERNELS, manifest=MANIFEST):
    """Write the project, give its tuned kernel a winner, and pack it."""
    from tcache.keys import ShapeKey, find_gpu
    from tcache.keys.config import config_key, space_identity
    from tcache.keys.source import source_identity
    from tcache.store import Entry, Kernel, Store, Timing

    (root / f"{NAME}.py").write_text(kernels)
    (root / "m.yaml").write_text(manifest)
    module = load(root)
    configs = [config_key(config) for config in module.CONFIGS]
    source, shape = source_identity(module.tuned.fn), ShapeKey((("n", 16),), (("x_ptr", "float32"),))
    timings = {key: Timing(1.0 - 0.1 * number, 0.9, 1.1, 10) for number, key in enumerate(configs)}
    entry = Entry(shape, configs[1], timings, source, space_identity(configs), "3.7.1", "2026-01-01T00:00:00Z")
    Store(root / "store").update(
        find_gpu("NVIDIA H200"), Kernel(NAME, "tuned", ("n",)), shape, lambda _: entry
    )  # fmt: skip
    run(root, "warmup", "m.yaml", "--store", "store")
    run(root, "pack", "m.yaml", "-o", "bundle", "--store", "store")
    return root


def load(root):
    """Import the project's kernels anew, as a program started there would."""
    spec = importlib.util.spec_from_file_location(NAME, root / f"{NAME}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def sign(bundle, **head):
    """Write ``bundle.json`` anew, as if what lies there now had been packed."""
    path = bundle / "bundle.json"
    data = json.loads(path.read_text())
    data["files"] = {
        file.relative_to(bundle).as_posix(): {
            "size": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(bundle.rglob("*"))
        if file.is_file() and file != path
    }
    path.write_text(json.dumps({**data, **head}, sort_keys=True, indent=1))


def edit(path, change):
    """Change the JSON in a file."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
