"""Whatever a file holds: a manifest or one-line problems, in bounded time and memory; no exception of another kind."""

# ruff: noqa: E501 - alphabets on few lines

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tcache
from tcache.errors import ManifestError
from tcache.manifest import examine
from tcache.manifest.edit import flow

RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

GOOD = """\
version: 1
include: []
gpus: [NVIDIA H200]
shapes: {s: {n: 1..4}}
kernels:
  - kernel: k.py:f
    args: {x: {shape: [n, 4], dtype: float32, stride: [4, 1], offset: 1}, n: n, t: {tuple: [1, {dtype: d}]}}
    grid: [cdiv(n, BLOCK)]
    where: n < 9
    cases:
      - {n: [1, 2], d: int8}
      - {shapes: s, d: int8}
  - {launches: a.json}
""".replace("include: []\n", "")


def check(folder, data):
    path = folder / "m.yaml"
    path.write_bytes(data)
    begin = time.process_time()
    manifest, problems = examine(path)
    for problem in problems:
        assert problem.message.startswith(str(folder))
        assert "\n" not in problem.message
        assert len(problem.message) < 2000
    if manifest is not None and not problems:
        try:
            for number, _ in enumerate(manifest.cases()):
                if number > 1000:
                    break
        except ManifestError as error:
            assert "where: " in str(error)  # noqa: PT017 - a condition that fails later
    assert time.process_time() - begin < 5
    return problems


@RELAXED
@given(st.text(max_size=300))
def test_any_text(tmp_path, text):
    assert check(tmp_path, text.encode("utf-8", "replace"))


@RELAXED
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path, data):
    assert check(tmp_path, data)


@RELAXED
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(GOOD) - 1),
            st.integers(0, 12),
            st.sampled_from(["", " ", "\t", "\n", "[", "]", "{", "}", ":", ": ", "- ", ",", "'", '"', "#", "&a ", "*a", "!t ",
                             "n", "1", "..", "1..1e18", "1e999", ".nan", "null", "9" * 30, "(", ")", "**", "\0", "é", "|", ">"]),
        ),
        max_size=4,
    )
)  # fmt: skip
def test_a_good_manifest_with_a_few_edits(tmp_path, edits):
    text = GOOD
    for at, cut, put in edits:
        text = text[:at] + put + text[at + cut :]
    check(tmp_path, text.encode())


KEYS = st.sampled_from(
    ["version", "include", "gpus", "shapes", "kernels", "kernel", "call", "launches", "args", "cases", "grid", "where",
     "shape", "dtype", "stride", "offset", "layout", "value", "tuple", "list", "constexpr", "descriptor", "block", "n"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.sampled_from(
    ["n", "1..9", "1..1e15", "0..9 by *3", "k.py:f", "m.yaml", "cdiv(n, 2)", "n <", "float32", "s", "", "n / 0", "n < 2"]
)  # fmt: skip
DATA = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)


@RELAXED
@given(DATA, DATA, DATA)
def test_any_tree(tmp_path, items, shapes, top):
    tree = {"version": 1, "kernels": items, "shapes": shapes}
    for data in (
        tree,
        top,
        {"version": 1, "kernels": [{"kernel": "k:f", "args": items, "grid": [1], "cases": shapes}]},
    ):
        check(tmp_path, flow(data).encode())


HUGE = {
    "product": "- {a: 1..99999, b: 1..99999, c: 1..99999, d: 1..99999, e: 1..99999}",
    "range": "- {a: [1..1e12], b: 0..1e30 by *2}",
    "nested sets": "- {shapes: [" + ", ".join(["s"] * 2000) + "]}",
    "deep": "- {a: " + "[" * 100_000 + "]" * 100_000 + "}",
    "long": "- {a: [" + "1," * 150_000 + "]}",
    "keys": "- {n: 1, d: int8, " + ", ".join(f"a{number}: 1" for number in range(20_000)) + "}",
    "expression": "- {a: 1, where: '" + "(" * 300_000 + "'}",
    "quotes": "- {a: '" + "''" * 100_000 + "}",
    "anchors": "- {a: &a [" + "&b 1, " * 30_000 + "]}",
    "wrong values": "- {" + ", ".join(f"a{number}: {{}}" for number in range(20_000)) + "}",
    "comments": "- {n: 1, a: 1, d: int8}\n" + "      # x\n" * 30_000,
}


def test_nothing_hangs_or_eats_the_memory(tmp_path):
    """In a process that may use 2 GB: each of these is a manifest, or a refusal that names a limit."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tcache.manifest import examine\n"
        "for path in sorted(Path('.').glob('*.yaml')):\n"
        "    _, problems = examine(path)\n"
        "    print(path.stem, '|', problems[0].message[:200] if problems else 'sound')\n"
    )
    for name, case in HUGE.items():
        rows = ", ".join(["{n: 1..100}"] * 50)
        text = GOOD.replace("{s: {n: 1..4}}", f"{{s: [{rows}]}}").replace("- {n: [1, 2], d: int8}", case)
        (tmp_path / f"{name}.yaml").write_text(text)
    limit = 2 * 2**30
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(tcache.__file__).parents[1])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    assert found.keys() == HUGE.keys()
    for name, part in {
        "product": "more than 100,000 cases", "range": "at most 100,000 cases", "nested sets": "more than 100,000 cases",
        "deep": "at most 32 levels", "long": "at most 100000 items", "keys": "no argument, grid or where uses",
        "expression": "at most 1000 characters", "quotes": "not YAML", "wrong values": "expected true or false", "comments": "no argument, grid or where uses 'a'",
    }.items():  # fmt: skip
        assert part in found[name], (name, found[name])
