"""``kernels/`` as services have it: installed as ``tcache_kernels``, hitting a bundle that was packed by path."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANIFEST = f"""\
version: 1
gpus: [NVIDIA H200]
kernels:
  - call: {ROOT}/kernels/softmax.py:softmax
    args: {{x: {{shape: [16, 1000], dtype: float32}}}}
    cases: [{{}}]
  - call: {ROOT}/kernels/rmsnorm.py:rmsnorm
    args: {{x: {{shape: [16, 4096], dtype: bfloat16}}, weight: {{shape: [4096], dtype: bfloat16}}}}
    cases: [{{}}]
  - call: {ROOT}/kernels/rmsnorm.py:rmsnorm_backward
    args:
      dy: {{shape: [2048, 4096], dtype: bfloat16}}
      x: {{shape: [2048, 4096], dtype: bfloat16}}
      weight: {{shape: [4096], dtype: bfloat16}}
      rstd: {{shape: [2048], dtype: float32}}
    cases: [{{}}]
  - call: {ROOT}/kernels/vector_add.py:axpy
    args: {{a: 2.0, x: {{shape: [4096], dtype: float32}}, y: {{shape: [4096], dtype: float32}}}}
    cases: [{{}}]
"""
SERVICE = """\
import json, sys
sys.path[:0] = sys.argv[1:3]
import torch
import null_driver
from tcache.active import activate
from tcache.counters import stats
from tcache.errors import CacheMiss

null = null_driver.activate()
activate(bundles=[sys.argv[3]], mode="frozen")
from tcache_kernels import axpy, rmsnorm, rmsnorm_backward, softmax
import tcache_kernels

assert "kernels" not in sys.modules
x = torch.zeros(2048, 4096, dtype=torch.bfloat16)
with torch.no_grad():
    softmax(torch.zeros(16, 1000))
    softmax(torch.zeros(17, 1000))  # other rows, of the same bucket
    rmsnorm(x[:16], x[0].clone())
    rmsnorm(x[:1], x[0].clone())
rmsnorm_backward(x, x, x[0].clone(), torch.zeros(2048))
axpy(2.0, torch.zeros(4096), torch.zeros(4096))
missed = None
try:
    softmax(torch.zeros(16, 100))
except CacheMiss as miss:
    missed = miss.message
found = {name: stats()[name] for name in ("hits", "entries", "prebaked", "misses")}
print(json.dumps({"file": tcache_kernels.__file__, "launches": len(null.launches), "missed": missed, **found}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run(
        [*command, str(ROOT / "kernels")], check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    )
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    return folder


def python(site, text):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=site,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_holds_tcache_kernels_and_nothing_that_hides_another_package(wheel):
    assert wheel.name.startswith("triton_tcache_kernels-")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"tcache_kernels"}
    modules = {path.name for path in (ROOT / "kernels").glob("*.py")}
    assert {name.split("/")[1] for name in names if name.startswith("tcache_kernels/")} == modules
    for name in modules:  # to the byte: line numbers are part of Triton's key
        assert archive.read(f"tcache_kernels/{name}") == (ROOT / "kernels" / name).read_bytes()
    metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert re.search(r"^Requires-Dist: triton-tcache$", metadata, re.MULTILINE)
    assert not re.search(r"^Requires-Dist: (tcache|kernels)\b", metadata, re.MULTILINE)


def test_importing_the_package_imports_no_kernel(site):
    loaded = "import sys, tcache_kernels; print([n for n in sys.modules if n.partition('.')[0] in ('torch', 'triton')])"
    assert python(site, loaded) == "[]"
    one = "import sys; from tcache_kernels import softmax; print([n for n in sys.modules if n.startswith('tcache_k')])"
    assert set(ast.literal_eval(python(site, one))) == {
        "tcache_kernels", "tcache_kernels.softmax", "tcache_kernels._rows", "tcache_kernels._check",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "from tcache_kernels import softmax",
        "import tcache_kernels.softmax; from tcache_kernels import softmax",
        "from tcache_kernels.softmax import softmax_kernel; from tcache_kernels import softmax",
        "from tcache_kernels import softmax; import tcache_kernels.softmax; from tcache_kernels import softmax",
        "from tcache_kernels import *",
    ],
)
def test_a_name_is_the_wrapper_whatever_was_imported_before(site, text):
    assert (
        python(site, f"{text}\nprint(type(softmax).__name__, softmax.__module__)") == "function tcache_kernels.softmax"
    )


def test_an_unknown_name_is_an_attribute_error(site):
    text = "import tcache_kernels as k\ntry: k.nothing\nexcept AttributeError as error: print(error)"
    assert python(site, text) == "module 'tcache_kernels' has no attribute 'nothing'"


def test_every_wrapper_is_exported():
    """A function whose module has a reference for it is a wrapper."""
    table = importlib.import_module("kernels").WRAPPERS
    for path in (ROOT / "kernels").glob("[!_]*.py"):
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        wrappers = {name for name in functions if f"{name}_reference" in functions}
        assert wrappers <= set(table.get(path.stem, ())), f"{path}: add to WRAPPERS in kernels/__init__.py"
        assert set(table.get(path.stem, ())) <= functions


