"""Launches with arguments of every kind: packed, they hit by name, by the index where it answers, and once preloaded.

Entry names are Triton's own, so that a packed launch hits says that replaying made the launch that the program makes.
That nothing is asked of the cache after preloading says that what stood for the arguments is what the binder makes of
them, which is more than equal names: Triton keeps kernels in memory under a key of its own.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

import tcache
from tcache._triton.cache import compile_events
from tcache.active import activate, active
from tcache.errors import CacheMiss

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project

LAUNCHES = 44
KERNELS = '''\
"""Kernels, and launches of them by number."""

import enum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tcache


class Pair(NamedTuple):
    left: object
    right: object


class Mode(enum.IntEnum):
    ONE = 1
    TWO = 2


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def thrice(x):
    return x * 3


@triton.jit
def named(x, num_stages: tl.constexpr, num_warps: tl.constexpr = 4):
    tl.store(x, num_stages + num_warps)


@triton.jit
def unnamed(x, maxnreg, num_ctas=1):
    tl.store(x, maxnreg)


@triton.jit
def text(x, S: tl.constexpr, T: tl.constexpr = "Dd"):
    tl.store(x, 1 if S == "D" else 2)


@triton.jit
def typed(x, D: tl.constexpr):
    tl.store(x, tl.full((), 1, D).to(tl.float32))


@triton.jit
def calling(x, F: tl.constexpr):
    tl.store(x, F(1.0))


@triton.jit
def first(x, t):
    tl.store(x, t[0])


@triton.jit
def paired(x, p):
    tl.store(p.left, p.right)


@triton.jit
def constant(x, T: tl.constexpr):
    tl.store(x, T[0])


@triton.jit
def described(d, B: tl.constexpr):
    d.store([0, 0], d.load([0, 0]))


@triton.jit
def many(x, n, f, b, none, i: tl.int64, C: tl.constexpr = 5):
    tl.store(x, n + f + i)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x", "m"])
def loose(x, n, m):
    tl.store(x, n + m)


@triton.jit
def moded(x, m, M: tl.constexpr):
    tl.store(x, m + M)


@triton.jit
def plain(x, c):
    tl.store(x, c)


@triton.jit
def sanitized(x, sanitize_overflow, arch):
    tl.store(x, tl.load(sanitize_overflow) + arch)


def x(size=64, offset=0, dtype=torch.float32):
    return torch.empty(size + offset, dtype=dtype, device=DEVICE)[offset:]


def launches():
    return [
        (named, (x(), 4), {}), (named, (x(),), {"num_stages": 4}), (named, (x(), 2, 8), {}),
        (named, (x(), 2), {"num_warps": 8}), (named, (x(), 7), {"num_warps": 4}),
        (unnamed, (x(), 64), {}), (unnamed, (x(), 64), {"num_warps": 2}), (unnamed, (x(),), {"maxnreg": 96}),
        (text, (x(), "D"), {}), (text, (x(), "S", "aDb"), {}), (text, (x(), ""), {"T": "x"}),
        (typed, (x(), tl.float32), {}), (typed, (x(), tl.float16), {"num_warps": 1}),
        (calling, (x(), twice), {}), (calling, (x(), thrice), {}),
        (first, (x(), (1, 2.0)), {}), (first, (x(), (16, (x(), None))), {}), (first, (x(), (tl.constexpr(3), 5)), {}),
        (paired, (x(), Pair(x(), 3)), {}), (paired, (x(), Pair(x(offset=1), 1)), {}),
        (paired, (x(), Pair(x(), tl.constexpr(7))), {}),
        (paired, (x(), Pair(x(), 16)), {"num_warps": 2, "num_stages": 1}),
        (constant, (x(), (1, 2)), {}), (constant, (x(), (3,)), {}),
        (described, (TensorDescriptor.from_tensor(x(4096).reshape(64, 64), [16, 32]), 16), {}),
        (many, (x(), 16, 1.5, True, None, 3), {}), (many, (x(), 16, 1.5, True, None, 1), {}),
        (many, (x(), 16, 1.5, True, None, 5), {}), (many, (x(), 1, 0, False, x(), 1), {"C": 1}),
        (many, (x(), 2**40, 2**63, False, None, 16), {"C": 1.5}),
        (many, (x(offset=1), 17, -0.0, False, None, 2**40), {"C": None}),
        (many, (x(dtype=torch.bfloat16), -16, 3, 0, 1, 5), {"C": True}),
        (many, (x(dtype=torch.bfloat16), -16, 3, 0, 1, 5), {"C": 1}),
        (many, (x(), 17, 2.0, False, None, 4), {"C": float("inf")}),
        (many, (x(), tl.constexpr(16), tl.constexpr(1.5), True, None, 3), {}),
        (many, (x(), 5, 5, True, 5), {"i": 1, "C": Mode.TWO}),
        (loose, (x(offset=1), 1, 16), {}), (loose, (x(), 2**40, 1), {}), (loose, (x(), 2**31, 17), {}),
        (moded, (x(), Mode.TWO, Mode.ONE), {}), (moded, (x(), 3, Mode.TWO), {}),
        (plain, (x(), tl.constexpr(3)), {}), (plain, (x(), tl.constexpr(3.5)), {}), (plain, (x(), True), {}),
    ]


TUNED = {}
DEVICE = "cuda"


def stock(i):
    kernel, args, kwargs = launches()[i]
    return kernel[(1,)](*args, **kwargs)


def tuned(i):
    """The same launch below an autotuner: of one config, so that nothing is measured."""
    kernel, args, kwargs = launches()[i]
    if kernel not in TUNED:
        TUNED[kernel] = tcache.autotune(configs=[triton.Config({})], key=[])(kernel)
    own = {"num_warps", "num_stages", "num_ctas"} & {*kernel.arg_names, *kwargs}
    return None if own else TUNED[kernel][(1,)](*args, **kwargs)
'''
MANIFEST = f"""\
version: 1
gpus: [NVIDIA H200]
kernels:
  - call: arguments.py:stock
    args: {{i: i}}
    cases: [{{i: {[*range(LAUNCHES)]}}}]
