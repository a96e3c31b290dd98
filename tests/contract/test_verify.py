"""What ``tcache verify`` proves beyond hits by name: the index's own way to an entry, and the index itself."""

from __future__ import annotations

import base64
import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project

TUPLE = """

@triton.jit
def paired(x_ptr, pair, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32) + pair[0])


def pairs(x):
    paired[(1,)](x, (3, 4), BLOCK=16)


def seen(*args, **kwargs):
    pass


@tcache.autotune(configs=[triton.Config({"BLOCK": 16}, pre_hook=seen)], key=["n"])
@triton.jit
def hooked(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32), mask=o < n)


@triton.heuristics({"EVEN": lambda given: given["n"] % 2 == 0})
@tcache.autotune(configs=[triton.Config({"BLOCK": 16})], key=["n"])
@triton.heuristics({"TWICE": lambda given: 2 * given["BLOCK"]})
@triton.jit
def computed(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32) + TWICE, mask=(o < n) & EVEN)


@triton.jit
def watched(x_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(tl.float32))


watched.add_pre_run_hook(seen)
"""
MORE = """\
  - call: loadables.py:pairs
    args: {x: {shape: [16], dtype: float32}}
    cases: [{}]
  - kernel: loadables.py:hooked
    args: {x_ptr: {shape: [n], dtype: float32}, n: n}
    grid: [1]
    cases: [{n: 16}]
  - kernel: loadables.py:computed
    args: {x_ptr: {shape: [n], dtype: float32}, n: n}
    grid: [1]
    cases: [{n: [16, 32]}]
  - kernel: loadables.py:watched
    args: {x_ptr: {shape: [16], dtype: float32}, BLOCK: 16}
    grid: [1]
    cases: [{}]
"""


def verified(project, *manifests, code=0):
    return json.loads(bundle_project.run(project, "verify", "bundle", *manifests, "--json", code=code).stdout)


def tampered(project, change, code=1):
    """Change the index as somebody would who signs it again, and verify."""
    bundle_project.edit(project / "bundle" / "index.json", change)
    bundle_project.sign(project / "bundle")
    return verified(project, code=code)


def entry_of(data, kernel):
    return next(entry for entry, row in data["entries"].items() if row["kernel"].endswith(f":{kernel}"))


def test_every_direct_row_is_launched_through_the_index(project):
    found = verified(project)
    assert found["proven"]
    assert (found["launches"], found["hits"], found["entries"], found["direct"]) == (3, 3, 3, 3)
    assert found["differences"] == found["notes"] == []


def test_kernels_of_every_kind_are_proven(tmp_path):
    root = bundle_project.make(
        tmp_path, kernels=bundle_project.KERNELS + TUPLE, manifest=bundle_project.MANIFEST + MORE
    )
    data = json.loads((root / "bundle" / "index.json").read_text())
    direct = {row["kernel"].rpartition(":")[2]: row["direct"] for row in data["entries"].values()}
    assert direct == {"scale": True, "wrapped": True, "tuned": True, "hooked": True, "computed": True,
                      "paired": False, "watched": False}  # fmt: skip
    found = verified(root)
    assert found["proven"]
    assert found["launches"] == found["hits"] == 8
    assert found["direct"] == sum(row["direct"] for row in data["entries"].values()) == 5

    def claim(data):
        for kernel in ("paired", "watched"):
            data["entries"][entry_of(data, kernel)]["direct"] = True

    found = tampered(root, claim)
    why = [miss["why"] for miss in found["misses"]]
    assert len(why) == 2
    assert all("index.json says that it answers for entry" in text for text in why)
    assert why[0].endswith("an argument, or a compile option, is of a kind that only Triton specializes")
    assert why[1].endswith("the kernel has hooks that run before each launch")


def _wrong(field, value):
    def change(data):
        data["entries"][entry_of(data, "scale")][field] = value

    return change


def _attribute(data):
    del data["entries"][entry_of(data, "scale")]["attributes"]["x_ptr"]


def _option(data):
    data["entries"][entry_of(data, "scale")]["options"]["num_warps"] = 32


MISDESCRIBED = [
    (_wrong("source", "0" * 64), "source: "),
    (_wrong("line", 3), "line: the kernel starts at line 14, packed at line 3"),
    (_wrong("target", "cuda:80:32"), "target: cuda:90:32, packed cuda:80:32"),
    (_wrong("constants", {"BLOCK": 128}), "constant BLOCK: 64, packed 128"),
    (_attribute, "alignment x_ptr: tt.divisibility=16, packed not divisible by 16"),
    (_option, "option num_warps: 4, packed 32"),
]


