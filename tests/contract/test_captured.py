"""Kernels that torch.compile generates: captured by recording, packed, hit wherever torch puts Triton's cache.

The very functions that torch's compile workers run are run here, on a kernel as Inductor writes them: without a GPU
Inductor itself generates none. ``tests/gpu/test_torch_compile_on_gpu.py`` compiles a model.
"""

# ruff: noqa: E501 - the program is one text

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project

from tcache.errors import ManifestError
from tcache.manifest.launches import load_recording
from tcache.pack._cubin import strip_debug, with_name

pytest.importorskip("torch._inductor.runtime.compile_tasks")

PROGRAM = '''\
"""Compile what Inductor would generate, the way its workers do."""

import functools, json, os, sys

import torch
import triton
from torch._inductor.async_compile import AsyncCompile, _load_triton_kernel_from_source
from torch._inductor.runtime import compile_tasks, triton_helpers

SOURCE = """
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import AutotuneHint, DeviceProperties, ReductionHint, TileHint
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(
    size_hints={'x': HINT}, filename=__file__,
    triton_meta={'signature': {'out_ptr0': '*fp32', 'in_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32), 'constants': {}, 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]], (2,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D', 'autotune_hints': set(), 'kernel_name': 'triton_poi_fused_sin_0', 'mutated_arg_names': [], 'optimize_mem': True, 'no_x_dim': False, 'num_load': 1, 'num_store': 1, 'num_reduction': 0, 'backend_hash': 'none', 'assert_indirect_indexing': True, 'autotune_local_cache': False, 'autotune_pointwise': True, 'autotune_remote_cache': None, 'force_disable_caches': False, 'dynamic_scale_rblock': True, 'max_autotune': False, 'max_autotune_pointwise': False, 'min_split_scan_rblock': 256, 'spill_threshold': 16, 'store_cubin': False},
    min_elem_per_thread=0
)
@triton.jit
def triton_poi_fused_sin_0(out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = tl_math.sin(tmp0)
    tl.store(out_ptr0 + (x0), tmp1, xmask)
"""


def load(source):
    triton_helpers.set_driver_to_gpu = lambda: None  # there is no GPU to compile for: the kernel names its target
    return _load_triton_kernel_from_source("triton_poi_fused_sin_0", source)


def main(size, function, workers):
    events = []
    before = triton.knobs.compilation.listener

    def listen(**event):
        events.append(event["cache_hit"])
        if before is not None:
            before(**event)

    triton.knobs.compilation.listener = listen
    if "OTHER_PTXAS" in os.environ:
        from triton.backends.nvidia import compiler
        from triton.runtime.cache import get_cache_manager

        get_cache_manager("0" * 64)  # the driver, for its helper
        compiler.get_ptxas_version(90)  # the key of Inductor's own cache
        os.environ["TRITON_PTXAS_PATH"] = os.environ["OTHER_PTXAS"]  # _set_triton_ptxas_path, of torch for CUDA
    source = SOURCE.replace("HINT", size).replace("sin(", function + "(")
    if workers == "0":
        kernel, _ = compile_tasks._worker_compile_triton(functools.partial(load, source), {}, {})
    else:  # as AsyncCompile.triton does
        import program

        pool = AsyncCompile.process_pool()
        job = pool.submit(compile_tasks._worker_compile_triton, functools.partial(program.load, source), {}, {})
        kernel, _ = job.result()
        assert not events, "it was compiled in another process"
    print(json.dumps([events, sorted(result.kernel.hash for result in kernel.compile_results)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
'''
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - launches: serve.launches.json
"""


def program(root, size=4096, function="sin", workers=0, code=0, inductor="inductor", wrap=(), **env):
    """Run the program as torch does: Triton's cache is below Inductor's own directory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(root / inductor), "HOME": str(root / "home"), **env}
    if workers:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(workers)
    command = [sys.executable, *wrap, "program.py", str(size), function, str(workers)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stderr if code else json.loads(done.stdout.splitlines()[0])


def record(root, *args, **more):
    return program(
        root, *args, wrap=("-m", "tcache", "record", "-o", "serve.launches.json", "--", sys.executable), **more
    )


def frozen(root, *args, **more):
    return program(
        root, *args, inductor="elsewhere", TCACHE_BUNDLES=str(root / "bundle"), TCACHE_MODE="frozen",
        TRITON_CACHE_MANAGER="tcache.overlay:OverlayCacheManager", **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("recorded")
    (root / "program.py").write_text(PROGRAM)
    (root / "m.yaml").write_text(MANIFEST)
    events, hashes = record(root)
    assert events
    assert not any(events)
    assert len(hashes) == len(events)
    assert next((root / "inductor").rglob("*.cubin")), "torch moved Triton's cache"
    bundle_project.run(root, "pack", "m.yaml", "--include-captured", "-o", "bundle")
    return root


@pytest.fixture
def copied(recorded, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(recorded, root, ignore=shutil.ignore_patterns("inductor", "home", "cache", "__pycache__"))
    return root


def rows(root):
    return [json.loads(line) for line in (root / "serve.launches.json").read_text().splitlines()]


def test_what_torchs_worker_processes_compile_is_captured_and_hits_there(copied):
    """By default Inductor compiles in processes of its own, which it starts and forks itself."""
    before = rows(copied)
    _, hashes = record(copied, 8192, "cos", workers=2, inductor="of-workers")
    found = [row for row in rows(copied) if row not in before]
    assert len(found) == len(hashes) > 1
    assert all("captured" in row for row in found)
    assert all(row["gpus"] == [] for row in found)
    bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "bundle", "--force")
    assert frozen(copied, 8192, "cos", workers=2)[1] == hashes
    assert not list((copied / "elsewhere").rglob("*.cubin"))
    error = frozen(copied, 8192, "exp", workers=2, code=1)
    assert "tcache.errors.CacheMiss: " in error
    assert "triton_poi_fused_exp_0 is not prebaked" in error or "was edited after packing" in error


def test_what_one_process_compiles_hits_in_workers_and_the_other_way_round(copied):
    """The same ptxas given, an entry's name does not tell who compiled it: text, line and options are the same."""
    _, alone = record(copied, 2048, "sin", inductor="of-one")
    bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "bundle", "--force")
    assert frozen(copied, 2048, "sin", workers=2)[1] == alone
    _, hashes = record(copied, 8192, "cos", workers=2, inductor="of-workers")
    bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "bundle", "--force")
    events, found = frozen(copied, 8192, "cos")
    assert found == hashes
    assert all(events)


