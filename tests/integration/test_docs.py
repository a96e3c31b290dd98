"""The examples of docs/manifests.md, run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tcache.manifest import arguments as models
from tcache.manifest import check, expand, expr, load, reading
from tcache.manifest.grammar import DEEPEST

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "manifests.md").read_text("utf-8")


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    for block in blocks("python"):
        [name] = re.findall(r"^# (\S+\.py)$", block, re.MULTILINE)
        (tmp_path / name).write_text(block)
    for name, _, block in examples():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(block)
    return tmp_path


def examples():
    for block in blocks("yaml"):
        match = re.search(r"^# (\S+\.yaml): (\d+) cases$", block, re.MULTILINE)
        if match:
            yield match[1], int(match[2]), block


def test_every_block_is_an_example_or_the_arguments():
    assert len(list(examples())) == len(blocks("yaml")) - 1 == 5


def test_the_manifests_are_sound_and_multiply_out_as_said(tcache, folder):
    names = [name for name, _, _ in examples()]
    done = tcache("manifest", "check", *names, "--json", cwd=folder, check=0)
    found = {row["path"]: row["cases"] for row in json.loads(done.stdout)["manifests"]}
    assert found == {name: count for name, count, _ in examples()}


def test_they_resolve(tcache, folder):
    done = tcache("resolve", "all.yaml", "ranges.yaml", "service.yaml", "--gpu", "NVIDIA H200", cwd=folder, check=0)
    assert f"{7 + 28 + 8} launches" in done.stdout
    done = tcache("resolve", "some.yaml", "--json", cwd=folder, check=0)
    on = [row["gpu"] for row in json.loads(done.stdout)["launches"]]
    assert (on.count("NVIDIA H200"), on.count("NVIDIA L4")) == (5, 3)


def test_the_commands(tcache, folder):
    for line in blocks("console")[0].splitlines():
        tcache(*line.split()[1:], cwd=folder, check=0)
    assert (folder / "manifest.schema.json").read_text("utf-8") == (DOCS / "manifest.schema.json").read_text("utf-8")


def test_the_arguments_are_what_they_are_said_to_be(tcache, folder):
    [block] = [block for block in blocks("yaml") if block.startswith("# args:")]
    lines = "".join(f"      {line}\n" for line in block.splitlines())
    text = f"""\
version: 1
kernels:
  - call: taking.py:anything
    args:
{lines}    cases: [{{M: 16, N: 64, dtype: float16}}]
"""
    (folder / "args.yaml").write_text(text)
    (folder / "taking.py").write_text("def anything(**arguments):\n    pass\n")
    tcache("manifest", "check", "args.yaml", cwd=folder, check=0)
    from tcache.replay.arguments import arguments, ghost

    [case] = load.load_manifest(folder / "args.yaml").cases()
    made = arguments(case, ghost)
    assert made["e"] == 64
    assert made["f"] == "float16"
    assert made["g"] == "relu"
    assert made["i"] == (1, 16, (None,))
    assert made["j"] == [16, 64]
    assert made["o"].stride() == (0, 1)
    assert made["p"].data_ptr() % 16 == 2
    assert made["q"].stride() == (1, 16)
    assert made["s"].block_shape == [16, 64]
    # every kind of argument there is stands on the page
    kinds = {type(spec).__name__ for spec in case.item.args.values()}
    assert kinds >= {model.__name__ for model in models.TAGS.values()}
    assert all(f"`{dtype}`" in PAGE for dtype in models.DTYPES)


def test_the_limits_are_the_codes():
    for row, limit in {
        "bytes of a file": reading.LARGEST_FILE,
        "manifests included": load.MOST_FILES,
        "levels of nesting": reading.DEEPEST,
        "combinations of a manifest with all it includes, before `where`": expand.LARGEST,
        "characters of an expression": expr.LONGEST,
        "levels of nesting of an expression": DEEPEST,
    }.items():
        assert f"| {row} | {limit:,} |" in PAGE
    assert check.MOST == 100
