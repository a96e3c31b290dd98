"""The whole chain on kernels of our own making: warmup, resolve, pack, verify, and every way to miss."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = '''\
"""Kernels of a project that uses stock Triton only."""

import triton
import triton.language as tl

FACTOR = tl.constexpr(2)


@triton.jit
def helper(x):
    return x * FACTOR


@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, helper(tl.load(x_ptr + o, mask=o < n)), mask=o < n)


def double(x):
    import torch

    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    scale[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y
'''
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - kernel: kernels.py:scale
    args:
      x_ptr: {shape: [n], dtype: float32, offset: offset}
      y_ptr: {shape: [n], dtype: float32}
      n: n
      BLOCK: 64
    grid: [cdiv(n, BLOCK)]
    cases:
      - {n: [4096, 4097, 1], offset: 0}
      - {n: 4096, offset: 1}
  - call: kernels.py:double
    args: {x: {shape: [n, 4], dtype: bfloat16}}
    cases: [{n: 128}]
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A project, its Triton cache after warm-up, and its bundle."""
    root = tmp_path_factory.mktemp("project")
    make_project(root)
    run(root, "warmup", "m.yaml")
    run(root, "pack", "m.yaml", "-o", "bundle")
    return root


def make_project(root):
    (root / "kernels.py").write_text(KERNELS)
    (root / "m.yaml").write_text(MANIFEST)