def test_a_ptxas_that_torch_names_after_it_asked_for_the_versions(copied):
    """torch for CUDA brings a ptxas of its own and names it in the environment, late: Triton's keys keep the first."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = copied / "ptxas"
    real = get_ptxas(90)
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo release {real.version}, of torch && exit\nexec {real.path} "$@"\n'
    )
    tool.chmod(0o755)
    _, hashes = record(copied, 2048, "sin", OTHER_PTXAS=str(tool), inductor="of-another")
    bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "bundle", "--force")
    events, found = frozen(copied, 2048, "sin", OTHER_PTXAS=str(tool))
    assert found == hashes
    assert all(events)


def test_every_config_is_captured_beside_the_recording(recorded):
    found = [row["captured"] for row in rows(recorded)]
    folder = recorded / "serve.launches.captured"
    assert sorted(path.name for path in folder.iterdir()) == sorted(row["entry"] for row in found)
    assert len(found) > 1, "several configs"
    for row in found:
        assert row["facts"]["target"] == "cuda:90:32"
        assert row["arguments"] == ["out_ptr0", "in_ptr0", "xnumel", "XBLOCK"]
        assert sorted(path.name for path in (folder / row["entry"]).iterdir()) == sorted(row["files"])
        assert {Path(name).suffix for name in row["files"]} == {".json", ".cubin"}
    assert str(recorded) not in (recorded / "serve.launches.json").read_text()


def test_packed_entries_hit_wherever_torch_puts_the_cache(copied):
    events, hashes = frozen(copied)
    assert all(events)
    assert len(events) == len(hashes) > 1
    assert not list((copied / "elsewhere").rglob("*.cubin"))
    done = bundle_project.run(copied, "verify", "bundle", "--json")
    found = json.loads(done.stdout)
    assert found["proven"]
    assert (found["launches"], found["captured"]) == (0, len(events))
    assert "captured entries are intact" in found["notes"][0]


@pytest.mark.parametrize(
    ("launch", "reason", "text"),
    [((4096, "cos"), "source", "was edited after packing"), ((64, "sin"), "constexpr", "constant XBLOCK: ")],
)
def test_what_was_not_captured_is_a_miss_that_says_why(copied, launch, reason, text):
    error = frozen(copied, *launch, code=1, TCACHE_RECORD=str(copied / "miss.launches.json"))
    assert "tcache.errors.CacheMiss: " in error
    assert "triton_poi_fused_sin_0 is not prebaked for this launch (mode frozen)" in error
    assert "nearest packed entry: " in error
    assert text in error
    assert "pack those with --include-captured" in error
    missed = [json.loads(line) for line in (copied / "miss.launches.json").read_text().splitlines()]
    assert [row.get("miss") for row in missed][-1].startswith("torch._inductor")
    assert ":triton_poi_fused_sin_0" in missed[0]["kernel"]
    assert "captured" not in missed[0]


def test_an_entry_that_is_missing_is_a_miss(copied):
    lost = next((copied / "bundle" / "entries").iterdir())
    shutil.rmtree(lost)
    bundle_project.sign(copied / "bundle")
    error = frozen(copied, code=1)
    assert f"packed entry {lost.name} agrees in every field tcache knows" in error


def test_captured_entries_are_packed_only_when_asked(copied):
    done = bundle_project.run(copied, "pack", "m.yaml", "-o", "without")
    assert "captured entries are left out: pass --include-captured to pack them" in done.stderr
    assert not (copied / "without" / "entries").exists()
    found = json.loads(bundle_project.run(copied, "diff", "bundle", "without", "--json", code=1).stdout)
    assert {row["state"] for row in found["captured"]} == {"removed"}
    assert len(found["captured"]) == len(rows(copied))
    shutil.rmtree(copied / "bundle")
    (copied / "without").rename(copied / "bundle")
    assert "no entry of this kernel is packed" in frozen(copied, code=1)


def test_native_helpers_of_captured_kernels_are_packed(copied):
    """From 3.6 on Triton's launcher is of one signature; torch's own static launcher needs a cache it may write to."""
    code = """
