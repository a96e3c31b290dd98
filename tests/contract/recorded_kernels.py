"""Kernels of every kind that the recorder must recognise, in a module of their own: recordings name it."""

from __future__ import annotations

import enum
from typing import NamedTuple

import triton
import triton.language as tl

import tcache


class Kind(enum.Enum):
    PLAIN = 0
    SCALED = 1


class Flags(enum.IntFlag):
    LEFT = 1
    RIGHT = 2


class Sizes(NamedTuple):
    rows: int
    columns: int


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def thrice(x):
    return x * 3


@triton.jit
def add(x_ptr, y_ptr, n, a, flag, none, KIND: tl.constexpr, BLOCK: tl.constexpr = 64):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n).to(tl.float32)
    if flag:
        x += a
    tl.store(y_ptr + o, x.to(y_ptr.dtype.element_ty), mask=o < n)


@triton.jit
def cast(x_ptr, n, TO: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n)
    tl.store(x_ptr + o, x.to(TO).to(x_ptr.dtype.element_ty), mask=o < n)


@triton.jit
def anything(x_ptr, SPEC: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty))


@triton.jit
def apply(x_ptr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, FUNCTION(tl.load(x_ptr + o)))


@triton.jit
def tupled(x_ptr, sizes, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty), mask=o < sizes[0] * sizes[1])


@triton.jit
def pointers(x_ptrs, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptrs[0] + o, tl.load(x_ptrs[1] + o, mask=o < n), mask=o < n)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
def loose(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty), mask=o < n)


@triton.jit
def annotated(x_ptr, n: tl.int64, scale: tl.float32, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, (o * scale).to(x_ptr.dtype.element_ty), mask=o < n)


@triton.jit
def described(desc, out_ptr, BLOCK: tl.constexpr):
    tile = desc.load([0, 0])
    o = tl.arange(0, BLOCK)
    tl.store(out_ptr + o[:, None] * BLOCK + o[None, :], tile)


def _set_block(nargs):
    nargs["desc"].block_shape = [nargs["BLOCK"], nargs["BLOCK"]]


@triton.autotune([triton.Config({"BLOCK": size}, num_warps=4, pre_hook=_set_block) for size in (16, 32)], key=["which"])
@triton.jit
def hooked(desc, out_ptr, which, BLOCK: tl.constexpr):
    tile = desc.load([0, 0])
    o = tl.arange(0, BLOCK)
    tl.store(out_ptr + o[:, None] * BLOCK + o[None, :], tile)


CONFIGS = [triton.Config({"BLOCK": 32}, num_warps=2), triton.Config({"BLOCK": 64}, num_warps=4)]


@triton.heuristics({"EVEN": lambda args: args["n"] % 64 == 0})
@triton.jit
def chosen(x_ptr, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty), mask=None if EVEN else o < n)


@triton.autotune(CONFIGS, key=["m"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_over(x_ptr, m, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, (o + m).to(x_ptr.dtype.element_ty), mask=None if EVEN else o < n)


@triton.heuristics({"EVEN": lambda args: args["n"] % 64 == 0})
@triton.autotune(CONFIGS, key=["m"])
@triton.jit
def tuned_under(x_ptr, m, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, (o + m).to(x_ptr.dtype.element_ty), mask=None if EVEN else o < n)


@triton.autotune([triton.Config({"BLOCK": 32}, num_warps=2)], key=["n"])
@triton.jit
def single(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty), mask=o < n)


@tcache.autotune(CONFIGS, key=["m"])
@triton.jit
def stored(x_ptr, m, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, (o + m).to(x_ptr.dtype.element_ty), mask=o < n)


class Launcher(triton.KernelInterface):
    """A decorator as libraries have them (FlagGems' ``libentry``): it keeps what was compiled by a key of its own."""

    def __init__(self, fn):
        self.fn = fn
        self.arg_names = fn.arg_names
        self.compiled = {}

    def run(self, *args, **kwargs):
        key = args[1:]
        if key not in self.compiled:
            compiled = self.fn.run(*args, **kwargs)
            assert hasattr(compiled, "metadata")
            assert isinstance(self.fn, triton.JITFunction) or self.fn.best_config in CONFIGS
            self.compiled[key] = compiled
        return self.compiled[key]


class Winners:
    """An autotuner's winners in a place of its own; no dict."""

    def __init__(self):
        self.found = {}

    def __contains__(self, key):
        return key in self.found

    def __getitem__(self, key):
        return self.found[key]

    def __setitem__(self, key, config):
        self.found[key] = config


class Tuner(triton.runtime.Autotuner):
    """An autotuner of a library's own."""

    def __init__(self, fn):
        super().__init__(fn, fn.arg_names, CONFIGS, ["m"], None, None, do_bench=lambda call, **_: [call(), 1][1:])
        self.cache = Winners()


@Launcher
@triton.jit
def launched(x_ptr, n, BLOCK: tl.constexpr = 64):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty), mask=o < n)


@Launcher
@Tuner
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def launched_tuned(x_ptr, m, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, (o + m).to(x_ptr.dtype.element_ty), mask=None if EVEN else o < n)


def nested():
    @triton.jit
    def inside(x_ptr, BLOCK: tl.constexpr):
        o = tl.arange(0, BLOCK)
        tl.store(x_ptr + o, o.to(x_ptr.dtype.element_ty))

    return inside
