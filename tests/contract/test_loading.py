"""Bundles in use: found, skipped with a reason, layered, and gone while a service runs."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs

import tcache
from tcache import active as active_module
from tcache import prebaked as prebaked_module
from tcache._triton.cache import compile_events, set_cache_directory
from tcache.active import activate, active
from tcache.bundle import Accepted, Bundle
from tcache.errors import CacheMiss
from tcache.overlay import OverlayCacheManager

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project

pytestmark = pytest.mark.usefixtures("null_gpu")


def scale(module, n=4096):
    x = torch.zeros(64)
    module.scale[(1,)](x, x, n, BLOCK=64)


# what is found, and what is said about it


def install(site, name, value, place=None):
    """Lay out a package with a bundle as pip would."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tcache.bundles]\n{name} = {value}\n")
    package = site / name
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    if place is not None:
        shutil.copytree(place, package, dirs_exist_ok=True)


@pytest.fixture
def site(project, tmp_path, monkeypatch):
    site = tmp_path / "site"
    install(site, "first_kernels", "first_kernels", project / "bundle")
    install(site, "second_kernels", "second_kernels")
    shutil.copytree(project / "bundle", site / "second_kernels" / "h200")
    install(site, "third_kernels", "third_kernels")
    install(site, "fourth_kernels", "no_such_package")
    monkeypatch.syspath_prepend(str(site))
    return site


def test_installed_bundles_are_found_without_importing_their_packages(site, caplog):
    caplog.set_level(logging.INFO, "tcache")
    found = activate()
    assert [bundle.root for bundle in found.bundles] == [site / "first_kernels", site / "second_kernels" / "h200"]
    assert [(row.path, row.kind) for row in found.skipped] == [
        ("no_such_package", "bundle"),
        ("third_kernels", "bundle"),
    ]
    assert found.mode == "frozen"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("tcache: mode frozen, 2 bundles (m, m), 6 entries; skipped no_such_package: ")


def test_installed_bundles_alone_do_not_freeze_a_process(site, project, monkeypatch):
    assert active().mode == "tune"
    assert len(active().bundles) == 2
    monkeypatch.setattr(active_module, "_active", None)
    monkeypatch.setenv("TCACHE_BUNDLES", str(project / "bundle"))
    assert active().mode == "frozen"
    assert active().bundles[0].root == project / "bundle"
    assert len(active().bundles) == 3


def test_installed_bundles_can_be_left_alone(site, monkeypatch):
    monkeypatch.setenv("TCACHE_INSTALLED_BUNDLES", "0")
    assert activate().bundles == ()
    monkeypatch.delenv("TCACHE_INSTALLED_BUNDLES")
    assert activate(bundles=[]).bundles == ()


def test_a_bundle_named_twice_is_used_once(project):
    (project / "link").symlink_to("bundle")
    assert len(activate(bundles=[project / "bundle", str(project / "link"), project / "bundle"]).bundles) == 1


def test_many_bundles_some_for_other_machines(project, caplog):
    caplog.set_level(logging.INFO, "tcache")
    other = project / "other"
    shutil.copytree(project / "bundle", other)
    bundle_project.edit(other / "bundle.json", lambda data: data["environment"].update(triton="9.9.9"))
    newer = project / "newer"
    shutil.copytree(project / "bundle", newer)
    bundle_project.edit(newer / "bundle.json", lambda data: data.update(schema=2))
    activate(bundles=[other, newer, project / "absent", project / "bundle"])
    scale(bundle_project.load(project))
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert "1 bundles (m), 3 entries; " in line
    assert f"skipped {other}: packed for Triton 9.9.9, this process has {triton.__version__}" in line
    assert "bundle schema 2, expected 1" in line
    assert "absent: not a bundle" in line
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_relative_path_outlives_a_change_of_directory_and_a_turned_link(project, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    (project / "current").symlink_to("bundle")
    activate(bundles=["current"])
    (project / "current").unlink()
    (project / "current").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path)
    module = bundle_project.load(project)
    scale(module)
    module.tuned[(1,)](torch.zeros(64), 16)


