"""The published JSON Schema: current, accepts what tcache accepts, rejects what it can."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tcache.manifest.model import LaunchesItem, Manifest
from tcache.manifest.reading import parse_document, read_document
from tcache.manifest.schema import json_schema, schema_text

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "manifest.schema.json"
SHIPPED = sorted((ROOT / "shape_manifests").rglob("*.yaml"))
BAD = sorted((Path(__file__).parent / "manifests" / "bad").glob("*.yaml"))

VALIDATOR = jsonschema.Draft202012Validator(json_schema())

EVERYTHING = """\
# yaml-language-server: $schema=../docs/manifest.schema.json
version: 1
include: other.yaml
gpus: [NVIDIA H200]
shapes:
  one: {n: 1, where: n > 0}
  two: [{shapes: one, gpus: ["NVIDIA *"]}, {n: [1, 2.5, relu, true, null, 1..8]}]
kernels:
  - launches: recorded.json
    gpus: [NVIDIA H200]
  - call: a.b:c
    args: {}
    cases: [{}]
    where: [1 < 2, n > 0]
  - kernel: k.py:f
    args:
      a: 1
      b: -2.5
      c: cdiv(n, 2)
      d: true
      e: null
      f: {shape: [n, cdiv(n, 2)], dtype: float8_e5m2, stride: [0, 1], offset: n}
      g: {shape: [n, 1, 1, 1], dtype: d, layout: channels_last}
      h: {value: relu}
      i: {dtype: d}
      j: {tuple: [1, {tuple: [{list: [n]}]}, {shape: [], dtype: int8}]}
      k: {constexpr: {value: x}}
      l: {descriptor: {shape: [n, 16], dtype: bool}, block: [16, 16], padding: nan}
      m: .inf
    grid: [cdiv(n, 2), cdiv(n, 3), cdiv(n, 4)]
    cases: [{shapes: [one, two], n: 1, d: int8, gpus: [a], where: [n > 1]}]
    where: n > 1
    gpus: ["*"]
"""


def test_the_published_file_is_current():
    assert PUBLISHED.read_text("utf-8") == schema_text(), "run: tcache manifest schema -o docs/manifest.schema.json"


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_manifests_are_valid(path):
    assert [error.message for error in VALIDATOR.iter_errors(read_document(path).data)] == []


def test_everything_there_is_is_valid():
    data = parse_document(Path("m"), EVERYTHING).data
    assert [error.message for error in VALIDATOR.iter_errors(data)] == []
    model = Manifest.model_validate(data)
    assert isinstance(model.kernels[0], LaunchesItem)
    # what the model has and the example has not: nothing
    given = {key for item in data["kernels"] for key in item}
    assert given == {"launches", "call", "kernel", "args", "grid", "cases", "where", "gpus"}
    tagged = {key for spec in data["kernels"][2]["args"].values() if isinstance(spec, dict) for key in spec}
    names = set(json_schema()["$defs"]) - {"Case", "CallItem", "KernelItem", "LaunchesItem"}
    assert names == {"Constant", "Constexpr", "DType", "Descriptor", "ListArgument", "Tensor", "TupleArgument"}
    assert tagged >= {"value", "constexpr", "dtype", "descriptor", "tuple", "shape", "stride", "layout", "offset"}


def readable(path):
    try:
        return read_document(path).data
    except Exception:
        return ...


def test_it_rejects_what_breaks_the_model():
    """Where pydantic complains the schema complains, but for what the schema leaves to ``check``."""
    from pydantic import ValidationError

    rejected, accepted = [], []
    for path in BAD:
        data = readable(path)
        if data is ...:
            continue
        try:
            Manifest.model_validate(data)
        except ValidationError:
            valid = VALIDATOR.is_valid(data)
            (accepted if valid else rejected).append(path.stem)
    # YAML reads [cdiv(n, 16)] as two items, so the schema cannot count them; 1.0 is 1 in JSON; null is what is absent
    assert sorted(accepted) == ["grid_of_four", "kernels_is_null", "too_many_dimensions", "version_is_a_float"]
    assert len(rejected) > 40


@pytest.mark.parametrize("key", ["version", "kernels"])
def test_it_is_not_satisfied_by_less(key):
    data = {name: value for name, value in parse_document(Path("m"), EVERYTHING).data.items() if name == key}
    assert not VALIDATOR.is_valid(data)


def test_the_command_prints_it(tcache, tmp_path):
    assert json.loads(tcache("manifest", "schema", check=0).stdout) == json_schema()
    assert json.loads(tcache("manifest", "schema", "--json", check=0).stdout) == {
        "version": 1, "schema": json_schema(), "output": None,
    }  # fmt: skip
    tcache("manifest", "schema", "-o", tmp_path / "s.json", check=0)
    assert (tmp_path / "s.json").read_text("utf-8") == schema_text()
    refused = tcache("manifest", "schema", "-o", tmp_path / "absent" / "s.json", check=2)
    assert "cannot be written: No such file or directory" in refused.stderr
