"""Every malformed manifest of the corpus: where, what was found, what was expected; never a traceback.

The first line of each file in ``manifests/bad`` says ``# line:column: part of the message`` (with the name of another
file before it where the problem is there).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tcache.errors import ManifestError
from tcache.manifest import examine, load_manifest

FOLDER = Path(__file__).parent / "manifests" / "bad"
BAD = sorted(FOLDER.glob("*.yaml"))
FIRST_LINE = re.compile(r"# (?:(\S+\.yaml):)?(\d+:\d+): (.+)")


def expected_of(path):
    match = FIRST_LINE.fullmatch(path.read_bytes().split(b"\n")[0].decode())
    assert match, f"{path.name}: its first line says nothing"
    return f"{path.parent / (match[1] or path.name)}:{match[2]}: ", match[3]


def test_there_are_enough():
    assert len(BAD) >= 60


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_malformed(path):
    where, part = expected_of(path)
    _, problems = examine(path)
    assert problems
    first = problems[0]
    assert first.message.startswith(where)
    assert part in first.message
    for problem in problems:
        assert re.match(rf"{re.escape(str(FOLDER))}/\w+\.yaml:\d+:\d+: .+", problem.message)
        assert "\n" not in problem.message
        assert len(problem.problem) < 1000
    with pytest.raises(ManifestError) as error:
        load_manifest(path)
    assert error.value.message == first.message


def test_the_command_names_them_all(tcache):
    done = tcache("manifest", "check", *BAD, check=1)
    for path in BAD:
        where, part = expected_of(path)
        assert any(line.startswith(f"error: {where}") and part in line for line in done.stderr.splitlines()), path
    assert len(done.stdout.splitlines()) == len(BAD)


def test_every_problem_is_told_not_only_the_first(tcache, tmp_path):
    (tmp_path / "m.yaml").write_text("""\
version: 1
gpu: [NVIDIA H200]
kernels:
  - kernel: k.py:f
    args: {x: {shape: n, dtyp: float32}, n: [1]}
    cases: [{n: {}}]
""")
    done = tcache("manifest", "check", "m.yaml", "--json", cwd=tmp_path, check=1)
    found = json.loads(done.stdout)
    assert found["version"] == 1
    assert found["sound"] is False
    [row] = found["manifests"]
    assert [problem["where"] for problem in row["problems"]] == [
        "m.yaml:2:1", "m.yaml:4:5", "m.yaml:5:23", "m.yaml:5:26", "m.yaml:5:45", "m.yaml:6:17",
    ]  # fmt: skip
    assert row["problems"][0]["hint"] == "did you mean 'gpus'?"
