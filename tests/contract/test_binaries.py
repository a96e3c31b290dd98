"""What an entry's bytes say about themselves, on entries that the real compilers made."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.runtime import driver

from tcache._binary import entry_problem, hsaco_problem, needed_glibc
from tcache._triton.driver import stub
from tcache._triton.mock import MockTensor
from tcache._triton.probe import compilation_of

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx90a", 64), ("hip", "gfx942", 64),
           ("hip", "gfx950", 64)]  # fmt: skip


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


def entry(backend, arch, warp_size):
    """Return the name and the files of an entry, as they would be packed."""
    with stub(backend, arch, warp_size):
        compilation = compilation_of(fill, (), {"x_ptr": MockTensor("float32", (64,), (1,)), "n": 64, "BLOCK": 64})
        group = compilation.run().metadata_group
    files = {name: Path(path).read_bytes() for name, path in group.items()}
    return compilation.entry, {
        name: data for name, data in files.items() if name.endswith((".json", ".cubin", ".hsaco"))
    }


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(triton.knobs.cache, "dir", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(triton.knobs.cache, "manager_class", triton.runtime.cache.FileCacheManager)
    yield {target: entry(*target) for target in TARGETS}
    patch.undo()


def test_compiling_in_this_process_leaves_the_driver_to_other_threads(monkeypatch, tmp_path):
    """A service that tunes launches meanwhile; only a worker's process may have another driver for a while."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    seen = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **_: seen.append(driver._active), raising=False)
    with stub("cuda", 90, 32):
        compilation = compilation_of(fill, (), {"x_ptr": MockTensor("float32", (64,), (1,)), "n": 64, "BLOCK": 64})
    with stub("cuda", 80, 32) as here:
        compilation.run()
        assert seen == [here]
        compilation.build()
        assert driver._active is here
    assert seen[1].get_current_target() == compilation.target


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_what_the_compiler_made_is_whole(entries, target):
    assert entry_problem(*entries[target]) is None


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_binary_for_another_architecture_is_named(entries, target):
    key, files = entries[target]
    binary = "fill.cubin" if target[0] == "cuda" else "fill.hsaco"
    for other in TARGETS:
        if other[0] == target[0] and other != target:
            swapped = {**files, binary: entries[other][1][binary]}
            arch = f"sm_{other[1]}" if other[0] == "cuda" else other[1]
            assert f"it is for {arch}, not " in entry_problem(key, swapped)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_metadata_that_names_another_kernel(entries, target):
    key, files = entries[target]
    for name in ("fil", "ill", "fill_kernel", "", "\ud800"):
        changed = {**files, "fill.json": json.dumps({**json.loads(files["fill.json"]), "name": name}).encode()}
        assert entry_problem(key, changed).endswith(f": it has no kernel {name}")


def test_metadata_of_another_entry(entries):
    other = entries["cuda", 80, 32]
    assert entry_problem(other[0], entries["cuda", 90, 32][1]) == "fill.json: metadata of another entry"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: {}, "0 metadata files, expected one"),
        (lambda files: {**files, "other.json": b"{}"}, "2 metadata files, expected one"),
        (lambda files: {**files, "fill.json": b""}, "fill.json: corrupt: JSONDecodeError"),
        (lambda files: {**files, "fill.json": b"[" * 100_000}, "fill.json: corrupt: RecursionError"),
        (lambda files: {**files, "other.ptx": b""}, "files of other names than fill"),
        (lambda files: {**files, "fill.cubin": b""}, "fill.cubin: it is no ELF-64 file"),
        (lambda files: {**files, "fill.cubin": files["fill.cubin"][:-1]}, "fill.cubin: its "),
        (lambda files: {name: data for name, data in files.items() if name != "fill.cubin"}, "no fill.cubin"),
        (lambda files: edited(files, shared="0"), "metadata: shared is '0'"),
        (lambda files: edited(files, num_warps=None), "metadata: num_warps is None"),
        (lambda files: edited(files, target={"backend": "vulkan", "arch": 1}), "metadata: unknown backend 'vulkan'"),
        (lambda files: edited(files, target={"backend": "cuda", "arch": "90"}), "metadata: arch is '90'"),
        (lambda files: edited(files, target={"backend": "hip", "arch": "gfx942"}), "no fill.hsaco"),
    ],
)
def test_an_entry_that_does_not_hold_together(entries, change, problem):
    key, files = entries["cuda", 90, 32]
    assert (entry_problem(key, change(files)) or "").startswith(problem)


def edited(files, **fields):
    return {**files, "fill.json": json.dumps({**json.loads(files["fill.json"]), **fields}).encode()}


def test_a_code_object_that_is_cut_off(entries):
    data = entries["hip", "gfx942", 64][1]["fill.hsaco"]
    assert hsaco_problem(data[:-1], "gfx942") == "its tables are cut off"
    assert hsaco_problem(data[:40], "gfx942") == "it is no ELF-64 file"
    assert hsaco_problem(data, "gfx942:sramecc+:xnack-") is None
    unknown = bytearray(data)
    struct.pack_into("<I", unknown, 48, 0xFF)
    assert hsaco_problem(bytes(unknown), "gfx942") is None  # newer than our table: not judged


def test_the_newest_glibc_that_a_helper_names():
    assert needed_glibc(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0") == (2, 34)
    assert needed_glibc(b"") == (0, 0)
