"""What changes a source identity, and what does not."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys

import pytest
import triton

from tcache.keys.source import source_identity

HEAD = "import triton\nimport triton.language as tl\n"
KERNEL = """
SCALE = tl.constexpr(2)

@triton.jit
def inner(x):
    return x * SCALE

@triton.jit
def helper(x):
    return inner(x) + 1

@triton.jit
def kernel(p, n, BLOCK: tl.constexpr = 16):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, helper(tl.load(p + o, mask=o < n)), mask=o < n)
"""
counter = itertools.count()


@pytest.fixture
def identity(tmp_path):
    def of(text, *, name="kernel", folder="a"):
        path = tmp_path / folder / f"module_{next(counter)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return source_identity(getattr(module, name))

    return of


@pytest.mark.parametrize(
    "text",
    [
        HEAD + KERNEL,
        "# a comment\n\n\n" + HEAD + "\n\n" + KERNEL,
        HEAD
        + KERNEL.replace(
            "def kernel(p, n, BLOCK: tl.constexpr = 16):", "def kernel(\n    p, n,\n    BLOCK: tl.constexpr = 16,\n):"
        ),
        HEAD + KERNEL.replace("    o = tl", "    # a comment inside\n    o = tl"),
        HEAD + KERNEL.replace("    o = tl", '    """A docstring."""\n    o = tl'),
        HEAD + KERNEL + "\nUNRELATED = 3\n",
    ],
    ids=["same", "shifted", "formatted", "comment", "docstring", "unrelated"],
)
def test_what_cannot_change_the_kernel_does_not_change_the_identity(identity, text):
    assert identity(text, folder="elsewhere") == identity(HEAD + KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask=o < n)), mask=o < n)", "mask=o < n)), mask=o <= n)"),
        ("inner(x) + 1", "inner(x) + 2"),
        ("return x * SCALE", "return x + SCALE"),
        ("tl.constexpr(2)", "tl.constexpr(3)"),
        ("tl.constexpr = 16", "tl.constexpr = 32"),
        ("@triton.jit\ndef inner", "@triton.jit(noinline=True)\ndef inner"),
        ("@triton.jit\ndef kernel", "@triton.jit(do_not_specialize=['n'])\ndef kernel"),
    ],
)
def test_every_real_change_is_seen(identity, old, new):
    assert old in KERNEL
    assert identity(HEAD + KERNEL.replace(old, new)) != identity(HEAD + KERNEL)


CLOSURE = """
import types
constants = types.ModuleType("constants")
constants.FACTOR = tl.constexpr({attribute})
SIZE = {default}

def make(value):
    factor = tl.constexpr(value)

    @triton.jit
    def kernel(p, BLOCK: tl.constexpr = SIZE):
        tl.store(p, factor * constants.FACTOR)

    return kernel

kernel = make({closure})
"""


@pytest.mark.parametrize("changed", ["attribute", "default", "closure"])
def test_closures_attributes_and_defaults_are_seen(identity, changed):
    values = {"attribute": 1, "default": 16, "closure": 5}
    before = identity(HEAD + CLOSURE.format(**values))
    assert identity(HEAD + CLOSURE.format(**values)) == before
    values[changed] *= 2
    assert identity(HEAD + CLOSURE.format(**values)) != before


TWO = """
def make(value):
    step = tl.constexpr(value)

    @triton.jit
    def add(x):
        return x + step

    return add

first = make({first})
second = make({second})

@triton.jit
def kernel(p):
    tl.store(p, first(second(1)))
"""


def test_functions_of_one_text_that_read_different_values_are_two(identity):
    seen = {identity(HEAD + TWO.format(first=a, second=b)) for a, b in ((1, 2), (1, 3), (2, 1), (1, 1))}
    assert len(seen) == 4


ODD = """\
import enum

class Kind(enum.Enum):
    A = {a}
    B = 2

KIND = tl.constexpr(Kind.{kind})
i = tl.constexpr({i})
LOOP = {{}}
LOOP["self"] = LOOP

@triton.jit
def kernel(p, KS: tl.constexpr):
    tl.static_print([i for i in KS], KIND, LOOP)
    tl.store(p, i)
