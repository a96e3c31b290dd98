"""Tools add to a manifest and leave what is there alone: comments, layout, bytes."""

# ruff: noqa: E501 - one row, one layout

from __future__ import annotations

import math
import stat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tcache.errors import ManifestError
from tcache.manifest import examine
from tcache.manifest.edit import append_cases, append_items, flow
from tcache.manifest.reading import parse_document

WRITTEN = """\
# our shapes
version: 1   # of the format

kernels:
    # the projection
    - kernel:   k.py:f      # hand-tuned
      args: {x: {shape: [n], dtype: float32}, n: n}
      grid: [cdiv(n, BLOCK)]
      cases:
        - {n: [1, 2]}   # decode
        # prefill:
        - n: 4096  # one

# the end
"""
ITEM = {
    "kernel": "k.py:g",
    "args": {"x": {"shape": ["n", 4], "dtype": "float32"}, "act": {"value": "on: #1"}, "s": -math.inf},
    "grid": ["cdiv(n, BLOCK)"],
    "cases": [{"n": [7, 8]}, {"n": "1..3"}],
}


def test_items_go_to_the_end_and_nothing_else_changes(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(WRITTEN)
    path.chmod(0o640)
    append_items(path, [ITEM], comment="seen in production\n2 launches")
    text = path.read_text()
    added = """\
    # seen in production
    # 2 launches
    - kernel: k.py:g
      args:
        x: {shape: [n, 4], dtype: float32}
        act: {value: "on: #1"}
        s: -.inf
      grid: ["cdiv(n, BLOCK)"]
      cases:
        - {n: [7, 8]}
        - {n: 1..3}
"""
    assert text == WRITTEN.replace("# one\n", f"# one\n{added}")
    manifest, problems = examine(path)
    assert not problems
    assert [case.scope["n"] for case in manifest.cases()] == [1, 2, 4096, 7, 8, 1, 2, 3]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_cases_go_to_their_item(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(WRITTEN)
    append_items(path, [ITEM])
    before = path.read_text()
    append_cases(path, 0, [{"n": 5}], comment="missed")
    assert path.read_text() == before.replace("# one\n", "# one\n        # missed\n        - {n: 5}\n")
    append_cases(path, 1, [{"n": 6}, {"n": 7}])
    assert [case.scope["n"] for case in examine(path)[0].cases()] == [1, 2, 4096, 5, 7, 8, 1, 2, 3, 6, 7]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1\nkernels: []\n", "version: 1\nkernels: [{launches: a.json}]\n"),
        ("version: 1\nkernels: [{launches: b.json}] # x\n", "version: 1\nkernels: [{launches: b.json}, {launches: a.json}] # x\n"),
        ("version: 1\nkernels: [\n  {launches: b.json}, # x\n]", None),
        ("version: 1\nkernels:\n- launches: b.json", "version: 1\nkernels:\n- launches: b.json\n- {launches: a.json}\n"),
        ("version: 1\r\nkernels:\r\n- launches: b.json # ü\r\n", "version: 1\r\nkernels:\r\n- launches: b.json # ü\r\n- {launches: a.json}\r\n"),
        ("version: 1\nshapes: {s: {n: 1}}", "version: 1\nshapes: {s: {n: 1}}\nkernels:\n  - {launches: a.json}\n"),
        ("kernels:\n  - launches: b.json\n\n# then\nversion: 1\n", "kernels:\n  - launches: b.json\n  - {launches: a.json}\n\n# then\nversion: 1\n"),
        ("version: 1\nkernels:\n  - launches: |-\n      b.json\n  # end\n", "version: 1\nkernels:\n  - launches: |-\n      b.json\n  - {launches: a.json}\n  # end\n"),
        ("\ufeffversion: 1\nkernels:\n  - launches: b.json\n", "\ufeffversion: 1\nkernels:\n  - launches: b.json\n  - {launches: a.json}\n"),
    ],
)  # fmt: skip
def test_layouts(tmp_path, text, expected):
    path = tmp_path / "m.yaml"
    path.write_bytes(text.encode())
    if expected is None:
        with pytest.raises(ManifestError, match="no place to add to in this layout"):
            append_items(path, [{"launches": "a.json"}])
        assert path.read_bytes() == text.encode()
    else:
        append_items(path, [{"launches": "a.json"}])
        assert path.read_bytes().decode() == expected
        assert not examine(path)[1]


def test_a_file_that_is_not_there_is_made(tmp_path):
    path = tmp_path / "new.yaml"
    append_items(path, [{"launches": "a.json"}])
    assert path.read_text() == "version: 1\nkernels:\n  - {launches: a.json}\n"


def test_what_cannot_be_added_to_is_left_alone(tmp_path):
    path = tmp_path / "m.yaml"
    for text, item in (("[]", ITEM), ("version: 1\nkernels: x\n", ITEM), (WRITTEN, {"launches": object()})):
        path.write_text(text)
        with pytest.raises((ManifestError, ValueError)):
            append_items(path, [item])
        assert path.read_text() == text
    with pytest.raises(ManifestError, match="item 3 has no list of cases"):
        append_cases(path, 3, [{"n": 1}])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["1e5", "null", "yes", "0x1", "1:30", "k.py:f", "a b", "- x", "#", ": ", "''", "cdiv(a, b)", "~"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(VALUES)
def test_what_is_written_reads_back(tmp_path_factory, value):
    try:
        text = flow(value)
        found = parse_document(tmp_path_factory.getbasetemp(), f"a: {text}\nb:\n  - {text}\n").data
    except ManifestError as error:
        assert "integer of" in str(error) or "nested" in str(error)  # noqa: PT017 - stated limits of what is read
        return
    assert repr(found) == repr({"a": value, "b": [value]})
    assert "\n" not in text