import json, sys
from types import SimpleNamespace
from tcache._triton.native import helper_sources
from tcache.bundle import Bundle
bundle = Bundle(sys.argv[1])
signature = {"out_ptr0": "*fp32", "in_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}
metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"), tensordesc_meta=[])
source = SimpleNamespace(fn=SimpleNamespace(arg_names=list(signature)), constants={(3,): 64}, signature=signature)
for wanted in helper_sources([SimpleNamespace(src=source, metadata=metadata)]):
    assert str(bundle.helper(source=wanted.digest)).endswith(".so"), wanted.name
"""
    subprocess.run([sys.executable, "-c", code, str(copied / "bundle")], check=True)


DAMAGE = [
    (lambda entry: next(entry.glob("*.cubin")).unlink(), "No such file"),
    (lambda entry: next(entry.glob("*.cubin")).write_bytes(b"x"), "is not what was captured: its digest differs"),
    (lambda entry: pipe(next(entry.glob("*.cubin"))), "is not what was captured: its digest differs"),
]


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(("damage", "text"), DAMAGE, ids=["absent", "digest", "pipe"])
def test_a_damaged_capture_is_refused(copied, damage, text):
    damage(min((copied / "serve.launches.captured").iterdir()))
    done = bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "other", code=2)
    assert text in done.stderr
    assert not (copied / "other").exists()


FLIPPED = [lambda entry: flip(next(entry.glob("*.cubin"))), *(damage for damage, _ in DAMAGE)]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("forgotten", [False, True], ids=["recording kept", "recording removed"])
def test_recording_again_mends_a_damaged_capture(copied, forgotten):
    """What packing advises; and without the recording nothing else would tell that a kernel's bytes are not its own."""
    entries = sorted((copied / "serve.launches.captured").iterdir())
    FLIPPED[0](entries[0])
    FLIPPED[1 + forgotten](entries[1])
    if forgotten:
        (copied / "serve.launches.json").unlink()
    record(copied, inductor="another")  # debug sections name another directory: other bytes, the same kernel
    assert len(rows(copied)) == len(entries)
    bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "bundle", "--force")
    assert all(frozen(copied)[0])
    compiled = {path.parent.name: path for path in (copied / "another").rglob("*.cubin")}
    for path in (copied / "bundle" / "entries").rglob("*.cubin"):
        own = with_name(strip_debug(compiled[path.parent.name].read_bytes()), path.parent.name)
        assert path.read_bytes() == own