def test_every_function_of_autograd_is_exported(site):
    """A service gets them as it gets wrappers; those that a wrapper applies have an underscore."""
    table = importlib.import_module("kernels").FUNCTIONS
    for path in (ROOT / "kernels").glob("[!_]*.py"):
        classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        public = {node.name for node in classes if not node.name.startswith("_")}
        assert public == set(table.get(path.stem, ())), f"{path}: add to FUNCTIONS in kernels/__init__.py"
    text = "from tcache_kernels import *; from tcache_kernels import SparseConv; print(SparseConv.apply.__name__)"
    assert python(site, text) == "apply"


CPU = """\
import torch, tcache_kernels as k


def half(*shape):
    return torch.zeros(*shape, dtype=torch.float16)

calls = {
    "softmax": lambda: k.softmax(torch.zeros(2, 3)),
    "matmul_persistent": lambda: k.matmul_persistent(half(16, 16), half(16, 16), tma=True),
    "grouped_gemm": lambda: k.grouped_gemm(half(8, 16), half(1, 16, 8), torch.tensor([0, 8]), tma=True),
}
for name, call in calls.items():
    try:
        call()
    except ValueError as error:
        print(name, error)
"""


def test_tensors_of_the_cpu_are_refused_before_anything_is_compiled(site):
    """Of a descriptor Triton takes any address: the kernel would read it on the GPU."""
    said = python(site, CPU).splitlines()
    assert [line.partition(" ")[0] for line in said] == ["softmax", "matmul_persistent", "grouped_gemm"]
    assert all("expected tensors on a GPU, got one on the CPU" in line for line in said)


FLOAT8 = "{shape: [16, 16], dtype: float8_e4m3fn}"


@pytest.mark.parametrize(
    ("wrapper", "arguments", "instead"),
    [
        ("quantize.py:quantize_fp8", "x: {shape: [4, 256], dtype: bfloat16}", "int8"),
        *(
            (f"{name}.py:{name}", f"{first}: {FLOAT8}, {second}: {FLOAT8}", "float8_e5m2 or float16")
            for name, first, second in [
                ("matmul", "a", "b"), ("matmul_decode", "a", "b"), ("matmul_persistent", "a", "b"),
                ("linear", "x", "weight"),
            ]
        ),
    ],
)  # fmt: skip
def test_a_gpu_without_float8_is_told_so_before_anything_is_launched(tmp_path, tcache, wrapper, arguments, instead):
    text = f"version: 1\nkernels:\n  - call: {ROOT}/kernels/{wrapper}\n    args: {{{arguments}}}\n    cases: [{{}}]\n"
    (tmp_path / "m.yaml").write_text(text)
    options = ("m.yaml", "--untuned", "default", "--gpu")
    done = tcache("resolve", *options, "NVIDIA A100-SXM4-80GB", cwd=tmp_path, check=2)
    name = arguments.partition(":")[0]
    said = (
        f"{name}: float8_e4m3fn: expected a GPU of compute capability 8.9 or more, cuda:0 has 8.0; use {instead} there"
    )
    assert said in done.stderr
    tcache("resolve", *options, "NVIDIA H200", cwd=tmp_path, check=0)


def give_winners(root, rows):
    """Store for every launch as its winner the config that it is resolved with."""
    from tcache._triton import release
    from tcache.keys import ShapeKey, find_gpu
    from tcache.keys.config import config_key, space_identity
    from tcache.lookup import kernel_of, source_of
    from tcache.replay import KernelRef, load
    from tcache.store import Entry, Store, Timing

    for row in rows:
        module, name = row["kernel"].split(":")
        kernel = load(KernelRef.parse(f"{module.replace('.', '/')}.py:{name}"), ROOT)
        shape = ShapeKey.parse(row["shape"])
        space = space_identity([config_key(config) for config in kernel.configs])
        entry = Entry(
            shape, row["config"], {row["config"]: Timing(1.0, 0.9, 1.1, 10)}, source_of(kernel), space, release,
            "2026-01-01T00:00:00Z",
        )  # fmt: skip
        Store(root / "store").update(find_gpu("NVIDIA H200"), kernel_of(kernel), shape, lambda _, entry=entry: entry)


def test_a_bundle_packed_by_path_hits_in_a_service_that_imports_the_package(site, tmp_path, tcache):
    (tmp_path / "m.yaml").write_text(MANIFEST)
    done = tcache("resolve", "m.yaml", "--untuned", "default", "--json", cwd=tmp_path, check=0)
    give_winners(tmp_path, json.loads(done.stdout)["launches"])
    tcache("warmup", "m.yaml", "--store", "store", cwd=tmp_path, check=0)
    tcache("pack", "m.yaml", "-o", "bundle", "--store", "store", cwd=tmp_path, check=0)
    tcache("verify", "bundle", cwd=tmp_path, check=0)
    home = tmp_path / "service"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {"HOME": str(home), "TRITON_HOME": str(home), "TRITON_CACHE_DIR": str(home / "cache")}
    environment |= {"TCACHE_GPU_NAME": "NVIDIA H200", "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    script = home / "service.py"
    script.write_text(SERVICE)
    done = subprocess.run(
        [sys.executable, str(script), str(site), str(ROOT / "tests" / "contract"), str(tmp_path / "bundle")],
        env=environment, capture_output=True, text=True, check=False, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"].startswith(str(site))
    assert found["launches"] == 7
    assert found["prebaked"] == found["entries"] == 5  # without Triton's key, which another module would not change
    assert "tcache_kernels.softmax:softmax_kernel" in found["missed"]
    assert not (home / "cache").exists()
