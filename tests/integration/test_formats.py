"""Every form of a bundle, used as its users use it: installed by pip, mounted for stock Triton, compared."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from projects import batch, make_project, python, store

from tcache._triton import native, release

H200 = "NVIDIA H200"


MANIFEST = "shapes/m.yaml"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose entries are compiled; tests write beside it and change nothing in it."""
    return make_project(tmp_path_factory.mktemp("formats") / "project")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("packed")


def packing(manifest, output, *options):
    return ["pack", manifest, "-o", output, "--json", *options]


@pytest.fixture(scope="module")
def packed(project, out):
    """The project in every form: name -> the command's answer."""
    native_options = ["--mount-path", "/somewhere/else", "--libcuda-dir", out]
    commands = {
        "missing": packing(MANIFEST, out / "missing"),
        "warmup": packing(MANIFEST, out / "a", "--warmup", "--name", "Shop.Kernels"),
        "plain": packing("shapes/plain.yaml", out / "plain"),
        "wheel": packing(MANIFEST, out / "wheel", "--format", "wheel", "--name", "Shop.Kernels"),
        "b": packing("shapes/plain.yaml", out / "b", "--format", "wheel", "--name", "b", "--version", "1.2.0"),
        "pure": packing(MANIFEST, out / "pure", "--format", "wheel", "--no-native"),
        "tar": packing("shapes/plain.yaml", out / "image.tar", "--format", "oci"),
        "native": packing(MANIFEST, out / "native", "--format", "native", *native_options),
    }
    return dict(zip(commands, batch(project, *commands.values()), strict=True))


@pytest.fixture(scope="module")
def wheel(packed):
    return Path(json.loads(packed["wheel"].ok())["output"])


@pytest.fixture(scope="module")
def wheel_b(packed):
    return Path(json.loads(packed["b"].ok())["output"])


def test_the_wheel_says_what_it_holds_and_needs(wheel):
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name, version, python_tag, abi, platform = wheel.name.removesuffix(".whl").split("-")
    assert (name, python_tag, abi) == ("tcache_bundle_shop_kernels", tag, tag)
    assert platform.startswith("manylinux_2_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"{name}-{version}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        points = archive.read(f"{info}/entry_points.txt").decode()
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode()))}
        assert set(rows) == set(names)
        for member in names:
            data = archive.read(member)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert rows[member] == ([f"sha256={digest}", str(len(data))] if not member.endswith("RECORD") else ["", ""])
    assert f"\nRequires-Dist: triton == {release}\n" in metadata
    assert "\nRequires-Dist: triton-tcache >= " in metadata
    assert "Requires-Dist: tcache" not in metadata
    assert points == f"[tcache.bundles]\n{name} = {name}\n"
    assert f"{name}/bundle.json" in names