def test_a_recording_made_from_another_directory_keeps_what_it_has(copied):
    before = (copied / "serve.launches.json").read_text()
    record(copied, inductor="another")
    assert (copied / "serve.launches.json").read_text() == before
    bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "bundle", "--force")


MALFORMED = [
    *((lambda one, name=name: one["facts"].pop(name), name)
      for name in ("kernel", "target", "signature", "constants", "attributes", "options", "source", "line", "text")),
    (lambda one: one["facts"].update(signature=[1]), "signature"),
    (lambda one: one["facts"].update(constants="x"), "constants"),
    (lambda one: one["facts"].update(options=[]), "options"),
    (lambda one: one["facts"].update(kernel=5), "kernel"),
    (lambda one: one.update(arguments=["other"]), "arguments"),
    (lambda one: one.update(arguments=[]), "arguments"),
    (lambda one: one["files"].update({"../x.json": {"size": 1, "sha256": ""}}), "files"),
    (lambda one: one.update(entry="../x"), "entry"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field"), MALFORMED)
def test_a_malformed_capture_is_an_error_with_file_and_line(recorded, tmp_path, change, field):
    row = rows(recorded)[0]
    change(row["captured"])
    path = tmp_path / "serve.launches.json"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ManifestError) as error:
        load_recording(path)
    assert f"{path}:1:1: captured" in str(error.value)
    assert field in str(error.value)


def test_a_capture_of_another_triton_is_refused(copied):
    path = copied / "serve.launches.json"
    path.write_text(path.read_text().replace('"triton":"3.', '"triton":"2.'))
    done = bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "-o", "other", code=2)
    assert "was captured under Triton 2." in done.stderr


def test_every_form_holds_captured_entries(copied):
    count = len(rows(copied))
    planned = json.loads(
        bundle_project.run(copied, "pack", "m.yaml", "--include-captured", "--dry-run", "--json").stdout
    )
    assert sum(name.startswith("entries/") for name in planned["others"]) == 2 * count
    for form, extra in [("wheel", ()), ("oci", ()), ("native", ("--mount-path", "/opt/triton/cache"))]:
        done = bundle_project.run(
            copied, "pack", "m.yaml", "--include-captured", "--format", form, *extra, "-o", f"out-{form}", "--json"
        )
        assert json.loads(done.stdout)["entries"] == count
    group = sorted((copied / "out-native").rglob("__grp__*.json"))
    assert len(group) == count
    paths = json.loads(group[0].read_text())["child_paths"]
    assert all(path.startswith("/opt/triton/cache/") for path in paths.values())
    assert json.loads(bundle_project.run(copied, "verify", "out-oci", "--json").stdout)["captured"] == count