def test_a_bundle_that_disappears_while_loaded(project):
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    scale(module)
    shutil.rmtree(project / "bundle")
    scale(module)  # what is loaded stays loaded
    with pytest.raises(CacheMiss) as caught:
        module.increment(torch.zeros(64, dtype=torch.bfloat16))
    assert caught.value.reasons == ("damaged",)
    assert "No such file or directory" in str(caught.value)


def test_a_file_that_changes_after_it_was_checked_is_looked_at_again(project):
    bundle = activate(bundles=[project / "bundle"]).bundles[0]
    path = next((project / "bundle" / "entries").glob("*/scale.cubin"))
    key = path.parent.name
    assert isinstance(bundle.entry_files(key), dict)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"x")
    assert "digest differs" in bundle.entry_files(key).reason
    path.write_bytes(data)
    assert isinstance(bundle.entry_files(key), dict)


@pytest.mark.parametrize("place", ["helper", "folder", "head"])
def test_a_helper_that_others_may_change_is_not_loaded(project, place):
    bundle = activate(bundles=[project / "bundle"]).bundles[0]
    [helper, *_] = bundle.helpers
    assert isinstance(bundle.helper(source=helper.source), Path)
    path = bundle.place / helper.path
    path = {"helper": path, "folder": path.parent, "head": bundle.place / "bundle.json"}[place]
    path.chmod(0o777)
    assert "writable by everyone" in bundle.helper(source=helper.source).reason


def test_a_helper_for_a_newer_glibc_says_so(project, monkeypatch):
    bundle = activate(bundles=[project / "bundle"]).bundles[0]
    monkeypatch.setattr("tcache.bundle.libc", lambda: "glibc 2.1")
    found = bundle.helper(source=bundle.helpers[0].source)
    assert found.kind == "libc"
    assert "needs glibc 2." in found.reason
    assert found.reason.endswith("this process has 2.1")


@pytest.mark.parametrize("name", ["bundle.json", "index.json", "scale.cubin"])
def test_what_is_far_too_large_is_refused_before_it_is_read(project, name):
    [path] = (project / "bundle").rglob(name)
    os.truncate(path, 1 << 40)  # sparse
    claimed = path.relative_to(project / "bundle").as_posix()
    if name != "bundle.json":
        head = project / "bundle" / "bundle.json"
        bundle_project.edit(head, lambda data: data["files"][claimed].update(size=1 << 40))
    found = activate(bundles=[project / "bundle"])
    if name == "bundle.json":
        assert "larger than 268435456 bytes" in found.skipped[0].reason
    else:
        assert "larger than 1073741824 bytes" in found.bundles[0].check(claimed).reason


# layers


def test_a_writable_layer_above_the_bundle(project, triton_cache):
    activate(bundles=[project / "bundle"], mode="lookup")
    module = bundle_project.load(project)
    before = tcache.stats()
    seen = []
    with compile_events(lambda _, hit: seen.append(hit)):
        scale(module)
        scale(module, n=4097)
        module.scale.device_caches.clear()
        scale(module, n=4097)
    assert seen == [True, False, True]
    after = tcache.stats()
    assert (after["entries"] - before["entries"], after["compiled"] - before["compiled"]) == (1, 2)
    assert len(list(triton_cache.iterdir())) == 1


