"""The commands in the documentation, run as they stand."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from projects import batch

ROOT = Path(__file__).parents[2]


def test_the_commands_on_bundles(tmp_path):
    root = tmp_path / "project"
    for name in ("kernels", "best_configs", "shape_manifests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    [block] = re.findall(
        r"^```console\n(.*?)^```", (ROOT / "docs" / "bundles.md").read_text(), re.MULTILINE | re.DOTALL
    )
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert {command[0] for command in commands} == {"tcache"}
    answers = batch(root, *(command[1:] for command in commands))
    for command, answer in zip(commands, answers, strict=True):
        assert answer.code == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
    assert answers[-2].stdout.startswith("proven: 52 launches, 52 hits")
    assert "25 entries (25 missing)" in answers[0].stdout