"""

pytestmark = pytest.mark.usefixtures("null_gpu")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("arguments")
    (root / "arguments.py").write_text(KERNELS)
    (root / "m.yaml").write_text(MANIFEST)
    bundle_project.run(root, "pack", "m.yaml", "--warmup", "-o", "bundle")
    return root


@pytest.fixture
def service(packed, monkeypatch):
    """The kernels as a process finds them that has just started, frozen, with the bundle."""
    activate(bundles=[packed / "bundle"], mode="frozen")
    monkeypatch.setattr(bundle_project, "NAME", "arguments")
    module = bundle_project.load(packed)
    module.DEVICE = "cpu"
    yield module
    sys.modules.pop("arguments")


def asked_of_the_cache(launch):
    events = []
    with compile_events(lambda name, hit: events.append((name, hit))):
        launch()
    return events


def test_each_launch_hits_by_its_name(service):
    assert len(service.launches()) == LAUNCHES
    for i in range(LAUNCHES):
        events = asked_of_the_cache(lambda: service.stock(i))  # noqa: B023 - called at once
        assert all(hit for _, hit in events), i


def test_each_launch_hits_below_an_autotuner(service):
    before = tcache.stats()
    for i in range(LAUNCHES):
        service.tuned(i)
    assert tcache.stats()["prebaked"] > before["prebaked"] + 10
    assert tcache.stats()["misses"] == before["misses"]


def test_preloading_leaves_nothing_to_do_for_any_launch(service):
    done = tcache.preload()
    assert [(row.kernel, row.reason) for row in done.failed] == []
    assert {row.entry for row in done.loaded} == active().bundles[0].entries
    for i in range(LAUNCHES):
        assert asked_of_the_cache(lambda: service.stock(i)) == [], i  # noqa: B023


def test_each_launch_is_proven(packed):
    """Whatever was launched before it: in memory Triton takes some for one that are two entries.

    Two launches are one entry: a typed 3 is as good as a typed 5, and not as a typed 1.
    """
    done = bundle_project.run(packed, "verify", "bundle")
    assert f"proven: {LAUNCHES} launches, {LAUNCHES} hits, 0 misses, {LAUNCHES - 1} entries" in done.stdout


def test_an_index_that_says_less_hits_all_the_same(packed, service, tmp_path):
    """As earlier versions packed them: no launch described, functions without their text, nothing of typed ones."""
    bundle = shutil.copytree(packed / "bundle", tmp_path / "bundle")

    def change(index):
        for row in index["entries"].values():
            row.pop("launch", None)
            row["constants"] = {
                name: value.rpartition(" ")[0] if name == "F" else value for name, value in row["constants"].items()
            }
            row["attributes"] = {name: said for name, said in row["attributes"].items() if said != ["equal to 1"]}

    bundle_project.edit(bundle / "index.json", change)
    bundle_project.sign(bundle)
    activate(bundles=[bundle], mode="frozen")
    before = tcache.stats()
    for i in range(LAUNCHES):
        assert all(hit for _, hit in asked_of_the_cache(lambda: service.stock(i))), i  # noqa: B023
        service.tuned(i)
    assert tcache.stats()["prebaked"] > before["prebaked"]
    assert tcache.stats()["misses"] == before["misses"]
    done = tcache.preload()  # what it cannot tell any more loads when it is launched
    assert done.loaded
    assert {row.kernel for row in done.failed} <= {f"arguments:{name}" for name in (
        "calling", "constant", "first", "many", "named", "paired", "plain", "typed", "unnamed")}  # fmt: skip


def test_what_was_given_by_name_is_another_entry(service):
    """And the index tells them apart: a kernel's own ``num_warps`` is the compile option where it is named."""
    x = torch.empty(64)
    positional = service.named[(1,)](x, 2, 8)
    service.named.device_caches.clear()  # in memory Triton takes the two for one
    by_name = service.named[(1,)](x, 2, num_warps=8)
    assert (positional.metadata.num_warps, by_name.metadata.num_warps) == (4, 8)
    assert positional.hash != by_name.hash


