"""Every malformed manifest gives one line with file, line, column and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcache.errors import ManifestError
from tcache.manifest import load_manifest
from tcache.manifest.expr import ExpressionError, evaluate

QUICKSTART = Path(__file__).parents[2] / "shape_manifests" / "quickstart.yaml"

GOOD = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - kernel: k.py:f
    args: {x: {shape: [n, 4], dtype: float32}, n: n}
    grid: [cdiv(n, BLOCK)]
    cases:
      - {n: [1, 2], m: 3}
"""


def load(tmp_path, text):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return load_manifest(path)


def test_cases_multiply_out(tmp_path):
    cases = list(load(tmp_path, GOOD.replace("m: 3", "m: [3, 4]")).cases())
    assert [case.scope for case in cases] == [
        {"n": 1, "m": 3}, {"n": 1, "m": 4}, {"n": 2, "m": 3}, {"n": 2, "m": 4},
    ]  # fmt: skip
    assert all(case.where.endswith("m.yaml:8:9") for case in cases)
    assert str(cases[0]) == "k.py:f n=1 m=3"


def test_a_call_with_a_comma_in_a_flow_list_is_one_expression(tmp_path):
    assert load(tmp_path, GOOD).model.kernels[0].grid == ["cdiv(n, BLOCK)"]


def test_the_quickstart_loads():
    assert len(list(load_manifest(QUICKSTART).cases())) == 52