def test_the_wheel_passes_the_linters(wheel, tmp_path):
    for module in ("check_wheel_contents", "twine", "wheel"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    for command in (
        ["check_wheel_contents", wheel],
        ["twine", "check", "--strict", wheel],
        ["wheel", "unpack", "--dest", tmp_path, wheel],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr


def install(target, *wheels):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run([*command, *map(str, wheels)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LAUNCH = """\
import sys
sys.path[:0] = [{here!r}, {sources!r}]
import torch
import null_driver
import tcache
from tcache._triton.cache import compile_events
from pathlib import Path

settings = tcache.activate(bundles=sys.argv[1:])
assert len(settings.bundles) == len(sys.argv) - 1, settings.skipped
null = null_driver.activate()
compiled = []
import kernels
with compile_events(lambda name, hit: None if hit else compiled.append(name)):
    for n in (4096, 4097):
        kernels.plain[(1,)](torch.empty(n), torch.empty(n), n, BLOCK=64)
    try:
        kernels.plain[(1,)](torch.empty(1), torch.empty(1), 1, BLOCK=64)
    except tcache.CacheMiss:
        print("missed what is not packed")
print(f"{{len(null.launches)}} launches, compiled {{compiled}}")
"""


def test_installed_wheels_serve_a_frozen_process_side_by_side(project, wheel, wheel_b, tmp_path):
    assert wheel_b.name.startswith("tcache_bundle_b-1.2.0-")
    target = tmp_path / "site"
    install(target, wheel, wheel_b)
    bundles = [target / "tcache_bundle_shop_kernels", target / "tcache_bundle_b"]
    contract = Path(__file__).parents[1] / "contract"
    code = LAUNCH.format(here=str(contract), sources=str(project / "src"))
    done = python(project, "-c", code, *map(str, bundles), TRITON_CACHE_DIR=str(tmp_path / "nothing"))
    assert done.stdout == "missed what is not packed\n2 launches, compiled []\n"
    assert not (tmp_path / "nothing").exists()
    points = "import importlib.metadata as m\nprint(sorted(p.value for p in m.entry_points(group='tcache.bundles')))"
    found = python(project, "-c", points, PYTHONPATH=os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")]))
    assert found.stdout == "['tcache_bundle_b', 'tcache_bundle_shop_kernels']\n"


def test_pip_checks_what_the_wheel_requires(wheel, tmp_path):
    def complaints(target):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pip", "check"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
        return [line for line in done.stdout.splitlines() if line.startswith("tcache-bundle")]

    target = tmp_path / "site"
    install(target, wheel)
    assert complaints(target) == []
    [metadata] = target.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace(f"triton == {release}", "triton == 0.0.1"))
    assert len(complaints(target)) == 1


def test_a_wheel_without_native_helpers_is_pure(packed):
    answer = json.loads(packed["pure"].ok())
    assert answer["output"].endswith("-py3-none-any.whl")
    assert "the service needs a C compiler" in answer["notes"][0]


def test_archives_are_verified_as_they_are_and_damaged_ones_refused(project, packed, wheel_b, out, tmp_path):
    commands = [["verify", archive] for archive in (out / "plain", wheel_b, out / "image.tar")]
    for archive in (wheel_b, out / "image.tar"):
        data = archive.read_bytes()
        half = len(data) // 2  # in an entry of the wheel, in a layer of the image; an end may be padding
        for number, damaged in enumerate((data[:half], data[:half] + b"xxxx" + data[half + 4 :])):
            path = tmp_path / f"{number}{archive.suffix}"
            path.write_bytes(damaged)
            commands.append(["verify", path])
    answers = batch(project, *commands)
    for answer in answers[:3]:
        assert answer.ok().startswith("proven: 2 launches, 2 hits")
    for command, answer in zip(commands[3:], answers[3:], strict=True):
        assert answer.code == 2
        assert answer.stderr.startswith(f"error: {command[1]}"), answer.stderr
        assert len([line for line in answer.stderr.splitlines() if line.startswith("error: ")]) == 1


STOCK = """\
import json
import sys
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name, *_):
        return object(), name, 32, 0, 1024

    def unload_module(self, module):
        pass


class Null(DriverBase):
    utils = Utils()

    def __init__(self):
        super().__init__()

    is_active = classmethod(lambda cls: True)
    map_python_to_cpp_type = lambda self, ty: ty
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    set_current_device = lambda self, device: None
    get_device_capability = lambda self, device=None: (9, 0)
    get_active_torch_device = lambda self: torch.device("cpu")

    def get_benchmarker(self):
        raise SystemExit("stock Triton went to benchmark")

    def launcher_cls(self, source, metadata):
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(source, metadata)  # 3.6: a native helper for each signature
        return lambda *_: launched.append({**{str(k): v for k, v in source.constants.items()}, "name": source.name})


def refuse(*_):
    raise SystemExit("stock Triton went to build a native helper")


launched, compiled = [], []
knobs.build.impl = refuse
knobs.compilation.listener = lambda src, cache_hit, **_: None if cache_hit else compiled.append(src.name)
nvidia.CudaUtils()
driver.set_active(Null())
sys.path.insert(0, "src")
import kernels

for n in (4096, 4097):
    kernels.plain[(1,)](torch.empty(n), torch.empty(n), n, BLOCK=64)
kernels.tuned[(1,)](torch.empty(4096), torch.empty(4096), 4096)
config = kernels.tuned.best_config
assert "tcache" not in sys.modules
print(json.dumps({"launched": len(launched), "compiled": compiled, "block": config.kwargs["BLOCK"]}))
"""


@pytest.fixture(scope="module")
def driver_library(tmp_path_factory):
    """A directory with a ``libcuda.so.1`` that exports the driver's names, so that native helpers can be loaded."""
    folder = tmp_path_factory.mktemp("driver")
    native._driver_stub(folder, ["gcc"])
    return folder


@pytest.mark.parametrize(("winner", "with_file"), [(0, True), (1, False)])
def test_stock_triton_hits_a_mounted_cache(project, packed, driver_library, tmp_path, winner, with_file):
    root = tmp_path / "project"
    shutil.copytree(project, root)
    store(root, winner, 0.25, "NVIDIA H200")
    mount = tmp_path / "mounted"
    options = ["--format", "native", "--mount-path", mount, "--libcuda-dir", driver_library, "--warmup"]
    [answer] = batch(root, packing(MANIFEST, tmp_path / "elsewhere", *options))
    assert json.loads(answer.ok())["notes"] == []
    shutil.move(tmp_path / "elsewhere", mount)
    before = sorted(path.relative_to(mount) for path in mount.rglob("*"))
    programs = tmp_path / "bin"
    programs.mkdir()
    if with_file:
        (programs / "file").write_text("#!/bin/sh\necho ELF 64-bit LSB pie executable\n")
        (programs / "file").chmod(0o755)
    done = python(
        root, "-c", STOCK, TRITON_CACHE_DIR=str(mount), PATH=f"{programs}:/nonexistent",
        TRITON_LIBCUDA_PATH=str(driver_library), LD_LIBRARY_PATH=str(driver_library),
    )  # fmt: skip
    assert json.loads(done.stdout) == {"launched": 3, "compiled": [], "block": (64, 128)[winner]}
    assert sorted(path.relative_to(mount) for path in mount.rglob("*")) == before


def test_a_native_cache_at_another_place_misses(project, packed, driver_library, out, tmp_path):
    """The group files name the mount path: what makes the test above pass is that path and nothing else."""
    shutil.copytree(out / "native", tmp_path / "cache")
    code = STOCK.replace("nvidia.CudaUtils()", "").replace("hasattr(nvidia,", "False and hasattr(nvidia,")
    done = python(project, "-c", code, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert sorted(set(json.loads(done.stdout)["compiled"])) == ["plain", "tuned"]


def test_the_same_inputs_give_the_same_bytes_wherever_they_are(tmp_path):
    """Two checkouts, two working directories, two users' umasks and homes, each compiled on its own."""
    digests = []
    for place, umask in (("one/project", 0o022), ("two/deeper/checkout", 0o077)):
        root = make_project(tmp_path / place)
        cwd = root if umask == 0o022 else tmp_path
        manifest = os.path.relpath(root / "shapes" / "m.yaml", cwd)
        out = tmp_path / f"out{umask}"
        forms = [("dir", out / "b"), ("wheel", out), ("oci", out / "image.tar"), ("native", out / "n")]
        mount = {"native": ["--mount-path", "/cache"]}
        commands = [packing(manifest, to, "--format", form, "--warmup", *mount.get(form, [])) for form, to in forms]
        before = os.umask(umask)
        try:
            answers = batch(root, *commands, cwd=cwd, SOURCE_DATE_EPOCH="1700000000")
        finally:
            os.umask(before)
        for answer in answers:
            answer.ok()
        tree = {
            path.relative_to(out).as_posix(): (
                oct(path.stat().st_mode) if path.parent != out else "",
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
                int(path.stat().st_mtime) if path.parent != out else 0,
            )
            for path in sorted(out.rglob("*"))
        }
        digests.append(tree)
        text = b"".join(path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file())
        assert str(tmp_path).encode() not in text
    assert digests[0] == digests[1]
    assert {value[2] for path, value in digests[0].items() if "/" in path} == {1700000000}


def test_dry_run_says_what_and_why_and_writes_nothing(project, packed, tmp_path):
    root = tmp_path / "project"
    shutil.copytree(project, root)
    lost = next(path.parent for path in (root / ".cache").rglob("tuned.cubin"))
    shutil.rmtree(lost)
    before = sorted(path for path in root.rglob("*") if "__pycache__" not in path.parts)
    dry = ["pack", MANIFEST, "--dry-run"]
    text, data = batch(root, dry, [*dry, "--json", "--include-ir", "ptx"])
    assert "would pack 3 launches, 3 entries (1 missing)" in text.ok()
    [row] = [line for line in text.stdout.splitlines() if lost.name in line]
    assert "missing" in row
    assert "1 from m.yaml:11:" in row
    answer = json.loads(data.ok())
    present = [entry for entry in answer["entries"] if entry["present"]]
    assert [sorted(entry["files"]) for entry in present] == [["plain.cubin", "plain.json", "plain.ptx"]] * 2
    assert answer["missing"] == 1
    assert sorted(path for path in root.rglob("*") if "__pycache__" not in path.parts) == before


def test_what_is_missing_is_listed_or_compiled(packed, out):
    refused = packed["missing"]
    assert refused.code == 2
    assert "3 of 3 entries are not in the Triton cache" in refused.stderr
    assert len([line for line in refused.stderr.splitlines() if line.startswith("  kernels:")]) == 3
    assert "hint: run: tcache warmup shapes/m.yaml " in refused.stderr
    assert " --cache-dir " in refused.stderr
    assert refused.stderr.endswith(", or pass --warmup\n")
    assert len(json.loads(refused.stdout)["details"]) == 3
    assert not (out / "missing").exists()
    assert json.loads(packed["warmup"].ok())["entries"] == 3


REFUSED = [
    (["--format", "native"], "--format native needs --mount-path"),
    (["--format", "native", "--mount-path", "cache"], "expected an absolute path"),
    (["--format", "native", "--mount-path", "/a/../b"], "expected an absolute path"),
    (["--format", "dir", "--mount-path", "/cache"], "--mount-path goes with --format native or oci"),
    (["--format", "wheel", "--version", "one"], "no normalized version"),
    (["--format", "wheel", "--version", "1.01"], "no normalized version"),
    (["--format", "dir", "--version", "1.0"], "--version goes with --format wheel"),
    (["--name", "../up"], "cannot be a bundle's name"),
    (["--format", "oci", "--base", "nowhere"], "image layout cannot be read"),
]


def test_options_that_cannot_be_honoured(project, packed, tmp_path):
    answers = batch(project, *(packing(MANIFEST, tmp_path / "out", *options) for options, _ in REFUSED))
    for (options, message), answer in zip(REFUSED, answers, strict=True):
        assert answer.code == 2, options
        assert message in answer.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("form", "name", "hint"),
    [
        ("oci", "image.tar.gz", "end it in .tar: the layer is compressed already"),
        ("dir", "bundle.tar", "name a directory"),
        ("native", "cache.tgz", "name a directory"),
        ("wheel", "kernels.zip", "name a directory"),
    ],
)
def test_no_directory_is_called_as_an_archive(project, tmp_path, form, name, hint):
    options = ["--mount-path", "/c"] if form == "native" else []
    [answer] = batch(project, packing(MANIFEST, tmp_path / name, "--format", form, *options))
    assert answer.code == 2
    assert hint in answer.stderr
    assert not (tmp_path / name).exists()


def test_a_full_disk_leaves_nothing_behind(project, packed, tmp_path):
    mount = ["--mount-path", "/c"]
    forms = {"dir": ("d", []), "wheel": ("w", []), "oci": ("o", []), "oci ": ("i.tar", []), "native": ("n", mount)}
    commands = [
        ["pack", MANIFEST, "-o", tmp_path / name, "--format", form.strip(), "--no-native", *more]
        for form, (name, more) in forms.items()
    ]
    commands.append(["pack", MANIFEST, "-o", tmp_path / "helpers"])
    answers = batch(project, *commands, limit=3000, PYTHONDONTWRITEBYTECODE="1")
    for command, answer in zip(commands, answers, strict=True):
        assert answer.code == 2, command
        lines = [line for line in answer.stderr.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 2, answer.stderr
        assert lines[0].startswith("error: ")
        assert lines[0].endswith(": File too large")
        assert lines[1].startswith("hint: free some space")
    assert [path for path in tmp_path.rglob("*") if path.name != "w"] == []


def test_several_gpus_targets_and_manifests_in_one_bundle(tmp_path):
    root = make_project(tmp_path / "project", gpus=(H200, "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"))
    (root / "shapes" / "m.yaml").write_text(
        (root / "shapes" / "m.yaml").read_text().replace("[NVIDIA H200]", "[NVIDIA H200, NVIDIA A100-SXM4-80GB]")
    )
    text = (root / "shapes" / "m.yaml").read_text().replace("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
    (root / "shapes" / "second.yaml").write_text(text.replace("4097", "1"))
    [done] = batch(root, ["pack", MANIFEST, "shapes/second.yaml", "--warmup", "-o", root / "b", "--json"])
    answer = json.loads(done.ok())
    # H100 and H200 are one target: plain for 4096, 4097 and 1, tuned; the A100 has no case with 1
    assert (answer["launches"], answer["entries"]) == (12, 7)
    bundle = json.loads((root / "b" / "bundle.json").read_text())
    assert bundle["targets"] == ["cuda:80:32", "cuda:90:32"]
    assert [row["path"] for row in bundle["manifests"]] == ["shapes/m.yaml", "shapes/second.yaml"]
    assert len(list((root / "b" / "store").iterdir())) == 3


def test_amd_helpers_are_packed_for_the_library_that_the_service_has(tmp_path):
    root = make_project(tmp_path / "project", gpus=())
    plain = "shapes/plain.yaml"
    amd = ["--gpu", "AMD Instinct MI300X", "--warmup"]
    with_library, without, proven, noted = batch(
        root,
        packing(plain, tmp_path / "with", *amd, "--hip-library", "/opt/rocm/lib/libamdhip64.so"),
        packing(plain, tmp_path / "without", *amd),
        ["verify", tmp_path / "with"],
        ["verify", tmp_path / "without"],
    )
    assert json.loads(with_library.ok())["native_helpers"] >= 1
    bundle = json.loads((tmp_path / "with" / "bundle.json").read_text())
    assert "hip_utils" in {row["name"] for row in bundle["helpers"]}
    assert bundle["hip_library"] == "/opt/rocm/lib/libamdhip64.so"
    proven.ok()
    if native.find_hip_library() is None:
        answer = json.loads(without.ok())
        assert answer["native_helpers"] == 0
        assert "--hip-library" in answer["notes"][0]
        assert "--hip-library" in noted.stderr


def test_diff_says_what_changed(project, packed, wheel, out, tmp_path):
    root = make_project(tmp_path / "project", winner=0, ms=0.125)
    manifest = root / "shapes" / "m.yaml"
    manifest.write_text(manifest.read_text().replace("4097", "1"))
    kernels = root / "src" / "kernels.py"
    kernels.write_text(kernels.read_text().replace("* 2", "* 3"))
    new = tmp_path / "b"
    made, equal, text, data, refused = batch(
        root,
        packing(MANIFEST, new, "--warmup"),
        ["diff", out / "a", wheel],
        ["diff", out / "a", new],
        ["diff", out / "a", new, "--json"],
        ["diff", out / "a", root],
        NVPTX_ENABLE_DUMP="0",
    )
    made.ok()
    assert equal.ok().startswith("equal: 0 launches added")
    assert text.code == data.code == 1
    lines = text.stdout.splitlines()
    assert any(line.startswith("environment variable NVPTX_ENABLE_DUMP: none -> ") for line in lines)
    assert any(line.startswith("    source: ") for line in lines)
    assert any(line.startswith("    constant n: none -> 1") for line in lines)
    assert any(line.startswith("    config: BLOCK=128") for line in lines)
    assert any(line.startswith("best kernels:tuned [n=4096 ") and "0.5 ms -> 0.125 ms" in line for line in lines)
    assert lines[-1].startswith("different: ")
    answer = json.loads(data.stdout)
    assert answer["equal"] is False
    assert len(answer["best"]) == 1
    assert refused.code == 2
    assert "not a bundle" in refused.stderr


def test_diff_tells_added_launches_from_changed_ones(project, packed, out, tmp_path):
    root = tmp_path / "project"
    shutil.copytree(project, root)
    manifest = root / "shapes" / "plain.yaml"
    manifest.write_text(manifest.read_text().replace("{n: [4096, 4097]}", "{n: [4096, 4097, 1]}"))
    a, b = out / "plain", tmp_path / "b"
    diff, back = ["diff", a, b, "--json"], ["diff", b, a, "--json"]
    made, diff, back = batch(root, packing("shapes/plain.yaml", b, "--warmup"), diff, back)
    made.ok()
    answer = json.loads(diff.stdout)
    assert (len(answer["added"]), answer["removed"], answer["changed"], answer["best"]) == (1, [], [], [])
    assert answer["added"][0]["specialization"]["constants"]["n"] == 1
    answer = json.loads(back.stdout)
    assert (answer["added"], len(answer["removed"])) == ([], 1)
    assert answer["manifests"] == [{"path": "shapes/plain.yaml", "state": "changed"}]
    assert answer["files"] == []  # the index differs in the launch


def test_diff_tells_of_what_no_launch_shows(project, packed, out, tmp_path):
    """Another manifest that leads to the same launches, and an index or a store of other bytes."""
    root = tmp_path / "project"
    shutil.copytree(project, root)
    manifest = root / "shapes" / "plain.yaml"
    manifest.write_text("# a comment\n" + manifest.read_text())
    a, b, c = out / "plain", tmp_path / "b", tmp_path / "c"
    shutil.copytree(a, c)
    data = json.loads((c / "index.json").read_text())
    next(iter(data["entries"].values()))["direct"] = None
    (c / "index.json").write_text(json.dumps(data))
    head = json.loads((c / "bundle.json").read_text())
    raw = (c / "index.json").read_bytes()
    head["files"]["index.json"] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (c / "bundle.json").write_text(json.dumps(head))
    made, text, edited = batch(root, packing("shapes/plain.yaml", b, "--warmup"), ["diff", a, b], ["diff", a, c])
    made.ok()
    assert text.code == edited.code == 1
    assert text.stdout.splitlines()[0] == "manifest shapes/plain.yaml: changed"
    assert edited.stdout.splitlines()[0] == "file index.json: same name, other bytes"