"""


def test_enums_comprehensions_and_containers_that_hold_themselves(identity):
    base = {"a": 1, "kind": "A", "i": 5}
    before = identity(HEAD + ODD.format(**base))
    assert identity(HEAD + ODD.format(**base)) == before
    for change in ({"kind": "B"}, {"a": 3}, {"i": 6}):
        assert identity(HEAD + ODD.format(**{**base, **change})) != before


PLAIN = """\
import types

FACTS = types.SimpleNamespace(size={size}, names={{"a", "b"}})

def plain(n):
    return n + {step}

@triton.constexpr_function
def computed(n):
    return plain(n) + FACTS.size

@triton.jit
def kernel(p, N: tl.constexpr):
    tl.store(p, computed(N))
"""


def test_plain_functions_and_objects_that_constexpr_functions_read(identity):
    before = identity(HEAD + PLAIN.format(size=1, step=1))
    assert identity(HEAD + PLAIN.format(size=1, step=1)) == before
    assert identity(HEAD + PLAIN.format(size=1, step=2)) != before
    assert identity(HEAD + PLAIN.format(size=2, step=1)) != before


AGGREGATE = """
from triton.language.core import _aggregate

@_aggregate
class Pair:
    a: tl.tensor
    b: tl.constexpr

    {init}
    @triton.jit
    def total(self):
        return self.a + self.b

@triton.jit
def kernel(p):
    tl.store(p, Pair(tl.load(p), 3).total())
"""


def test_an_aggregates_fields_and_methods_are_seen(identity):
    init = "def __init__(self, a, b):\n        self.a, self.b = a, b\n"
    init = f"@triton.constexpr_function\n    {init}" if triton.__version__ < "3.8" else ""
    text = HEAD + AGGREGATE.replace("{init}", init)
    before = identity(text)
    assert identity(text) == before
    changes = [("self.a + self.b", "self.a")]
    if triton.__version__ >= "3.8":  # before that no key of Triton's tells fields apart, and nothing shows them
        changes += [("b: tl.constexpr", "b: tl.tensor"), ("    b: tl", "    c: tl")]
    for old, new in changes:
        assert identity(text.replace(old, new)) != before, new


def test_recursion_ends(identity):
    text = HEAD + "@triton.jit\ndef kernel(n):\n    return kernel(n - 1)\n"
    assert identity(text) == identity(text)


def test_a_helper_of_triton_itself_belongs_to_the_release(identity):
    text = HEAD + "@triton.jit\ndef kernel(p, n):\n    tl.store(p, tl.cdiv(n, 2) + tl.sum(tl.arange(0, 16)))\n"
    assert identity(text).startswith("sha256:")


def test_what_is_read_is_looked_at_again_and_the_text_is_not(tmp_path, monkeypatch):
    path = tmp_path / "seen_again.py"
    path.write_text(HEAD + KERNEL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = source_identity(module.kernel)
    parsed = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text, *more: parsed.append(text) or parse(text, *more))
    assert source_identity(module.kernel) == before
    assert parsed == []
    monkeypatch.setattr(module, "SCALE", triton.language.constexpr(7))
    assert source_identity(module.kernel) != before
    assert parsed == []
    monkeypatch.undo()
    assert source_identity(module.kernel) == before
    module.inner._unsafe_update_src(module.inner.src.replace("x * SCALE", "x - SCALE"))
    assert source_identity(module.kernel) != before


def test_a_global_that_is_read_before_a_local_hides_it(tmp_path):
    from tcache.keys.source import constants_read

    text = """
import triton
import triton.language as tl
S = tl.constexpr({value})

@triton.jit
def helper(o):
    return o * {factor}

@triton.jit
def kernel(x):
    v = helper(tl.arange(0, 16)) * S
    S = v + 1
    helper = S
    tl.store(x + tl.arange(0, 16), helper)
"""
    found = {}
    for value, factor in ((2, 1), (3, 1), (2, 5)):
        name = f"early_{value}_{factor}"
        path = tmp_path / f"{name}.py"
        path.write_text(text.format(value=value, factor=factor))
        spec = importlib.util.spec_from_file_location("early", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[value, factor] = source_identity(module.kernel)
        assert [row[1] for row in constants_read(module.kernel)] == ["S"]
    assert len(set(found.values())) == 3