def test_kernels_of_torch_compile_hit_wherever_it_moves_the_cache(project, tmp_path, monkeypatch, triton_cache):
    """Inductor compiles through ``triton.compile`` under a cache directory of its own; here with its own autotuner."""
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    hints = pytest.importorskip("torch._inductor.runtime.hints")
    monkeypatch.setattr(heuristics.triton_helpers, "set_driver_to_gpu", lambda: None)
    kernel = bundle_project.load(project).wrapped
    device = hints.DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip

    def precompile(block):
        meta = {
            "signature": {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}, "device": device, "constants": {},
            "configs": [{(0,): [["tt.divisibility", 16]]}],
        }  # fmt: skip
        config = triton.Config({"BLOCK": block}, num_warps=1, num_stages=1)
        kind = heuristics.HeuristicType.POINTWISE
        tuner = heuristics.CachingAutotuner(kernel, meta, [config], None, [], optimize_mem=True, heuristic_type=kind)
        return tuner._precompile_config(config)

    activate(bundles=[], mode="tune")
    set_cache_directory(str(triton_cache))
    precompile(64)
    [entry] = [path for path in triton_cache.iterdir() if path.is_dir()]
    target = project / "bundle" / "entries" / entry.name
    target.mkdir()
    for file in entry.iterdir():
        if file.suffix == ".cubin" or (file.suffix == ".json" and not file.name.startswith("__grp__")):
            shutil.copy(file, target)
    bundle_project.sign(project / "bundle")
    activate(bundles=[project / "bundle"])
    elsewhere = tmp_path / "inductor"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(elsewhere))
    seen = []
    with compile_events(lambda _, hit: seen.append(hit)):
        precompile(64)
    assert seen == [True]
    with pytest.raises(CacheMiss) as caught:
        precompile(32)
    assert "constexpr" in caught.value.reasons
    assert "`tcache record` writes what a running program launches" in str(caught.value)
    assert not elsewhere.exists()


@pytest.mark.parametrize("damage", ["other bytes", "writable", "unlisted"])
def test_what_triton_puts_is_answered_with_an_intact_helper(project, damage):
    """Triton asks a manager to keep what ``knobs.build.impl`` gave it; the same helper may lie damaged elsewhere."""
    other = project / "other"
    shutil.copytree(project / "bundle", other)
    path = next(other.rglob("cuda_utils*.so"))
    data = path.read_bytes()
    if damage == "other bytes":
        path.write_bytes(b"x" + data[1:])
    elif damage == "writable":
        path.chmod(0o777)
    else:
        name = path.relative_to(other).as_posix()
        bundle_project.edit(other / "bundle.json", lambda head: head["files"].pop(name))
    activate(bundles=[other, project / "bundle"])
    found = Path(OverlayCacheManager("A" * 52).put(data, path.name))
    assert found == project / "bundle" / path.relative_to(other)
    activate(bundles=[other])
    with pytest.raises(CacheMiss):
        OverlayCacheManager("A" * 52).put(data, path.name)


