"""Manifests that are right: what they multiply out to, what they include and share, which GPUs they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcache.errors import ManifestError
from tcache.manifest import LaunchesItem, examine, load_manifest
from tcache.manifest.expand import LARGEST, count, values
from tcache.manifest.reading import LARGEST_FILE, parse_document

QUICKSTART = Path(__file__).parents[2] / "shape_manifests" / "quickstart.yaml"

GOOD = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - kernel: k.py:f
    args: {x: {shape: [n, 4], dtype: float32}, n: n, k: m}
    grid: [cdiv(n, BLOCK)]
    cases:
      - {n: [1, 2], m: 3}
"""


@pytest.fixture
def write(tmp_path):
    def written(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def scopes(path, gpu=None):
    return [case.scope for case in load_manifest(path).cases(gpu)]


def test_cases_multiply_out(write):
    cases = list(load_manifest(write("m.yaml", GOOD.replace("m: 3", "m: [3, 4]"))).cases())
    assert [case.scope for case in cases] == [
        {"n": 1, "m": 3}, {"n": 1, "m": 4}, {"n": 2, "m": 3}, {"n": 2, "m": 4},
    ]  # fmt: skip
    assert all(case.where.endswith("m.yaml:8:9") for case in cases)
    assert str(cases[0]) == "k.py:f n=1 m=3"


def test_a_call_with_a_comma_in_a_flow_list_is_one_expression(write):
    assert load_manifest(write("m.yaml", GOOD)).model.kernels[0].grid == ["cdiv(n, BLOCK)"]


def test_the_quickstart_loads():
    assert len(list(load_manifest(QUICKSTART).cases())) == 52


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (7, [7]),
        ("relu", ["relu"]),
        ("../x", ["../x"]),
        ([1, "2..4", 9], [1, 2, 3, 4, 9]),
        ("-2..1", [-2, -1, 0, 1]),
        ("0..64 by 16", [0, 16, 32, 48, 64]),
        ("0..50 by 16", [0, 16, 32, 48]),
        ("1..100 by *4", [1, 4, 16, 64]),
        ("16..16", [16]),
        ("1e3..1_002", [1000, 1001, 1002]),
        (None, [None]),
        ([True, 1.5], [True, 1.5]),
    ],
)
def test_ranges(choice, expected):
    assert values(choice) == expected
    assert count(choice) == len(expected)


def test_conditions_drop_combinations(write):
    text = GOOD.replace("{n: [1, 2], m: 3}", "{n: 1..4, m: 1..4, where: [n < m, m != 4]}")
    assert [(s["n"], s["m"]) for s in scopes(write("m.yaml", text))] == [(1, 2), (1, 3), (2, 3)]
    both = text.replace("    grid", "    where: n % 2 == 0 or n in [3]\n    grid")
    assert [(s["n"], s["m"]) for s in scopes(write("m.yaml", both))] == [(2, 3)]


def test_commas_in_conditions(write):
    text = GOOD.replace("{n: [1, 2], m: 3}", "{n: 1..9, m: 3, where: [cdiv(n, 4) < m, max(n, m) == m, 'n in [2, 3]']}")
    assert [scope["n"] for scope in scopes(write("m.yaml", text))] == [2, 3]
    _, [problem, *_] = examine(write("m.yaml", GOOD.replace("m: 3}", "m: 3, where: cdiv(n, 2) < 3}")))
    assert problem.hint == 'quote an expression that has a comma, between braces: "cdiv(n, 2)"'


def test_a_condition_that_only_some_combinations_cannot_evaluate(write):
    path = write("m.yaml", GOOD.replace("m: 3}", "m: [1, 0], where: 4 % m < 3}"))
    manifest, problems = examine(path)
    assert not problems
    with pytest.raises(ManifestError, match=r"m.yaml:8:9: where: division by zero in '4 % m < 3'"):
        list(manifest.cases())


SHARED = """\
version: 1
shapes:
  layers:
    - {n: [4096, 8192], k: 1, unused: 5}
    - {n: 4096, k: 2, where: n > 0}
  more:
    - {shapes: layers}
    - {n: 7}
"""
USER = GOOD.replace("kernels:", "include: [sets/shared.yaml]\nkernels:")


def test_shape_sets_are_shared_across_files(write):
    write("sets/shared.yaml", SHARED)
    path = write("m.yaml", USER.replace("{n: [1, 2], m: 3}", "{shapes: more, m: [3, 4]}"))
    found = [(s["n"], s["m"]) for s in scopes(path)]
    # k and unused are no business of this kernel: what is equal without them counts once
    assert found == [(4096, 3), (4096, 4), (8192, 3), (8192, 4), (4096, 3), (4096, 4), (7, 3), (7, 4)]
    # the second (4096, …) has a condition of its own, so it is not the same row
    assert all(set(scope) == {"n", "m"} for scope in scopes(path))


def test_rows_that_are_equal_for_a_kernel_count_once(write):
    write("sets/shared.yaml", SHARED.replace(", where: n > 0", "").replace("n: 4096, k: 2", "n: [4096, 8192], k: 2"))
    path = write("m.yaml", USER.replace("{n: [1, 2], m: 3}", "{shapes: layers, m: 3}"))
    assert [s["n"] for s in scopes(path)] == [4096, 8192]