@pytest.mark.parametrize(("change", "text"), MISDESCRIBED, ids=[row[1].partition(":")[0] for row in MISDESCRIBED])
def test_an_entry_that_is_described_as_another(project, change, text):
    found = tampered(project, change)
    assert (found["hits"], found["direct"]) == (2, 2)
    (miss,) = found["misses"]
    assert miss["where"].endswith("m.yaml:7:13")
    assert "index.json describes entry" in miss["why"]
    assert text in miss["why"]


def test_an_index_that_answers_with_another_entry(project):
    def change(data):
        # another entry claims the launch, and stands first
        scale, wrapped = entry_of(data, "scale"), entry_of(data, "wrapped")
        claimed = copy.deepcopy(data["entries"][scale])
        data["entries"] = {wrapped: claimed, **{key: row for key, row in data["entries"].items() if key != wrapped}}

    found = tampered(project, change)
    why = {miss["launch"]: miss["why"] for miss in found["misses"]}
    assert len(why) == 2
    assert any("Triton's own key is" in text for text in why.values())
    assert any("describes entry" in text for text in why.values())


def test_a_row_that_is_missing(project):
    def change(data):
        data["launches"] = [row for row in data["launches"] if not row["ref"].endswith(":scale")]

    found = tampered(project, change)
    assert [row["ref"] for row in found["unindexed"]] == ["loadables.py:scale"]
    assert len(found["differences"]) == 1
    assert "NVIDIA H200: index.json lacks the launch loadables.py:scale [no autotuner] -> " in found["differences"][0]
    done = bundle_project.run(project, "verify", "bundle", code=1)
    assert "differs: NVIDIA H200: index.json lacks the launch" in done.stderr
    assert "NOT proven: 3 launches, 3 hits, 0 misses, 3 entries (3 proven by the index too), " in done.stdout


def test_a_row_too_many(project):
    def change(data):
        row = next(row for row in data["launches"] if row["ref"].endswith(":tuned"))
        data["launches"].append({**row, "shape": row["shape"].replace("n=16", "n=32")})
        data["launches"].append({**row, "gpu": "NVIDIA H100"})

    found = tampered(project, change)
    assert [row["shape"].split()[0] for row in found["unreplayed"]] == ["n=32"]
    assert "index.json has a launch that no manifest makes: loadables.py:tuned [n=32" in found["differences"][0]
    assert "index.json has a launch on 'NVIDIA H100', which the bundle was not packed for" in found["differences"][1]


def test_a_row_that_names_another_entry_or_config(project):
    def change(data):
        row = next(row for row in data["launches"] if row["ref"].endswith(":tuned"))
        row["config"] = row["config"].replace("BLOCK=32", "BLOCK=16")
        other = next(row for row in data["launches"] if row["ref"].endswith(":scale"))
        other["entry"] = entry_of(data, "tuned")

    found = tampered(project, change)
    assert len(found["differences"]) == 2
    named = "\n".join(found["differences"])
    assert "index.json says of loadables.py:tuned [n=16 | x_ptr=torch.float32]: config BLOCK=16" in named
    assert "index.json says of loadables.py:scale [no autotuner]: entry " in named
    assert found["misses"] == []


def test_descriptions_and_entries_that_do_not_pair(project):
    def change(data):
        lost = entry_of(data, "scale")
        data["entries"]["A" * 52] = data["entries"].pop(lost)

    found = tampered(project, change)
    assert ["index.json does not describe entry" in miss["why"] for miss in found["misses"]] == [True]
    named = "\n".join(found["differences"])
    assert "index.json describes entry " + "A" * 52 + ", which is not packed" in named
    assert "index.json does not describe entry" in named


@pytest.mark.parametrize(
    ("said", "text"),
    [({}, "which no launch reads and no recording captured"), ({"captured": True}, "answers launches with captured")],
)
def test_an_entry_that_no_launch_reads_proves_nothing(project, said, text):
    """The index would answer launches with it that no replay makes."""
    name = base64.b32encode(bytes(32)).decode().rstrip("=")

    def change(data):
        row = copy.deepcopy(data["entries"][entry_of(data, "scale")])
        row["signature"]["x_ptr"] = "*fp16"
        data["entries"][name] = {**row, **said}

    entries = project / "bundle" / "entries"
    data = json.loads((project / "bundle" / "index.json").read_text())
    shutil.copytree(entries / entry_of(data, "scale"), entries / name)
    bundle_project.edit(entries / name / "scale.json", lambda metadata: metadata.update(hash="00" * 32))
    found = tampered(project, change)
    assert (found["misses"], found["problems"]) == ([], [])
    (difference,) = found["differences"]
    assert name in difference
    assert text in difference


