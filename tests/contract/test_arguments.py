"""What a manifest's arguments resolve to without a GPU is what Triton's binder makes of the real thing.

For every kind of argument a ``kernel:`` item may state, the same launch is made by hand from real torch tensors on the
CPU; the entry's name, computed by Triton's own binder, has to be the same from mocks, from ghosts and from those.
"""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
import triton
import triton.language as tl

from tcache._triton.driver import stub
from tcache._triton.literals import constexpr, element_type, tensor_descriptor
from tcache._triton.mock import MockTensor
from tcache._triton.probe import compilation_of
from tcache.errors import ManifestError
from tcache.manifest import load_manifest
from tcache.manifest.arguments import DTYPES
from tcache.replay.arguments import arguments, ghost, mock, real, strides_of

TARGET = ("cuda", 90, 32)
MAKERS = (mock, ghost, functools.partial(real, device="cpu"))


@triton.jit
def kernel(x, y=None, KIND: tl.constexpr = 0):
    pass


@triton.jit
def described(d, x, pair, KIND: tl.constexpr):
    tile = d.load([0, 0])
    o = tl.arange(0, 16)
    v = tl.load(x + o).to(tl.float32) + tl.sum(tile.to(tl.float32), 1)
    tl.store(pair[0] + o, v.to(KIND), mask=o < pair[1])


def case_of(tmp_path, spec, scope="{n: 6}", item="kernel: k.py:kernel", grid="grid: [1]"):
    path = tmp_path / "m.yaml"
    used = "n" if "n:" in scope else "1"
    path.write_text(
        f"version: 1\nkernels:\n  - {item}\n    args: {{x: {spec}, y: {used}}}\n    {grid}\n    cases: [{scope}]\n"
    )
    [case] = load_manifest(path).cases()
    return case


def entry(given):
    return compilation_of(kernel, (), given).entry


def pointer(dtype, offset=0):
    """A real tensor whose pointer is that many elements beyond a 16-byte boundary."""
    storage = torch.zeros(64, dtype=torch.uint8).view(getattr(torch, dtype))
    assert storage.data_ptr() % 16 == 0
    return storage[offset : offset + 1]


def same(case, by_hand):
    """Mocks, ghosts, what is run for real and the argument made by hand give one entry; return it."""
    found = {entry(arguments(case, make)) for make in MAKERS} | {entry({"x": by_hand, "y": case.scope.get("n", 1)})}
    assert len(found) == 1
    return found.pop()


@pytest.fixture(autouse=True)
def driver():
    with stub(*TARGET):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type(tmp_path, dtype):
    entries = set()
    for offset in (0, 1, 2, 4, 8, 16):
        case = case_of(tmp_path, f"{{shape: [1], dtype: {dtype}, offset: {offset}}}")
        if offset * DTYPES[dtype] < 56:
            entries.add(same(case, pointer(dtype, offset)))
    assert len(entries) == 2  # aligned and not
    assert getattr(torch, dtype).itemsize == DTYPES[dtype]


def test_triton_takes_no_type_that_is_missing_here():
    names = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    taken = set()
    for name in names:
        try:
            entry({"x": MockTensor(name, (4,), (1,))})
        except KeyError:
            continue
        taken.add(name)
    # int1 and uint1 are names torch has and makes no tensors of
    assert taken - {"int1", "uint1"} == set(DTYPES)