def test_a_case_overrides_its_shape_set(write):
    write("sets/shared.yaml", SHARED)
    path = write("m.yaml", USER.replace("{n: [1, 2], m: 3}", "{shapes: [layers], n: 5, m: k}"))
    assert [s["n"] for s in scopes(path)] == [5, 5]


def test_includes_count_once_and_keep_their_folder(write):
    text = GOOD.replace("kernels:", "include: [{}]\nkernels:")
    write("a/d.yaml", GOOD.replace("m: 3", "m: 9").replace("gpus: [NVIDIA H200]\n", ""))
    write("a/b.yaml", text.replace("{}", "d.yaml"))
    write("c.yaml", text.replace("{}", "a/../a/d.yaml"))
    path = write("m.yaml", text.replace("{}", "a/b.yaml, c.yaml, a/b.yaml"))
    manifest = load_manifest(path)
    assert [case.scope["m"] for case in manifest.cases()] == [9, 9, 3, 3, 3, 3, 3, 3]
    assert [file.name for file in manifest.files()] == ["d.yaml", "b.yaml", "c.yaml", "m.yaml"]
    first = next(manifest.cases())
    assert first.folder.resolve() == path.parent / "a"
    assert "d.yaml:7:9" in first.where


def test_gpus_of_the_manifest_or_else_of_its_includes(write):
    write("a.yaml", GOOD)
    write("b.yaml", GOOD.replace("H200", "L4"))
    text = "version: 1\ninclude: [a.yaml, b.yaml]\n"
    assert load_manifest(write("m.yaml", text)).gpus == ["NVIDIA H200", "NVIDIA L4"]
    own = load_manifest(write("m.yaml", text + "gpus: [AMD Instinct MI300X]\n"))
    assert own.gpus == ["AMD Instinct MI300X"]
    assert own.gpus_where.endswith("m.yaml:3:7")


def test_cases_for_some_gpus(write):
    text = GOOD.replace("{n: [1, 2], m: 3}", '{n: 1, m: 1, gpus: ["NVIDIA H*", NVIDIA L4]}\n      - {n: 2, m: 2}')
    path = write("m.yaml", text)
    found = {gpu: [s["n"] for s in scopes(path, gpu)] for gpu in ("NVIDIA H200", "NVIDIA L4", "NVIDIA L40S")}
    assert found == {"NVIDIA H200": [1, 2], "NVIDIA L4": [1, 2], "NVIDIA L40S": [2]}
    path = write("m.yaml", text.replace("    grid", '    gpus: ["* H200"]\n    grid'))
    assert scopes(path, "NVIDIA L4") == []
    assert len(scopes(path)) == 2


def test_recorded_launches_are_one_case(write):
    path = write("m.yaml", GOOD + '  - {launches: rec/serve.json, gpus: ["NVIDIA *"]}\n')
    *_, case = load_manifest(path).cases()
    assert isinstance(case.item, LaunchesItem)
    assert case.ref == "rec/serve.json"
    assert case.scope == {}
    assert load_manifest(path).files()[0] == path.parent / "rec" / "serve.json"


def test_yaml_is_read_as_editors_read_it():
    text = "[on, no, 1e-5, 010, 0x10, 0o17, 1:30, 2024-01-01, .inf, -.INF, .5, 1_000, ~, '', =, 1.5e3]"
    found = parse_document(Path("m"), text).data
    expected = ["on", "no", 1e-5, 10, 16, 15, "1:30", "2024-01-01", float("inf"), float("-inf"), 0.5, 1000, None, "",
                "=", 1500.0]  # fmt: skip
    assert found == expected
    assert [type(value) for value in found] == [type(value) for value in expected]


def test_the_largest_there_may_be(write):
    cases = f"{{n: 1..{LARGEST}, m: 3}}"
    path = write("m.yaml", GOOD.replace("{n: [1, 2], m: 3}", cases))
    assert sum(1 for _ in load_manifest(path).cases()) == LARGEST
    # what is included counts
    over = GOOD.replace("kernels:", "include: m.yaml\nkernels:")
    _, problems = examine(write("n.yaml", over))
    assert [problem.problem for problem in problems] == ["the manifest multiplies out to more than 100,000 cases"]


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "nul\0"):
        with pytest.raises(ManifestError, match="cannot be read"):
            load_manifest(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        ManifestError, match=r"binary.yaml:1:1: cannot be read: expected UTF-8 text, found the byte 0xff"
    ):
        load_manifest(tmp_path / "binary.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (LARGEST_FILE + 1))
    with pytest.raises(ManifestError, match="larger than 1,000,000 bytes"):
        load_manifest(tmp_path / "large.yaml")


def test_too_many_includes(tmp_path):
    for number in range(120):
        (tmp_path / f"{number}.yaml").write_text(f"version: 1\ninclude: {number + 1}.yaml\n")
    (tmp_path / "120.yaml").write_text(GOOD)
    with pytest.raises(ManifestError, match="more than 100 manifests are included"):
        load_manifest(tmp_path / "0.yaml")
    assert len(list(load_manifest(tmp_path / "60.yaml").cases())) == 2