def test_an_error_that_passes_is_no_verdict(project):
    """No descriptor was left at the first launch: the next one hits."""
    bundle = activate(bundles=[project / "bundle"]).bundles[0]
    [key] = [key for key in bundle.entries if (project / "bundle" / "entries" / key / "scale.json").exists()]
    store = next(name for name in bundle.files if name.startswith("store/"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        entry, file = bundle.entry_files(key), bundle.check(store)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "Too many open files" in entry.reason
    assert "Too many open files" in file.reason
    assert isinstance(bundle.entry_files(key), dict)
    assert isinstance(bundle.check(store), Accepted)


def test_a_file_in_place_of_a_bundle_is_skipped_and_says_what_to_do(tmp_path):
    (tmp_path / "b-0-py3-none-any.whl").touch()
    (tmp_path / "b").touch()
    wheel, other = activate(bundles=[tmp_path / "b-0-py3-none-any.whl", tmp_path / "b"]).skipped
    assert wheel.reason.endswith(
        "b-0-py3-none-any.whl: not a bundle: a wheel: install it with pip, and it is found by itself"
    )
    assert other.reason.endswith("b: not a bundle: a file, expected a directory")


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\xed\xa0\x80"'])
def test_names_that_no_message_can_hold(project, text):
    head = project / "bundle" / "bundle.json"
    name = next(helper["path"] for helper in json.loads(head.read_bytes())["helpers"])
    head.write_bytes(head.read_bytes().replace(f'"{name}"'.encode(), text))
    [row] = activate(bundles=[project / "bundle"]).skipped
    assert "bundle.json: corrupt" in row.reason


def test_a_bundle_that_disappears_between_looking_and_reading(project, monkeypatch):
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    real = prebaked_module.compiled

    def late(*args):
        shutil.rmtree(project / "bundle")
        return real(*args)

    monkeypatch.setattr(prebaked_module, "compiled", late)
    with pytest.raises(CacheMiss, match="No such file or directory"):
        module.tuned[(1,)](torch.zeros(64), 16)


def between(monkeypatch, change):
    """Change a bundle after the cache manager has answered and before Triton reads what it was told."""
    real, done = OverlayCacheManager.get_group, []

    def late(self, name):
        found = real(self, name)
        if not done:
            done.append(change())
        return found

    monkeypatch.setattr(OverlayCacheManager, "get_group", late)


def kernels(bundle, name):
    return [path for path in (bundle / "entries").glob("*/*") if path.name.startswith(name)]


def exchanged(bundle):
    """Put another kernel's binary, whole and of this very machine, in the place of one."""
    [here] = [path for path in kernels(bundle, "scale") if path.suffix == ".cubin"]
    [other] = [path for path in kernels(bundle, "wrapped") if path.suffix == ".cubin"]
    here.write_bytes(other.read_bytes())


def halved(bundle):
    [path] = [path for path in kernels(bundle, "scale") if path.suffix == ".json"]
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize("change", [shutil.rmtree, exchanged, halved], ids=["gone", "exchanged", "halved"])
def test_a_bundle_that_changes_before_triton_reads_an_entry(project, monkeypatch, change):
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    between(monkeypatch, lambda: change(project / "bundle"))
    before = tcache.stats()
    with pytest.raises(CacheMiss, match=r"No such file|digest differs|bytes, expected") as caught:
        scale(module)
    assert caught.value.reasons == ("damaged",)
    after = tcache.stats()
    assert (after["refused"] - before["refused"], after["misses"] - before["misses"]) == (1, 1)


@pytest.mark.parametrize("change", [shutil.rmtree, exchanged, halved], ids=["gone", "exchanged", "halved"])
def test_what_changes_before_it_is_read_is_compiled_in_mode_lookup(
    project, monkeypatch, triton_cache, change, null_gpu
):
    activate(bundles=[project / "bundle"], mode="lookup")
    module = bundle_project.load(project)
    between(monkeypatch, lambda: change(project / "bundle"))
    x = torch.zeros(64)
    kernel = module.scale[(1,)](x, x, 4096, BLOCK=64)
    assert kernel.name == "scale"
    assert Path(kernel.metadata_group["scale.cubin"]).is_relative_to(triton_cache)
    assert len(null_gpu.launches) == 1


def test_what_is_put_back_before_it_is_read_is_used(project, monkeypatch):
    """As a bundle that is copied over an equal one: other files, the same bytes."""
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)

    def copied():
        shutil.copytree(project / "bundle", project / "again")
        shutil.rmtree(project / "bundle")
        (project / "again").rename(project / "bundle")

    between(monkeypatch, copied)
    x = torch.zeros(64)
    kernel = module.scale[(1,)](x, x, 4096, BLOCK=64)
    assert type(copy.copy(kernel.metadata_group)) is dict  # what torch's compile workers send
    module.tuned[(1,)](torch.zeros(64), 16)


def test_a_bundle_of_links_says_what_to_do(project):
    """As installers make it that link files from a cache of theirs."""
    (project / "store-of-files").mkdir()
    for number, path in enumerate(kernels(project / "bundle", "scale")):
        path.rename(project / "store-of-files" / str(number))
        path.symlink_to(project / "store-of-files" / str(number))
    activate(bundles=[project / "bundle"])
    with pytest.raises(CacheMiss, match=r"a symbolic link, which is not followed: .* `cp -rL`"):
        scale(bundle_project.load(project))


@pytest.mark.parametrize("mode", ["frozen", "lookup"])
def test_a_bundle_that_never_rests_is_a_miss(project, monkeypatch, mode):
    """Nothing that was not compared after it was read is run."""
    activate(bundles=[project / "bundle"], mode=mode)
    module = bundle_project.load(project)
    real = Bundle.entry_files
    monkeypatch.setattr(Bundle, "entry_files", lambda bundle, key: (found := real(bundle, key)) and dict(found))
    with pytest.raises(CacheMiss, match="changed each of 3 times"):
        scale(module)


def test_a_bundle_that_is_replaced_while_loaded_says_to_start_again(project):
    """As by an upgrade of the wheel it came in."""
    activate(bundles=[project / "bundle"])
    module = bundle_project.load(project)
    module.tuned[(1,)](torch.zeros(64), 16)
    [path] = [path for path in kernels(project / "bundle", "scale") if path.suffix == ".json"]
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))  # packed by another release, say
    bundle_project.sign(project / "bundle")
    with pytest.raises(CacheMiss, match="the bundle was replaced after this process opened it") as caught:
        scale(module)
    assert caught.value.reasons == ("damaged",)
    assert caught.value.hint.startswith("start the process again")
    activate(bundles=[project / "bundle"])
    scale(module)


