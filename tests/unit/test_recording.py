"""The recording's file, descriptions of arguments, names of kernels, and what generalizing proposes."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcache._triton.values import Indescribable, describe, restore
from tcache.errors import ManifestError, OutputError
from tcache.generalize import Row, classes, flatten, generalize
from tcache.manifest import load_manifest
from tcache.manifest.expr import evaluate
from tcache.manifest.launches import RecordedLaunch, load_recording
from tcache.naming import found_again, module_of, ref_of, values_in
from tcache.rows import Appender, compact, fold, identity, read_rows


def no_tensor(_):
    raise AssertionError


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple))


def same(left, right):
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return type(left) is type(right) and repr(left) == repr(right)


@given(VALUES)
def test_a_description_gives_the_value_back(value):
    text = json.dumps(describe(value, str))
    assert same(restore(json.loads(text), no_tensor, no_tensor), value)


@pytest.mark.parametrize("data", [
    {}, {"nothing": 1}, {"float": "many"}, {"tuple": 3}, {"enum": "os:system", "name": "x"},
    {"enum": "json:JSONDecoder"},
    {"dataclass": "json:JSONDecoder", "fields": {}}, {"named": "subprocess:Popen", "items": ["true"]},
    {"dataclass": "subprocess:run", "fields": {"args": ["true"]}}, {"reinterpret": 1, "dtype": "tl.nothing"},
    {"numpy": "ndarray", "value": 3}, {"numpy": "int8", "value": "x"}, {"sequence": "subprocess:Popen", "items": []},
    {"enum": "enum:IntFlag", "value": {}}, {"dtype": "torch.nothing"}, {"constexpr": {"x": 1}},
    {"float": 10**400}, {"numpy": "int64", "value": 10**400}, {"numpy": "int8", "value": 300},
    {"named": "ast:Name", "items": ["x"]}, {"dtype": "torch.load"},
    json.loads('{"constexpr": ' * 600 + "1" + "}" * 600), json.loads('{"tuple": [' * 300 + "{}" + "]}" * 300),
])  # fmt: skip
def test_what_describes_nothing_is_refused_and_calls_nothing(data):
    def load(ref):
        module, _, name = ref.partition(":")
        return getattr(__import__(module), name)

    with pytest.raises(Indescribable) as caught:
        restore(data, no_tensor, load)
    assert len(str(caught.value)) < 500


def test_what_has_no_description_is_said():
    with pytest.raises(Indescribable, match=r"builtins\.object has no description"):
        describe(object(), str)


def test_lines_fold_into_launches(tmp_path):
    path = tmp_path / "x.json"
    file = Appender(path)
    launch = {"kernel": "k:k", "shape": None, "specialization": {"a": 1}, "options": {}}
    launch["id"] = identity(launch)
    file.append({**launch, "gpus": ["B"]})
    file.append({"id": launch["id"], "count": 2})
    file.append({**launch, "gpus": ["A"]})
    file.append({"id": launch["id"], "count": 3})
    file.append({"id": launch["id"], "miss": "why"})
    file.append({"id": "of nobody", "count": 7})
    file.close()
    [(number, row)] = fold(read_rows(path)[0])
    assert (number, row["gpus"], row["count"], row["miss"]) == (1, ["A", "B"], 5, "why")
    assert compact(path) == 1
    [(_, again)] = fold(read_rows(path)[0])
    assert again == row, "a compacted recording says the same"
    assert compact(path) == 1


@pytest.mark.parametrize(("text", "message"), [
    ("", "the recording has no launch in it"),
    ("[1]\n", ":1:1: no recording"),
    ('{"schema": 2, "id": "x", "kernel": "k:k"}\n', ":1:1: no line of a recording: schema is 2, expected 1"),
    ('{"schema": 1, "id": "x", "kernel": 3}\n', ":1:1: kernel: input should be a valid string"),
    ('{"schema": 1, "id": "x", "kernel": "k:k"}\n{"schema": 1, "id": "y", "kernel": "k:k", "grid": ""}\n', ":2:1: gri"),
    ('{"schema": 1, "id": "x", "kernel": "k:k", "other": 1}\n', ":1:1: other: extra inputs"),
    ('{"schema": 1, "id": "x", "kernel": "k:k", "gpus": 5}\n{"schema": 1, "id": "x", "kernel": "k:k"}\n', "gpus"),
    ('{"schema": 1, "id": "x", "count": 1}\n', "the recording has no launch in it"),
    ("[" * 100000, "no recording"),
])  # fmt: skip
def test_malformed_recordings(tmp_path, text, message):
    path = tmp_path / "x.launches.json"
    path.write_text(text)
    with pytest.raises(ManifestError) as error:
        load_recording(path)
    assert message in error.value.message
    assert str(path) in error.value.message


def test_a_cut_off_line_is_skipped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "x.launches.json"
    path.write_text('{"schema": 1, "id": "x", "kernel": "k:k"}\n{"schema": 1, "i')
    assert len(load_recording(path).launches) == 1
    assert "1 cut-off lines are skipped, the first is line 2" in caplog.text


def test_a_manifest_names_a_recording_that_is_not_there(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("version: 1\nkernels:\n  - launches: nowhere.json\n")
    with pytest.raises(ManifestError, match=r"m\.yaml:3:15: .*nowhere\.json: no such recording"):
        load_manifest(path)
    path.write_text("version: 1\nkernels:\n  - launch: nowhere.json\n")
    with pytest.raises(ManifestError, match="exactly one of 'call', 'kernel' and 'launches'"):
        load_manifest(path)


def test_a_recording_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be recorded to"):
        Appender(tmp_path / "file" / "x.json")


def test_names_of_kernels(tmp_path, monkeypatch):
    path = tmp_path / "app" / "pkg" / "serve.py"
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").touch()
    path.touch()
    module = types.ModuleType("pkg.serve")
    module.__file__ = str(path)
    exec("def run(): pass\nclass Holder:\n  def method(self): pass\n", vars(module))
    module.wrapped = types.SimpleNamespace(fn=types.SimpleNamespace(fn=module.run))
    monkeypatch.setitem(sys.modules, "pkg.serve", module)
    assert ref_of(module.run, module.run, tmp_path) == ("app/pkg/serve.py:run", None)
    assert ref_of(module.wrapped, module.run, tmp_path / "app") == ("pkg/serve.py:wrapped", None)
    assert ref_of(module.wrapped.fn, module.run, tmp_path / "app") == ("pkg/serve.py:wrapped.fn", None)
    assert ref_of(module.Holder.method, module.Holder.method, tmp_path / "app")[0] == "pkg/serve.py:Holder.method"
    other = types.FunctionType(module.run.__code__, vars(module), "run")
    assert ref_of(other, other, tmp_path)[1] == "the kernel cannot be imported: no module has it as a name"
    assert ref_of(pytest.raises, pytest.raises, tmp_path)[0].startswith("_pytest."), "installed: by its module"
    # generated, loaded by its path, and not among sys.modules
    hidden = types.ModuleType("generated_0")
    hidden.__file__ = str(path)
    exec("def run(): pass\ndef outer():\n  def inner(): pass\n  return inner", vars(hidden))
    assert ref_of(hidden.run, hidden.run, tmp_path) == ("app/pkg/serve.py:run", None)
    assert "made inside a function" in ref_of(hidden.outer(), hidden.outer(), tmp_path)[1]
    hidden.__file__ = str(tmp_path / "gone.py")
    assert ref_of(hidden.run, hidden.run, tmp_path)[1] is not None
    # the same file as a script
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(path), None
    exec("def run(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert module_of(main.run) == "pkg.serve"
    assert ref_of(main.run, main.run, tmp_path) == ("app/pkg/serve.py:run", None)
    main.__spec__ = types.SimpleNamespace(name="pkg.serve")
    assert module_of(main.run) == "pkg.serve"


def test_integer_classes():
    assert classes([1, 16, 17, 2**31, 2**40 + 1, -16, True]) == [
        "1", "64-bit divisible by 16", "64-bit other", "divisible by 16", "other"]  # fmt: skip


def launch(n, m, **kwargs):
    x = {"tensor": "bfloat16", "shape": [m, n], "stride": [n, 1]}
    data = {"schema": 1, "id": f"{m}-{n}", "kernel": "k.py:k", "args": [x, n, m * n, n * 4, "relu"], **kwargs}
    return RecordedLaunch.model_validate(data)


def test_shared_values_share_a_name():
    rows = [flatten(launch(n, m), ["x", "N", "size", "four", "ACT"]) for n, m in [(16, 1), (16, 3), (64, 3), (64, 1)]]
    [item] = generalize(rows)
    assert item.args["x"] == {"shape": ["M", "N"], "dtype": "bfloat16"}
    assert (item.args["N"], item.args["ACT"]) == ("N", {"value": "relu"})
    assert item.cases[0].keys() == {"M", "N", "size", "four"}
    assert "N: 2 values (16, 64); classes: divisible by 16" in item.notes


@given(st.lists(st.tuples(st.sampled_from([1, 2, 16, 4096]), st.sampled_from([1, 3, 16])), min_size=1, max_size=12))
def test_every_row_is_among_the_cases(sizes):
    names = ["x", "N", "size", "four", "ACT"]
    rows = [flatten(launch(n, m, grid=[m, -(-n // 8)]), names) for n, m in sizes]
    [item] = generalize(rows)
    made = set()
    for case in item.cases:
        for values in _product(case):
            shape = [evaluate(size, values) for size in item.args["x"]["shape"]]
            scalars = {name: evaluate(item.args[name], values) for name in ("N", "size", "four")}
            grid = [evaluate(axis, {**values, **scalars}) for axis in item.grid]
            made.add((*shape, *scalars.values(), *grid))
    wanted = {(m, n, n, m * n, n * 4, m, -(-n // 8)) for n, m in sizes}
    assert wanted == made


def test_names_that_mean_something_else_in_a_manifest():
    names = ["cdiv", "true", "where", "gpus", "shapes", "GRID0", "dtype"]
    wanted = set()
    rows = []
    for number in range(2, 9):
        values = [number, number + 10, 1.5 * number, 300 - number, f"text {number}", 100 + number**2, number**3]
        data = {"schema": 1, "id": str(number), "kernel": "k.py:k", "args": values, "grid": [7 * number + 1]}
        wanted.add((*values, 7 * number + 1))
        rows.append(flatten(RecordedLaunch.model_validate(data), names))
    [item] = generalize(rows)
    made = set()
    for case in item.cases:
        assert not {"cdiv", "true", "where", "gpus", "shapes"} & set(case)
        made |= {(*(evaluate(item.args[name], values) for name in names), evaluate(item.grid[0], values))
                 for values in _product(case)}  # fmt: skip
    assert made == wanted


@pytest.mark.parametrize("text", ["1..4", "0..64 by 16", " 1 ..", "1e3..1e4"])
def test_text_that_would_read_as_a_range_is_kept_as_recorded(text):
    data = {"schema": 1, "id": "x", "kernel": "k.py:k", "args": [text]}
    assert "reads as a range" in flatten(RecordedLaunch.model_validate(data), ["x"])


def _product(case):
    import itertools

    columns = [value if isinstance(value, list) else [value] for value in case.values()]
    return [dict(zip(case, values, strict=True)) for values in itertools.product(*columns)]


@pytest.mark.parametrize("argument", [
    {"function": "k.py:f"}, {"tensor": "float32", "shape": [4], "stride": [1], "address": 2}, [1, 2], 2**64,
])  # fmt: skip
def test_what_the_language_has_no_words_for(argument):
    data = {"schema": 1, "id": "x", "kernel": "k.py:k", "args": [argument]}
    assert isinstance(flatten(RecordedLaunch.model_validate(data), ["x"]), str)
    assert isinstance(flatten(RecordedLaunch.model_validate({**data, "args": [1], "kwargs": {"other": 1}}), ["x"]), str)
    assert isinstance(flatten(RecordedLaunch.model_validate({**data, "args": [1]}), ["x"]), Row)


def test_what_stands_for_a_module_is_looked_at_and_not_asked():
    class Facade:
        def __init__(self):
            self.kernel = fold

        def __getattr__(self, name):
            raise AssertionError(name)

        def __getattribute__(self, name):
            raise AssertionError(name)

    assert values_in(Facade()) == [fold]
    assert values_in(None) == []
    assert found_again(fold, fold) == "fold"