BAD = [
    ("", "1:1: the manifest is empty"),
    ("# only a comment\n", "1:1: the manifest is empty"),
    ("[]", "1:1: the manifest"),
    ("just text", "1:1: the manifest"),
    ("version: 1\n", "1:1: key 'kernels' is missing"),
    ("kernels: []\n", "1:1: key 'version' is missing"),
    ("version: true\nkernels: []\n", "1:10: version"),
    ("version: 1.0\nkernels: []\n", "1:10: version"),
    (GOOD.replace("    grid: [cdiv(n, BLOCK)]\n", ""), "4:5: key 'grid' is missing"),
    ("version: 1\nkernels: []\n", "2:10: kernels is empty"),
    ("version: 1\nkernels: {}\n", "2:10: kernels: input should be a valid list"),
    (GOOD.replace("version: 1", "version: 2"), "1:10: version: input should be 1, found 2"),
    (GOOD.replace("version: 1", "version: '1'"), "1:10: version: input should be 1"),
    (GOOD.replace("gpus: [NVIDIA H200]", "gpus: []"), "2:7: gpus is empty"),
    (GOOD.replace("gpus: [NVIDIA H200]", "gpus: NVIDIA H200"), "2:7: gpus: input should be a valid list"),
    (GOOD.replace("gpus: [NVIDIA H200]", "gpus: [90]"), "2:8: gpus.0: input should be a valid string, found 90"),
    (GOOD.replace("gpus:", "gpu:"), "2:1: unknown key 'gpu': expected one of gpus, kernels, version"),
    (GOOD.replace("    grid:", "    gird:"), "6:5: unknown key 'gird'"),
    (GOOD.replace("    cases:", "    case:"), "7:5: unknown key 'case'"),
    (GOOD + "    extra: 1\n", "9:5: unknown key 'extra': expected one of args, cases, grid, kernel"),
    (GOOD.replace("dtype: float32", "dtyp: float32"), "5:31: unknown key 'dtyp'"),
    (GOOD.replace("dtype: float32", "dtype: float33"), "5:38: unknown dtype 'float33'"),
    (GOOD.replace("dtype: float32", "dtype: fp32"), "unknown dtype 'fp32': expected one of bfloat16"),
    (GOOD.replace("dtype: float32", "dtype: 32"), "5:38: kernels.0.args.x.dtype: input should be a valid string"),
    (GOOD.replace("[n, 4]", "[nn, 4]"), "5:24: name 'nn' is not bound by the case; did you mean 'n'? (bound: m, n)"),
    (GOOD.replace("n: n}", "n: k}"), "name 'k' is not bound"),
    (GOOD.replace("[n, 4]", "[n, 4.5]"), "5:27: kernels.0.args.x.shape.1"),
    (GOOD.replace("[n, 4]", "[n, 'n +']"), "5:27: 'n +' is not an expression"),
    (GOOD.replace("[n, 4]", "[n, n // 0]"), "5:27: division by zero"),
    (GOOD.replace("[n, 4]", "n"), "5:23: kernels.0.args.x.shape: input should be a valid list"),
    (GOOD.replace("[n, 4]", "[\"__import__('os').system('x')\"]"), "is not an expression"),
    (GOOD.replace("[n, 4]", "[n.real]"), "is not an expression"),
    (GOOD.replace("[n, 4]", "[exec(n)]"), "unknown function 'exec'"),
    (GOOD.replace("[n, 4]", "[n, 4], stride: [1]"), "1 strides for 2 dimensions"),
    (GOOD.replace("[n, 4]", "[n, 4], offset: k"), "name 'k' is not bound"),
    (GOOD.replace("grid: [cdiv(n, BLOCK)]", "grid: []"), "6:11: grid is empty"),
    (GOOD.replace("grid: [cdiv(n, BLOCK)]", "grid: [1, 1, 1, 1]"), "6:11: kernels.0.grid: value should have at most 3"),
    (GOOD.replace("grid: [cdiv(n, BLOCK)]", "grid: [cdiv(n]"), "6:12: 'cdiv(n' is not an expression"),
    (GOOD.replace("kernel: k.py:f", "kernels: k.py:f"), "4:5: kernels.0: expected a mapping with exactly one of"),
    (GOOD.replace("kernel: k.py:f", "kernel: k.py:f\n    call: k.py:g"), "exactly one of 'call', 'kernel' and"),
    (GOOD.replace("kernel: k.py:f", "call: k.py:f"), "6:5: unknown key 'grid': expected one of args, call, cases"),
    (GOOD.replace("  - kernel", "  -  - kernel"), "5:5: not YAML"),
    (GOOD.replace("      - {n: [1, 2], m: 3}", "      []"), ":7: cases is empty"),
    (GOOD.replace("{n: [1, 2], m: 3}", "{n: [], m: 3}"), "8:13: n is an empty list"),
    (GOOD.replace("{n: [1, 2], m: 3}", "{n: {a: 1}, m: 3}"), "8:13: kernels.0.cases.0.n"),
    (GOOD.replace("{n: [1, 2], m: 3}", "5"), "8:9: kernels.0.cases.0: expected"),
    (GOOD.replace("{n: [1, 2], m: 3}", "{n: 1, n: 2}"), "8:16: key 'n' stands twice"),
    (GOOD.replace("version: 1", "version: 1\nversion: 1"), "2:1: key 'version' stands twice"),
    (GOOD.replace("args: {", "args: {{"), "not YAML"),
    (GOOD.replace("version: 1", "\tversion: 1"), "1:1: not YAML"),
    (GOOD + "...\n---\nversion: 1\n", "10:1: not YAML: but found another document"),
    (GOOD.replace("n: [1, 2]", "n: &a [1, 2]").replace("m: 3", "m: *a"), "aliases (*name) are not supported"),
    (GOOD.replace("version: 1", "version: !!python/object/apply:os.system [x]"), "not YAML: could not determine"),
    (GOOD.replace("[1, 2]", str([*range(1000)])).replace("m: 3", f"m: {[*range(1000)]}"), "more than 100,000 cases"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_malformed(tmp_path, text, message):
    with pytest.raises(ManifestError) as error:
        load(tmp_path, text)
    assert message in error.value.message
    assert error.value.message.startswith(str(tmp_path / "m.yaml") + ":")
    assert "\n" not in error.value.message


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ManifestError, match="cannot be read"):
            load_manifest(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="expected UTF-8"):
        load_manifest(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(M + 7) // 8", 3),
        ("cdiv(M, 8)", 3),
        ("cdiv(-7, 2)", -3),
        ("next_power_of_2(M)", 32),
        ("next_power_of_2(1)", 1),
        ("min(M, 4) + max(1, 2)", 6),
        ("-M % 5", 3),
        (5, 5),
        ("2.5", 2.5),
    ],
)
def test_expressions(text, value):
    assert evaluate(text, {"M": 17}) == value


@given(st.text(max_size=60) | st.from_regex(r"[nM0-9+*/%(), -]{1,40}", fullmatch=True))
def test_no_expression_does_anything_but_compute(text):
    try:
        value = evaluate(text, {"n": 3, "M": 2**40})
    except ExpressionError:
        return
    assert isinstance(value, (int, float))
    assert abs(value) <= 2**63 or isinstance(value, float)


@given(st.text(max_size=200))
def test_no_text_is_a_traceback(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("m") / "m.yaml"
    path.write_text(text, "utf-8", errors="replace")
    with pytest.raises(ManifestError):
        load_manifest(path)