def run(root, *args, code=0, env=None):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {"TRITON_CACHE_DIR": str(root / "cache"), **(env or {})}
    done = subprocess.run(
        [sys.executable, "-m", "tcache", *args], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def project(packed, tmp_path):
    """A copy that a test may damage; its Triton cache is gone."""
    root = tmp_path / "copy"
    shutil.copytree(packed, root, ignore=shutil.ignore_patterns("cache", "__pycache__"))
    return root


def entries(folder):
    return {name for name in os.listdir(folder) if not name.startswith("tcache-")}


def test_warmup_compiles_exactly_what_resolve_names(packed):
    found = json.loads(run(packed, "resolve", "m.yaml", "--json").stdout)
    assert len(found["launches"]) == 5
    assert {row["entry"] for row in found["launches"]} == entries(packed / "cache")
    assert len(entries(packed / "cache")) == 5  # four specializations of one kernel and another dtype
    assert all(row["present"] for row in found["launches"])


def test_a_second_warmup_compiles_nothing(packed):
    before = {path: path.stat().st_mtime_ns for path in (packed / "cache").rglob("*")}
    found = json.loads(run(packed, "warmup", "m.yaml", "--json").stdout)
    assert (found["entries"], found["compiled"], found["failed"]) == (5, 0, [])
    assert {path: path.stat().st_mtime_ns for path in (packed / "cache").rglob("*")} == before


def test_the_number_of_jobs_does_not_change_the_entries(packed, tmp_path):
    make_project(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    done = run(tmp_path, "warmup", "m.yaml", "--jobs", "1", env={"TRITON_CACHE_DIR": str(tmp_path / "one")})
    assert entries(tmp_path / "one") == entries(packed / "cache")
    assert "[5/5]" in done.stderr


def test_verify_proves_the_bundle(project):
    found = json.loads(run(project, "verify", "bundle", "--json").stdout)
    assert found["proven"]
    assert (found["launches"], found["hits"], found["entries"]) == (5, 5, 5)
    assert found["misses"] == found["problems"] == found["notes"] == []


def test_only_what_is_needed_is_packed(packed):
    bundle = json.loads((packed / "bundle" / "bundle.json").read_text())
    kinds = {Path(name).suffix for name in bundle["files"] if name.startswith("entries/")}
    assert kinds == {".json", ".cubin"}
    listed = {"bundle.json", *bundle["files"]}
    on_disk = {p.relative_to(packed / "bundle").as_posix() for p in (packed / "bundle").rglob("*") if p.is_file()}
    assert on_disk == listed
    for name, row in bundle["files"].items():
        data = (packed / "bundle" / name).read_bytes()
        assert (row["size"], row["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert bundle["helpers"]


def test_ir_on_request(packed, tmp_path):
    run(packed, "pack", "m.yaml", "-o", str(tmp_path / "ir"), "--include-ir", "ttgir,ptx", "--no-native")
    kinds = {path.suffix for path in (tmp_path / "ir" / "entries").rglob("*.*")}
    assert kinds == {".json", ".cubin", ".ttgir", ".ptx"}
    done = run(packed, "verify", str(tmp_path / "ir"), code=1)
    assert "native helper cuda_utils" in done.stderr


def test_nothing_in_a_bundle_knows_where_it_was_made(packed):
    import triton

    places = {str(packed), str(Path(triton.__file__).parent), sys.prefix, str(Path.home())}
    for path in (packed / "bundle").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [place for place in places if place.encode() in data], path


def test_two_projects_pack_the_same_bytes(packed, tmp_path):
    root = tmp_path / "another" / "place"
    root.mkdir(parents=True)
    make_project(root)
    run(root, "warmup", "m.yaml")
    run(root, "pack", "m.yaml", "-o", "bundle")
    files = sorted(path.relative_to(root / "bundle") for path in (root / "bundle").rglob("*") if path.is_file())
    for name in files:
        assert (root / "bundle" / name).read_bytes() == (packed / "bundle" / name).read_bytes(), name
        assert (root / "bundle" / name).stat().st_mtime == 0


def miss(project, code=1):
    found = run(project, "verify", "bundle", code=code)
    return found.stdout + found.stderr


def test_a_lost_entry_is_a_miss(project):
    lost = min((project / "bundle" / "entries").iterdir())
    shutil.rmtree(lost)
    text = miss(project)
    assert "NOT proven: 5 launches, 4 hits, 1 misses" in text
    assert f"{lost.name}/scale.cubin: No such file" in text


@pytest.mark.parametrize("change", ["flip", "truncate", "extend", "empty"])
def test_a_damaged_file_is_never_used(project, change):
    path = next((project / "bundle" / "entries").rglob("*.cubin"))
    data = bytearray(path.read_bytes())
    if change == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes({"flip": data, "truncate": data[:-1], "extend": data + b"x", "empty": b""}[change])
    text = miss(project)
    assert "damaged: " in text
    assert str(path.name) in text
    assert "1 misses" in text


def test_a_helper_that_anyone_may_change_is_refused(project):
    helper = next((project / "bundle" / "native").rglob("*.so"))
    helper.chmod(0o666)
    assert "writable by everyone" in miss(project)


REASONS = [
    (KERNELS.replace("import triton\n", "import triton\n# a comment\n", 1),
     "line: the kernel starts at line 15, packed at line 14"),
    (KERNELS.replace("def scale(x_ptr", "def scale(\n    x_ptr"), "text: formatting or comments changed"),
    (KERNELS.replace("x * FACTOR", "x + FACTOR"), "source: the kernel, or something it calls or reads, was edited"),
    (KERNELS.replace("constexpr(2)", "constexpr(3)"), "source: the kernel, or something it calls or reads, was edited"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), REASONS, ids=["line", "formatted", "helper", "global"])
def test_an_edited_kernel_is_a_miss_that_says_so(project, text, reason):
    assert text != KERNELS
    (project / "kernels.py").write_text(text)
    found = miss(project)
    assert "5 misses" in found
    assert reason in found
    assert "kernels:scale is not prebaked for this launch" in found
    assert "m.yaml:12:9" in found


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("- {n: 4096, offset: 2}", None),
        ("- {n: 1099511627776, offset: 0}", "signature n: i64, packed i32"),
        ("- {n: 4098, offset: 1}", "not divisible by 16, packed tt.divisibility=16"),
        ("- {n: 1, offset: 1}", "alignment x_ptr: not divisible by 16, packed tt.divisibility=16"),
    ],
)
def test_an_unseen_shape_is_a_miss_that_says_which_field_differs(project, case, reason):
    manifest = MANIFEST.replace("      - {n: 4096, offset: 1}", "      - {n: 4096, offset: 1}\n      " + case)
    (project / "wider.yaml").write_text(manifest)
    found = run(project, "verify", "bundle", "wider.yaml", code=0 if reason is None else 1)
    if reason is not None:
        assert reason in found.stderr
        assert "add the shape to the shape manifest" in found.stderr


def test_another_environment_skips_the_bundle_with_a_reason(project):
    found = run(project, "verify", "bundle", code=2, env={"NVPTX_ENABLE_DUMP": "0"})
    assert "packed with NVPTX_ENABLE_DUMP unset, this process has" in found.stderr
    data = json.loads((project / "bundle" / "bundle.json").read_text())
    for field, value, name in (
        ("triton", "3.0.0", "Triton"),
        ("python", "cpython-39", "Python"),
        ("platform", "x", "platform"),
    ):
        changed = {**data, "environment": {**data["environment"], field: value}}
        (project / "bundle" / "bundle.json").write_text(json.dumps(changed))
        assert f"packed for {name} {value}, this process has" in run(project, "verify", "bundle", code=2).stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "", "corrupt, expected JSON"),
        (lambda text: text[: len(text) // 2], "corrupt, expected JSON"),
        (lambda _: "[]", "expected a JSON object"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "bundle schema 2, expected 1"),
        (lambda text: text.replace('"files"', '"filez"'), "corrupt"),
        (lambda text: text.replace('"index.json"', '"../index.json"'), "leaves the bundle"),
        (lambda text: text.replace('"index.json"', '"/etc/passwd"'), "leaves the bundle"),
        (lambda text: text.replace('"entries/', '"entries/../../'), "leaves the bundle"),
    ],
)
def test_a_broken_bundle_is_one_line(project, change, message):
    path = project / "bundle" / "bundle.json"
    path.write_text(change(path.read_text()))
    found = run(project, "verify", "bundle", code=2)
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_packing_compiles_nothing_and_leaves_the_cache_alone(packed, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(packed / "cache", moved)
    before = sorted((str(path), path.stat().st_mtime_ns) for path in moved.rglob("*") if path.is_file())
    run(packed, "pack", "m.yaml", "-o", str(tmp_path / "b"), env={"TRITON_CACHE_DIR": str(moved)})
    assert sorted((str(path), path.stat().st_mtime_ns) for path in moved.rglob("*") if path.is_file()) == before


def test_damaged_binaries_are_not_packed(packed, tmp_path):
    for number, damage in enumerate((b"", b"text", None)):
        cache = tmp_path / f"cache-{number}"
        shutil.copytree(packed / "cache", cache)
        for path in cache.rglob("*.cubin"):
            path.write_bytes(path.read_bytes()[:3000] if damage is None else damage)
        found = run(packed, "pack", "m.yaml", "-o", str(tmp_path / "b"), code=2, env={"TRITON_CACHE_DIR": str(cache)})
        assert "cubin: it" in found.stderr or "is cut off" in found.stderr
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.clear(), "corrupt: KeyError"),
        (lambda data: data.update(hash="ab" * 32), "metadata of another entry"),
        (lambda data: data["target"].update(arch=80), "it is for sm_90, not sm_80"),
        (lambda data: data.update(extern_libs=5), "corrupt, expected Triton's metadata"),
    ],
)
def test_damaged_metadata_is_not_packed(packed, tmp_path, change, text):
    """What no service would take is no bundle, although Triton itself would."""
    cache = tmp_path / "cache"
    shutil.copytree(packed / "cache", cache)
    for binary in cache.rglob("*.cubin"):
        path = binary.with_suffix(".json")
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
    found = run(packed, "pack", "m.yaml", "-o", str(tmp_path / "b"), code=2, env={"TRITON_CACHE_DIR": str(cache)})
    assert text in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "b").exists()


