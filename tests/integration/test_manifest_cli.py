"""Manifests in use: ``tcache manifest check``; includes and GPU restrictions through resolve, warmup, pack, verify."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

KERNEL = """\
import triton
import triton.language as tl

print("imported")

@triton.jit
def f(x, n, BLOCK: tl.constexpr = 64):
    o = tl.arange(0, BLOCK)
    tl.store(x + o, o.to(x.dtype.element_ty), mask=o < n)

def wrapper(x, size, *, block=64):
    f[(1,)](x, size, BLOCK=block)

number = 3
"""
MAIN = """\
version: 1
include: [shared/sets.yaml, shared/kernels.yaml]
gpus: [NVIDIA H200, NVIDIA L4]
kernels:
  - kernel: k.py:f
    args: {x: {shape: [n], dtype: float32}, n: n}
    grid: [cdiv(n, BLOCK)]
    cases: [{shapes: sizes}]
"""
SETS = "version: 1\nshapes:\n  sizes: [{n: [16, 17]}]\n"
SHARED = """\
version: 1
kernels:
  - call: ../k.py:wrapper
    args: {x: {shape: [n], dtype: float16}, size: n}
    gpus: ["NVIDIA H*"]
    cases: [{n: 32}]
"""


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    (root / "shared").mkdir(parents=True)
    (root / "k.py").write_text(KERNEL)
    (root / "m.yaml").write_text(MAIN)
    (root / "shared" / "sets.yaml").write_text(SETS)
    (root / "shared" / "kernels.yaml").write_text(SHARED)
    return root


def test_check_counts_cases_and_imports_kernels(project, tcache):
    done = tcache("manifest", "check", "m.yaml", "shared/sets.yaml", cwd=project, check=0)
    assert done.stdout == "m.yaml: sound, 3 cases in 3 files\nshared/sets.yaml: sound, 0 cases\n"
    found = json.loads(tcache("manifest", "check", "m.yaml", "--json", cwd=project, check=0).stdout)
    assert found == {
        "version": 1, "sound": True,
        "manifests": [{"path": "m.yaml", "cases": 3, "files": ["shared/sets.yaml", "shared/kernels.yaml", "m.yaml"],
                       "problems": [], "notes": []}],
    }  # fmt: skip


MISFITS = [
    (("k.py:f", "k.py:g"), "m.yaml:5:13", ["k.py has no function 'g'"]),
    (("k.py:f", "k.py:wrapper"), "m.yaml:5:13", ["k.py:wrapper is a function, not a Triton kernel"]),
    (("k.py:f", "absent.py:f"), "m.yaml:5:13", ["no such kernel file"]),
    ((", n: n}", ", m: n}"), "m.yaml:8:13", ["k.py:f has no argument 'm': expected x, n, BLOCK"]),
    (("BLOCK", "BLOK"), "m.yaml:8:13", ["grid: name 'BLOK' is not bound", "did you mean 'BLOCK'?"]),
    (("shapes: sizes", "shapes: sizes, gpus: [AMD *]"), "m.yaml:5:13", ["no GPU that the manifest names (NVIDIA H200"]),
    (("dtype: float32", "dtype: float32, offset: 17 - n"), None, []),
    (("dtype: float32", "dtype: float32, offset: 16 - n"), "m.yaml:8:13", ["x: '16 - n' is -1: expected an integer"]),
    (("shapes: sizes", "shapes: sizes, where: 8 // (n - 17) < 9"), "m.yaml:8:13", ["where: division by zero"]),
    (("kernel: k.py:f", "call: k.py:wrapper"), "m.yaml:7:5", ["unknown key 'grid'"]),
    (("kernel: k.py:f\n", "call: k.py:wrapper\n", "    grid: [cdiv(n, BLOCK)]\n", ""), "m.yaml:5:11",
     ["k.py:wrapper has no argument 'n': expected x, size, block"]),
    (("kernel: k.py:f\n", "call: k.py:wrapper\n", "    grid: [cdiv(n, BLOCK)]\n", "", ", n: n}", "}"), "m.yaml:5:11",
     ["k.py:wrapper needs its argument size"]),
    (("kernel: k.py:f\n", "call: k.py:number\n", "    grid: [cdiv(n, BLOCK)]\n", ""), "m.yaml:5:11",
     ["k.py:number is a int, not a function"]),
]  # fmt: skip


def test_check_finds_what_does_not_fit_the_kernel(project, tcache):
    for number, (change, _, _) in enumerate(MISFITS):
        text = MAIN
        for old, new in zip(change[::2], change[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        (project / f"{number}.m.yaml").write_text(text)
    names = [f"{number}.m.yaml" for number in range(len(MISFITS))]
    done = tcache("manifest", "check", *names, cwd=project, check=1)
    for number, (_, where, parts) in enumerate(MISFITS):
        said = [line for line in done.stderr.splitlines() if line.startswith(f"error: {number}.m.yaml:")]
        if where is None:
            assert said == []
            continue
        assert len(said) == 1
        assert said[0].startswith(f"error: {number}.{where}: ")
        hints = done.stderr[done.stderr.index(said[0]) :].splitlines()[:2]
        for part in parts:
            assert part in "".join(hints)
        assert f"{number}.m.yaml: 1 problem\n" in done.stdout


def test_check_without_imports(project, tcache):
    (project / "m.yaml").write_text(MAIN.replace("k.py:f", "absent.py:f"))
    done = tcache("manifest", "check", "--no-imports", "m.yaml", cwd=project, check=0)
    assert done.stdout == "m.yaml: sound, 3 cases in 3 files\n"
    assert "imported" not in done.stderr


def test_help_of_the_subcommands(tcache):
    for name in ("check", "schema"):
        assert "--json" in tcache("manifest", name, "--help", check=0).stdout
    assert "No such command" in tcache("manifest", "nothing", check=2).stderr


def test_includes_and_gpus_go_through_the_chain(project, tcache):
    rows = json.loads(tcache("resolve", "m.yaml", "--json", cwd=project, check=0).stdout)["launches"]
    assert sorted((row["gpu"], row["where"]) for row in rows) == [
        ("NVIDIA H200", "m.yaml:8:13"), ("NVIDIA H200", "m.yaml:8:13"), ("NVIDIA H200", "shared/kernels.yaml:6:13"),
        ("NVIDIA L4", "m.yaml:8:13"), ("NVIDIA L4", "m.yaml:8:13"),
    ]  # fmt: skip
    tcache("warmup", "m.yaml", cwd=project, check=0)
    tcache("pack", "m.yaml", "-o", "b", cwd=project, check=0)
    bundle = json.loads((project / "b" / "bundle.json").read_text())
    assert [(row["path"], row.get("part", False)) for row in bundle["manifests"]] == [
        ("m.yaml", False), ("shared/kernels.yaml", True), ("shared/sets.yaml", True),
    ]  # fmt: skip
    assert all((project / "b" / row["file"]).is_file() for row in bundle["manifests"])
    done = tcache("verify", "b", cwd=project, check=0)
    assert done.stdout.startswith("proven: 5 launches, 5 hits, 0 misses")
    # what is included is part of what was packed
    sets = project / "shared" / "sets.yaml"
    sets.write_text(SETS.replace("17", "18"))
    changed = tcache("verify", "b", cwd=project, check=2)
    assert "sets.yaml: changed after packing" in changed.stderr
    missed = tcache("verify", "b", "m.yaml", cwd=project, check=0)  # 18 is no other specialization than 17
    assert "5 hits" in missed.stdout
    # a manifest that is given besides being included is replayed by itself, too
    sets.write_text(SETS)
    tcache("pack", "m.yaml", "shared/kernels.yaml", "-o", "c", "--gpu", "NVIDIA H200", cwd=project, check=0)
    assert tcache("verify", "c", cwd=project, check=0).stdout.startswith("proven: 4 launches, 4 hits")


def test_a_recording_that_is_none(project, tcache):
    (project / "m.yaml").write_text(MAIN + "  - launches: serve.json\n")
    assert "m.yaml:9:15: serve.json: no such recording" in tcache("resolve", "m.yaml", cwd=project, check=2).stderr
    (project / "serve.json").write_text("{}")
    assert "serve.json:1:1: no line of a recording" in tcache("resolve", "m.yaml", cwd=project, check=2).stderr


def test_kernels_whose_module_asks_for_a_gpu_while_it_is_imported(project, tcache):
    (project / "asks.py").write_text(
        "import torch\nimport triton\nMAJOR, _ = torch.cuda.get_device_capability()\nprint(torch.zeros(1).cuda())\n"
        "@triton.jit\ndef k(x, n):\n    pass\n\nassert MAJOR in (8, 9)\n"
    )
    item = "{kernel: asks.py:k, args: {x: {shape: [n], dtype: int8}, n: n}, grid: [1], cases: [{n: 64}]}"
    (project / "m.yaml").write_text(f"version: 1\ngpus: [NVIDIA L4, NVIDIA H200]\nkernels:\n  - {item}\n")
    tcache("manifest", "check", "m.yaml", cwd=project, check=0)
    done = tcache("resolve", "m.yaml", "--json", cwd=project, check=0)
    assert len({row["entry"] for row in json.loads(done.stdout)["launches"]}) == 2


def test_a_crash_of_the_users_code_shows_its_line(project, tcache):
    (project / "crash.py").write_text("def crash(x):\n    import ctypes\n    ctypes.string_at(0)\n")
    item = "{call: crash.py:crash, args: {x: {shape: [n], dtype: int8}}, cases: [{n: 64}]}"
    (project / "m.yaml").write_text(f"version: 1\ngpus: [NVIDIA H200]\nkernels:\n  - {item}\n")
    done = tcache("resolve", "m.yaml", cwd=project, check=-signal.SIGSEGV)
    assert re.search(r"crash\.py.*line 3 in crash", done.stderr)


def test_an_unknown_gpu_of_an_include_is_shown_there(project, tcache):
    (project / "m.yaml").write_text(MAIN.replace("gpus: [NVIDIA H200, NVIDIA L4]\n", ""))
    (project / "shared" / "sets.yaml").write_text(SETS + "gpus: [NVIDIA H20O]\n")
    said = str(Path("shared", "sets.yaml")) + ":4:7: unknown GPU 'NVIDIA H20O'"
    assert f"error: {said}" in tcache("resolve", "m.yaml", cwd=project, check=2).stderr
    # a store, an alias or --target may know it, so that it is no problem of the manifest's
    assert f"note: {said}" in tcache("manifest", "check", "--no-imports", "m.yaml", cwd=project, check=0).stderr