def test_manifest_lines_are_shown_only_where_they_lead_to_the_launch(service):
    """A manifest names arguments: of a kernel's own ``num_warps`` that is another launch than by position."""
    x = torch.empty(64)
    with pytest.raises(CacheMiss) as caught:
        service.named[(1,)](x, 5, 16)
    assert caught.value.manifest == ""
    assert "covered by a further case of `call: arguments.py:stock`" in str(caught.value)
    with pytest.raises(CacheMiss) as caught:
        service.named[(1,)](x, num_stages=5, num_warps=16)
    assert "num_warps: 16" in caught.value.manifest


def test_a_miss_of_a_tensor_that_is_called_like_an_option_is_a_miss(service):
    with pytest.raises(CacheMiss, match="no entry of this kernel is packed") as caught:
        service.sanitized[(1,)](torch.empty(64), torch.empty(64), 3)
    assert caught.value.manifest == ""


def test_a_function_among_the_arguments_that_was_edited_is_named(packed, tmp_path, service, monkeypatch):
    (tmp_path / "arguments.py").write_text(KERNELS.replace("return x * 3", "return x * 5"))
    module = bundle_project.load(tmp_path)
    module.DEVICE = "cpu"
    with pytest.raises(
        CacheMiss, match=r"constant F: arguments.thrice \w{12}, packed arguments.t(hr|w)ice \w{12}"
    ) as caught:
        module.calling[(1,)](torch.empty(64), module.thrice)
    assert caught.value.reasons == ("constexpr",)
    module.calling[(1,)](torch.empty(64), module.twice)


def test_a_typed_argument_that_is_one_is_named(service):
    """It keeps its type, and Triton's key tells it from others all the same."""
    with pytest.raises(CacheMiss, match="argument i: i64 equal to 1, packed i64") as caught:
        service.many[(1,)](torch.empty(64), 2**40, 2**63, False, None, 1, C=1.5)
    assert caught.value.reasons == ("one",)