def test_a_kernel_file_may_print_and_must_not_exit(project):
    (project / "kernels.py").write_text(KERNELS + "\nprint('noise', end='')\n")
    assert json.loads(run(project, "resolve", "m.yaml", "--json").stdout)["launches"]
    run(project, "verify", "bundle")
    (project / "kernels.py").write_text("import sys\nsys.exit(0)\n")
    assert "SystemExit" in run(project, "resolve", "m.yaml", code=2).stderr


SERVICE = """
import json, os, sys
sys.path.insert(0, os.environ["PROJECT"])
import torch, triton
from triton.runtime import driver
from tcache._triton.driver import stub
from tcache._triton.mock import MockTensor
import kernels
seen = []
triton.knobs.compilation.listener = lambda **event: seen.append(event["cache_hit"])
with stub("cuda", 90, 32):
    x = MockTensor("float32", (4096,), (1,))
    kernels.scale.warmup(x, x, int(os.environ["N"]), grid=(1,), BLOCK=64)
print(json.dumps(seen))
"""


def service(project, n, code=0, **env):
    home = project / "empty-home"
    home.mkdir(mode=0o555, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    environment |= {
        "HOME": str(home), "TRITON_HOME": str(home), "TRITON_CACHE_DIR": str(home / "cache"),
        "PROJECT": str(project), "N": str(n), "TCACHE_BUNDLES": str(project / "bundle"),
        "TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager", **env,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SERVICE], env=environment, capture_output=True, text=True, check=False, cwd=project
    )
    assert done.returncode == code, done.stderr
    return done, sorted(home.iterdir())


def test_a_stock_kernel_hits_without_a_line_of_code_and_nothing_is_written(project):
    before = sorted((path, path.stat().st_mtime_ns) for path in (project / "bundle").rglob("*"))
    done, written = service(project, 4096)
    assert json.loads(done.stdout) == [True]
    assert written == []
    assert sorted((path, path.stat().st_mtime_ns) for path in (project / "bundle").rglob("*")) == before


def test_the_environment_alone_freezes_tcaches_own_kernels(project):
    script = (
        "import os, sys; sys.path.insert(0, os.environ['PROJECT'])\n"
        "import tcache\nfrom tcache.active import active\nactive()\n" + SERVICE
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {"PROJECT": str(project), "N": str(2**40), "TCACHE_BUNDLES": str(project / "bundle")}
    environment |= {"TRITON_CACHE_DIR": str(project / "never")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "CacheMiss" in done.stderr
    assert not (project / "never").exists()


def test_a_frozen_service_never_compiles(project):
    done, written = service(project, 2**40, code=1)
    assert "CacheMiss: kernels:scale is not prebaked for this launch (mode frozen)" in done.stderr
    assert written == []


def test_lookup_compiles_what_is_missing_above_the_bundle(project, tmp_path):
    cache = tmp_path / "writable"
    done, _ = service(project, 2**40, TCACHE_MODE="lookup", TRITON_CACHE_DIR=str(cache))
    assert json.loads(done.stdout) == [False]
    assert len(list(cache.iterdir())) == 1
    done, _ = service(project, 4096, TCACHE_MODE="lookup", TRITON_CACHE_DIR=str(cache))
    assert json.loads(done.stdout) == [True]