# spec, and the same tensor as torch makes it
LAYOUTS = {
    "contiguous": ("{shape: [4, n], dtype: float32}", lambda: torch.zeros(4, 6)),
    "strided": ("{shape: [4, n], dtype: float32, stride: [12, 2]}", lambda: torch.zeros(4, 12)[:, ::2]),
    "a view": ("{shape: [3, n], dtype: float32, offset: n, stride: [n, 1]}", lambda: torch.zeros(4, 6)[1:]),
    "transposed": ("{shape: [n, 4], dtype: float16, layout: transposed}", lambda: torch.zeros(4, 6).half().t()),
    "expanded": ("{shape: [8, n], dtype: float32, stride: [0, 1]}", lambda: torch.zeros(6).expand(8, 6)),
    "expanded scalar": (
        "{shape: [n], dtype: int64, stride: [0]}",
        lambda: torch.zeros((), dtype=torch.int64).expand(6),
    ),
    "no dimensions": ("{shape: [], dtype: float32}", lambda: torch.zeros(())),
    "no elements": ("{shape: [0, n], dtype: float32}", lambda: torch.zeros(0, 6)),
    "channels last": (
        "{shape: [2, n, 5, 7], dtype: float32, layout: channels_last}",
        lambda: torch.zeros(2, 6, 5, 7).contiguous(memory_format=torch.channels_last),
    ),
    "channels last of one channel": (
        "{shape: [2, 1, 5, 7], dtype: float32, layout: channels_last}",
        lambda: torch.empty(2, 1, 5, 7, memory_format=torch.channels_last),
    ),
    "channels last 3d": (
        "{shape: [2, n, 3, 5, 7], dtype: bfloat16, layout: channels_last_3d}",
        lambda: torch.zeros(2, 6, 3, 5, 7).bfloat16().contiguous(memory_format=torch.channels_last_3d),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path, name):
    spec, make = LAYOUTS[name]
    case, wanted = case_of(tmp_path, spec), make()
    for maker in MAKERS:
        made = arguments(case, maker)["x"]
        assert tuple(made.shape) == tuple(wanted.shape)
        assert tuple(made.stride()) == tuple(wanted.stride())
        assert str(made.dtype) == str(wanted.dtype)
        assert made.data_ptr() % 16 == wanted.data_ptr() % 16
        assert made.dtype.itemsize == wanted.dtype.itemsize
    same(case, wanted)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (2, 1, 3, 1), (4, 3, 1, 1)])
def test_channels_last_is_torchs(shape):
    assert tuple(strides_of(shape, "channels_last")) == torch.empty(shape, memory_format=torch.channels_last).stride()
    deep = (*shape[:2], 3, *shape[2:])
    made = torch.empty(deep, memory_format=torch.channels_last_3d)
    assert tuple(strides_of(deep, "channels_last_3d")) == made.stride()
    assert tuple(strides_of(shape)) == torch.empty(shape).stride()


SCALARS = {
    "null": None, "true": True, "false": False, "0": 0, "1": 1, "16": 16, "17": 17, "-1": -1, "-16": -16, "n": 6,
    "n * 8": 48, "2147483647": 2**31 - 1, "2147483648": 2**31, "-2147483649": -(2**31) - 1, "4294967296": 2**32,
    "9223372036854775807": 2**63 - 1, "9223372036854775808": 2**63, "18446744073709551615": 2**64 - 1,
    "-9223372036854775808": -(2**63), "1.5": 1.5, "1e-5": 1e-5, ".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan,
    "n / 4": 1.5, "{value: 16}": 16, "{value: null}": None, "{value: true}": True,
    "{constexpr: n}": constexpr(6), "{constexpr: {value: relu}}": constexpr("relu"),
    "{tuple: [1, n, 16, null, true, 2.5]}": (1, 6, 16, None, True, 2.5),
    "{tuple: [1, {tuple: [n, {tuple: [16]}]}]}": (1, (6, (16,))), "{tuple: []}": (),
}  # fmt: skip


@pytest.mark.parametrize("spec", SCALARS)
def test_scalars_and_tuples(tmp_path, spec):
    same(case_of(tmp_path, spec), SCALARS[spec])


def test_what_the_binder_tells_apart_is_told_apart(tmp_path):
    entries = {spec: same(case_of(tmp_path, spec), value) for spec, value in SCALARS.items()}
    kinds = ("null", "true", "1", "16", "17", "2147483648", "4294967296", "9223372036854775808", "18446744073709551615",
             "1.5", "{constexpr: n}", "{tuple: [1, n, 16, null, true, 2.5]}")  # fmt: skip
    # 2147483648 and 4294967296 are 64 bits wide and divisible by 16 alike
    assert len({entries[kind] for kind in kinds}) == len(kinds) - 1


def test_tuples_of_tensors(tmp_path):
    spec = "{tuple: [{shape: [n], dtype: int8}, {tuple: [{shape: [], dtype: float64, offset: 1}, n]}]}"
    same(case_of(tmp_path, spec), (torch.zeros(6, dtype=torch.int8), (pointer("float64", 1), 6)))


CONSTANTS = {
    "{value: relu}": "relu", "'''a b'''": "a b", "{value: -3}": -3, "{value: 2.5}": 2.5, "true": True, "null": None,
    "{tuple: [1, {value: x}]}": (1, "x"), "n": 6, "{value: 18446744073709551615}": 2**64 - 1, ".inf": math.inf,
    **{f"{{dtype: {name}}}": element_type(name) for name in DTYPES},
}  # fmt: skip