def test_what_is_no_bundle_says_what_it_is(project, tmp_path):
    """Of the forms that `pack` writes a service opens directories; the others have their own way in."""
    image, cache, empty = (tmp_path / name for name in ("image", "cache", "empty"))
    bundle_project.run(project, "pack", "m.yaml", "--store", "store", "--warmup", "--format", "oci", "-o", image)
    mount = ["--mount-path", str(cache)]
    bundle_project.run(project, "pack", "m.yaml", "--store", "store", "--format", "native", *mount, "-o", cache)
    empty.mkdir()
    found = activate(bundles=[image, cache, empty, tmp_path / "nowhere"]).skipped
    for row, text in zip(
        found, ["/opt/tcache/<name>", "TRITON_CACHE_DIR", "no bundle.json", "no such dir"], strict=True
    ):
        assert text in row.reason


def test_one_bundle_need_not_be_a_list(project):
    for place in (project / "bundle", str(project / "bundle")):
        assert [bundle.root for bundle in activate(bundles=place).bundles] == [project / "bundle"]


def test_a_helper_on_a_file_system_that_runs_no_code(project, monkeypatch):
    """As Kubernetes' image volumes may be: loading it would be an ImportError."""
    copy = project / "copy"
    shutil.copytree(project / "bundle", copy)
    real = os.statvfs

    def barred(path):
        found = list(real(path))
        found[8] = (found[8] | os.ST_NOEXEC) if Path(path).is_relative_to(copy) else (found[8] & ~os.ST_NOEXEC)
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", barred)
    helper = activate(bundles=[copy, project / "bundle"]).bundles[0].helpers[0]
    data, file = (copy / helper.path).read_bytes(), Path(helper.path).name
    manager = OverlayCacheManager(helper.keys[0])
    assert manager.get_file(file) == manager.put(data, file) == str(project / "bundle" / helper.path)
    source = project / "helper.c"
    source.write_text("as Triton hands it over")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    bundle_project.edit(copy / "bundle.json", lambda head: head["helpers"][0].update(source=digest))
    activate(bundles=[copy])
    assert manager.get_file(file) is None
    with pytest.raises(CacheMiss, match="mounted noexec") as caught:
        knobs.build.impl(helper.name, str(source), "", [], [], [])
    assert caught.value.reasons == ("helper",)