def test_another_build_of_triton_is_proven_by_its_key_alone(project):
    def change(data):
        data["environment"]["distribution"] = "0" * 64

    bundle_project.edit(project / "bundle" / "bundle.json", change)
    found = verified(project)
    assert (found["hits"], found["direct"]) == (3, 0)
    assert "Triton's way was proven alone: packed with another build" in found["notes"][0]


def test_other_manifests_are_compared_and_prove_what_they_launch(project):
    manifest = bundle_project.MANIFEST.replace("cases: [{n: 64}]", "cases: [{n: [128, 64]}]").replace(
        "    cases: [{n: 4096}]\n", "    cases: [{n: 8192}]\n"
    )
    (project / "other.yaml").write_text(manifest)
    found = verified(project, "other.yaml")
    assert found["proven"]
    assert found["unreplayed"] == found["unindexed"] == []  # other shapes, the same launches
    lines = (project / "other.yaml").read_text().split("  - call:")
    (project / "less.yaml").write_text(lines[0])
    found = verified(project, "less.yaml")
    assert sorted(row["ref"] for row in found["unreplayed"]) == ["loadables.py:increment", "loadables.py:tuned"]
    assert found["unreplayed"][0].keys() == {"gpu", "ref", "shape", "config", "entry"}
    assert "2 launches on NVIDIA H200 are in the index and not replayed, the first: loadables.py:" in found["notes"][0]


def test_each_manifest_is_replayed_for_its_own_gpus(project):
    head, kernels = bundle_project.MANIFEST.split("kernels:\n")
    stock, rest = kernels.split("  - call:")
    (project / "one.yaml").write_text(head.replace("H200", "H100 80GB HBM3") + "kernels:\n" + stock)
    (project / "two.yaml").write_text(head + "kernels:\n  - call:" + rest)
    bundle_project.run(
        project, "pack", "one.yaml", "two.yaml", "-o", "bundle", "--store", "store", "--force", "--warmup"
    )
    found = verified(project)
    assert found["proven"]
    assert found["launches"] == found["hits"] == found["direct"] == 3
    assert found["differences"] == found["notes"] == []


LOOK = """
import json, sys, threading
from tcache import forking
from tcache.bundle import Bundle
forking.cores = lambda: 2
if sys.argv[2] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(json.dumps(Bundle(sys.argv[1]).problems()))
"""


def test_every_damaged_file_of_very_many_is_found(project, monkeypatch):
    """On however many cores they are looked at."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr("bundle.ENTRIES", 700)
    import bundle as benchmark

    root = project / "bundle"
    (root / "big.bin").write_bytes(bytes(1 << 20))
    benchmark.multiply(root)
    (root / "big.bin").write_bytes(bytes(1 << 20).replace(b"\0", b"\1", 1))
    entries = sorted((root / "entries").iterdir())
    for entry in (entries[0], entries[349], entries[699]):
        path = next(entry.glob("*.cubin"))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    other = next(entries[100].glob("*.json"))
    other.write_text(other.read_text().replace('"num_warps"', '"num_wraps"'))
    for how in ("processes", "threads"):
        command = [sys.executable, "-W", "error", "-c", LOOK, str(root), how]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        damaged = [entries[0], entries[100], entries[349], entries[699], root]
        assert sorted(Path(row.split(":")[0]).parent for row in found) == sorted(damaged)
        assert all("digest differs" in row for row in found)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.update(schema=2), "index schema 2, expected 1"),
        (lambda data: data["launches"][0].pop("ref"), "corrupt: KeyError('ref')"),
        (lambda data: data["entries"][entry_of(data, "scale")].pop("signature"), ": signature is None"),
    ],
)
def test_an_index_that_cannot_be_read_proves_nothing(project, change, text):
    """Its digest is right all the same."""
    bundle_project.edit(project / "bundle" / "index.json", change)
    bundle_project.sign(project / "bundle")
    answer = json.loads(bundle_project.run(project, "verify", "bundle", "--json", code=1).stdout)
    assert [text in line for line in answer["problems"]] == [True]
