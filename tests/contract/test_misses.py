"""Every reason for which a launch may miss, named: on a driver that compiles for real and launches nothing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

import tcache
from tcache._triton.distribution import Distribution
from tcache.active import activate
from tcache.errors import CacheMiss
from tcache.keys import find_gpu
from tcache.manifest import load_manifest
from tcache.resolve import resolve

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project

pytestmark = pytest.mark.usefixtures("null_gpu")


def frozen(project, **more):
    activate(bundles=[project / "bundle"], mode="frozen", **more)
    return bundle_project.load(project)


def scale(module, n=4096, dtype=torch.float32, offset=0, block=64, y=True, **options):
    x = torch.zeros(4200, dtype=dtype)
    module.scale[(1,)](x[offset:], x if y else None, n, BLOCK=block, **options)


def missing(call, *args, **kwargs):
    before = tcache.stats()
    with pytest.raises(CacheMiss) as caught:
        call(*args, **kwargs)
    miss = caught.value
    after = tcache.stats()
    assert after["misses"] == before["misses"] + 1
    for reason in miss.reasons:
        assert after["reasons"][reason] == before["reasons"].get(reason, 0) + 1
    assert "(mode frozen)" in str(miss)
    return miss


def test_what_was_packed_hits(project, null_gpu, triton_cache):
    module = frozen(project)
    before = tcache.stats()
    scale(module)
    module.increment(torch.zeros(64, dtype=torch.bfloat16))
    module.tuned[(1,)](torch.zeros(64), 16)
    assert [name for name, _ in null_gpu.launches] == ["scale", "wrapped", "tuned"]
    assert tcache.stats()["entries"] == before["entries"] + 3
    assert not triton_cache.exists()


LAUNCHES = [
    ({"offset": 1}, ("alignment",), "alignment x_ptr: not divisible by 16, packed tt.divisibility=16"),
    ({"n": 1}, ("one",), "argument n: 1 (compiled in), packed i32"),
    ({"n": 4097}, ("divisibility",), "divisibility n: not divisible by 16, packed tt.divisibility=16"),
    ({"n": 2**40}, ("integer",), "signature n: i64, packed i32"),
    ({"n": 2**40 + 1}, ("integer", "divisibility"), "signature n: i64, packed i32"),
    ({"dtype": torch.bfloat16}, ("dtype",), "signature x_ptr: *bf16, packed *fp32"),
    ({"block": 128}, ("constexpr",), "constant BLOCK: 128, packed 64"),
    ({"num_warps": 8}, ("option",), "option num_warps: 8, packed 4"),
    ({"y": False}, ("argument",), "signature y_ptr: None, packed *fp32"),
    ({"n": 4097, "offset": 1}, ("alignment", "divisibility"), "divisibility n: "),
]


@pytest.mark.parametrize(("launch", "reasons", "text"), LAUNCHES, ids=["-".join(row[1]) for row in LAUNCHES])
def test_a_launch_that_was_not_packed(project, launch, reasons, text):
    miss = missing(scale, frozen(project), **launch)
    assert miss.reasons == reasons
    assert text in str(miss)
    assert miss.kernel == "loadables:scale"
    assert f"entry: {miss.entry}" in str(miss)
    assert (project / "bundle" / "entries" / miss.nearest / "scale.cubin").exists()
    assert "add the shape to the shape manifest" in miss.hint
    assert covered(project, miss) == [miss.entry]


def covered(project, miss):
    """Return the entries that the manifest lines of a miss resolve to."""
    assert "manifest lines" in str(miss) or "these lines of a manifest" in str(miss)
    manifest = project / "added.yaml"
    manifest.write_text("version: 1\ngpus: [NVIDIA H200]\nkernels:\n" + miss.manifest + "\n")
    cases = list(load_manifest(manifest).cases())
    assert len(cases) == 1
    return [found.entry for found in resolve(cases, find_gpu("NVIDIA H200"), (), untuned="all")[0]]


def test_a_kernel_behind_a_wrapper_names_the_wrapper(project):
    module = frozen(project)
    miss = missing(module.increment, torch.zeros(63, dtype=torch.bfloat16))
    assert miss.reasons == ("divisibility",)
    assert "covered by a further case of `call: loadables.py:increment`" in str(miss)
    assert "num_warps: 2" in miss.manifest
    assert covered(project, miss) == [miss.entry]


def test_arguments_of_other_kinds_are_spelled_out_or_said_to_be_unspeakable(project):
    module = frozen(project)
    miss = missing(module.scale[(1,)], torch.zeros(64), torch.zeros(64), (3, 4), BLOCK=64)
    assert miss.manifest == ""
    assert "write a `call:` item" in str(miss)


EDITS = [
    (
        "import triton\n",
        "import triton\n# a comment\n",
        ("line",),
        "line: the kernel starts at line 15, packed at line 14",
    ),
    ("def scale(x_ptr", "def scale(\n    x_ptr", ("text",), "formatting or comments changed"),
    ("x * 2", "x * 3", ("source",), "was edited after packing"),
    ("helper(tl.load", "-helper(tl.load", ("source",), "was edited after packing"),
]


@pytest.mark.parametrize(("old", "new", "reasons", "text"), EDITS, ids=["line", "text", "helper", "kernel"])
def test_edited_source(project, old, new, reasons, text):
    path = project / "loadables.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    miss = missing(scale, frozen(project))
    assert miss.reasons == reasons
    assert text in str(miss)
    assert "this is not the source that was packed" in miss.hint


def test_a_kernel_that_nobody_packed(project):
    module = frozen(project)
    miss = missing(module.unpacked[(1,)], torch.zeros(1), 5)
    assert miss.reasons == ("kernel",)
    assert "no entry of this kernel is packed in" in str(miss)
    assert covered(project, miss) == [miss.entry]


def test_a_variable_of_tritons_key_that_was_set_too_late(project, monkeypatch):
    module = frozen(project)
    monkeypatch.setenv("NVPTX_ENABLE_DUMP", "1")
    miss = missing(scale, module)
    assert miss.reasons == ("variable",)
    assert "variable NVPTX_ENABLE_DUMP: " in str(miss)
    assert "start the service with the environment that was packed" in miss.hint


def test_another_build_of_the_same_release(project):
    lost = next((project / "bundle" / "entries").glob("*/scale.cubin")).parent
    shutil.rmtree(lost)  # what a libtriton of another build asks for lies under another name
    bundle_project.sign(project / "bundle")
    miss = missing(scale, frozen(project))
    assert miss.reasons == ("build",)
    assert f"packed entry {lost.name} agrees in every field" in str(miss)
    assert miss.hint.startswith("pack with the service's own Triton")


def test_a_triton_that_was_edited_is_named(project, monkeypatch):
    lost = next((project / "bundle" / "entries").glob("*/scale.cubin")).parent
    shutil.rmtree(lost)
    bundle_project.sign(project / "bundle")
    module = frozen(project)
    monkeypatch.setattr(
        "tcache.explain.distribution", lambda: Distribution("", "jit.py: edited after it was installed")
    )
    assert "installed Triton: jit.py: edited after it was installed" in str(missing(scale, module))
    monkeypatch.setattr("tcache.explain.distribution", lambda: Distribution("0" * 64))
    assert "it was packed with another build of this release" in str(missing(scale, module))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("triton", "3.0.0", "triton"),
        ("python", "cpython-39", "python"),
        ("platform", "linux-riscv64", "platform"),
        ("libc", "musl 1.2", "libc"),
        ("variables", {"NVPTX_ENABLE_DUMP": "1"}, "variable"),
    ],
)
def test_a_bundle_for_another_machine_is_skipped_with_its_reason(project, caplog, field, value, reason):
    bundle_project.edit(project / "bundle" / "bundle.json", lambda data: data["environment"].update({field: value}))
    module = frozen(project)
    miss = missing(scale, module)
    assert miss.reasons == ("kernel", reason)
    assert f"skipped bundle {project / 'bundle'}: packed " in str(miss)
    assert caplog.text.count("skipped") == 1


def test_no_bundle_at_all(project, caplog):
    shutil.rmtree(project / "bundle")
    miss = missing(scale, frozen(project))
    assert miss.reasons == ("kernel", "bundle")
    assert "not a bundle: there is no such directory" in str(miss)


def test_a_damaged_entry(project, caplog):
    module = frozen(project)
    path = next((project / "bundle" / "entries").glob("*/scale.cubin"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = tcache.stats()["refused"]
    miss = missing(scale, module)
    assert miss.reasons == ("damaged",)
    assert "digest differs from bundle.json" in str(miss)
    assert tcache.stats()["refused"] == before + 1


def test_a_native_helper_of_another_source(project, tmp_path):
    from tcache import overlay

    frozen(project)
    source = tmp_path / "cuda_utils.c"
    source.write_text("int f(void);")
    miss = missing(overlay._build, "cuda_utils", str(source), "", [], [], [])
    assert miss.reasons == ("helper",)


def test_no_best_config(project):
    module = frozen(project)
    miss = missing(module.tuned[(1,)], torch.zeros(64), 48)
    assert miss.reasons == ("untuned",)
    assert "nearest tuned shape: n=16" in str(miss)
    assert "BLOCK" not in miss.manifest
    assert len(covered(project, miss)) == 2  # one entry for each config, until it is tuned


def test_a_best_config_of_other_source_is_stale(project):
    path = project / "loadables.py"
    path.write_text(path.read_text().replace("o.to(tl.float32)", "-o.to(tl.float32)"))
    module = frozen(project)
    assert missing(module.tuned[(1,)], torch.zeros(64), 16).reasons == ("stale",)


def test_a_tuned_kernels_entry_is_covered_without_what_the_config_fills_in(project):
    module = frozen(project)
    miss = missing(module.tuned[(1,)], torch.zeros(65)[1:], 16)  # the same shape key, another specialization
    assert miss.reasons == ("alignment",)
    assert "offset: 1" in miss.manifest
    assert "BLOCK" not in miss.manifest
    assert miss.entry in covered(project, miss)


def test_capturing(project, monkeypatch):
    activate(bundles=[project / "bundle"], mode="tune")
    module = bundle_project.load(project)
    monkeypatch.setattr("tcache.autotuner._capturing", lambda: True)
    with pytest.raises(CacheMiss) as caught:
        module.tuned[(1,)](torch.zeros(64), 48)
    assert caught.value.reasons == ("capturing",)


def test_an_explanation_does_without_a_damaged_index(project):
    module = frozen(project)
    (project / "bundle" / "index.json").write_text("{")
    miss = missing(scale, module, n=1)
    assert miss.reasons == ("kernel",)


def test_triton_told_to_compile_whatever_there_is(project, monkeypatch):
    module = frozen(project)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    for call in (lambda: scale(module), lambda: module.tuned[(1,)](torch.zeros(64), 16)):
        with pytest.raises(CacheMiss, match="since TRITON_ALWAYS_COMPILE is set") as caught:
            call()
        assert caught.value.hint.startswith("unset it")


@pytest.mark.parametrize("signed", [False, True])
def test_damaged_best_configs(project, signed):
    """The shape was tuned: to say that it never was, and to tune again, would lead astray."""
    [path] = (project / "bundle" / "store").rglob("*.json")
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9'))
    if signed:
        bundle_project.sign(project / "bundle")
    module = frozen(project)
    miss = missing(lambda: module.tuned[(1,)](torch.zeros(64), 16))
    assert miss.reasons == ("damaged", "untuned")
    assert f"refused: {path}" in str(miss)
    assert ("schema" if signed else "digest differs") in str(miss)
    assert "copy it again" in miss.hint