@pytest.mark.parametrize("spec", CONSTANTS)
def test_constexprs(tmp_path, spec):
    case = case_of(tmp_path, f"1, KIND: {spec}")
    found = {entry(arguments(case, make)) for make in MAKERS}
    assert found == {entry({"x": 1, "y": 6, "KIND": CONSTANTS[spec]})}
    assert found != {entry({"x": 1, "y": 6, "KIND": "something else"})}


def test_a_type_by_the_cases_name(tmp_path):
    case = case_of(tmp_path, "{shape: [n], dtype: d}, KIND: {dtype: d}", "{n: 6, d: bfloat16}")
    wanted = entry({"x": torch.zeros(6, dtype=torch.bfloat16), "y": 6, "KIND": tl.bfloat16})
    assert {entry(arguments(case, make)) for make in MAKERS} == {wanted}


def test_triton_types_are_those_of_the_tensors():
    for name in DTYPES:
        signature = compilation_of(kernel, (pointer(name),), {}).specialization()["signature"]["x"]
        assert signature == f"*{'u1' if name == 'bool' else tl_name(name)}"


def tl_name(name):
    kind = element_type(name)
    return {"int": "i", "uint": "u"}.get(kind.name.rstrip("0123456789"), "") + kind.name.removeprefix(
        "uint"
    ).removeprefix("int")


DESCRIPTORS = {
    "{descriptor: {shape: [n, 64], dtype: bfloat16}, block: [2, 16]}": ("bfloat16", (6, 64), (64, 1), [2, 16], "zero"),
    "{descriptor: {shape: [n, 64], dtype: float32, stride: [128, 1]}, block: [n - 2, 16], padding: nan}": (
        "float32", (6, 64), (128, 1), [4, 16], "nan"),
    "{descriptor: {shape: [64], dtype: float8_e4m3fn, offset: 16}, block: [64]}": (
        "float8_e4m3fn", (64,), (1,), [64], "zero"),
}  # fmt: skip


@pytest.mark.parametrize("spec", DESCRIPTORS)
def test_tensor_descriptors(tmp_path, spec):
    dtype, shape, stride, block, padding = DESCRIPTORS[spec]
    tensor = torch.zeros(4096, dtype=torch.uint8).view(getattr(torch, dtype)).as_strided(shape, stride)
    wanted = tensor_descriptor(tensor, list(shape), list(stride), block, padding)
    case = case_of(tmp_path, spec)
    found = same(case, wanted)
    kind = compilation_of(kernel, (), arguments(case, mock)).specialization()["signature"]["x"]
    assert kind.startswith("tensordesc<")
    assert found != entry({"x": tensor, "y": 6})


def test_what_is_resolved_is_what_is_compiled(tmp_path, triton_cache):
    (tmp_path / "m.yaml").write_text("""\
version: 1
kernels:
  - kernel: k.py:described
    args:
      d: {descriptor: {shape: [n, 64], dtype: bfloat16}, block: [16, 16]}
      x: {shape: [n], dtype: float8_e5m2, stride: [0]}
      pair: {tuple: [{shape: [n], dtype: kind, offset: 1}, n]}
      KIND: {dtype: kind}
    grid: [1]
    cases: [{n: [16, 17], kind: [float16, float32]}]
""")
    found = []
    for case in load_manifest(tmp_path / "m.yaml").cases():
        before = set(os.listdir(triton_cache)) if triton_cache.exists() else set()
        given = arguments(case, mock)
        found.append(compilation_of(described, (), given).entry)
        described.warmup(grid=(1,), **arguments(case, MAKERS[2]))
        assert set(os.listdir(triton_cache)) - before == {found[-1]}
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{descriptor: {shape: [n, 64], dtype: bfloat16, offset: 1}, block: [2, 16]}", "16-byte aligned"),
        ("{descriptor: {shape: [n, 64], dtype: bfloat16}, block: [3, 16]}", "power of 2"),
        ("{descriptor: {shape: [64, n], dtype: int8, layout: transposed}, block: [16, 2]}", "contiguous|aligned"),
        ("{shape: [n - 7], dtype: int8}", "'n - 7' is -1: expected an integer of at least 0"),
        ("n * 9223372036854775807", "larger than 64 bits"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path, spec, message):
    with pytest.raises(ManifestError, match=message):
        arguments(case_of(tmp_path, spec), mock)


def test_wrappers_get_torchs_types_and_lists(tmp_path):
    spec = "{list: [n, {tuple: [1, {dtype: float8_e5m2}]}, {value: relu}]}"
    case = case_of(tmp_path, spec, item="call: k.py:f", grid="where: n > 0")
    assert arguments(case, ghost)["x"] == [6, (1, torch.float8_e5m2), "relu"]
