"""Load packed kernels onto the GPU when a service starts, so that no launch waits for it.

The kernel ends up where the launch that follows looks for it. Below an autotuner of tcache's that is
:class:`tcache.prebaked.Prebaked`; for all others it is the ``JITFunction``'s own memory, under the key that Triton's
binder makes of stand-ins for the arguments.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import math
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcache._triton.driver import current_target
from tcache._triton.kernels import is_kernel, jit_of
from tcache._triton.literals import tensor_descriptor
from tcache._triton.load import load_bound
from tcache._triton.mock import MockTensor
from tcache.active import active
from tcache.autotuner import Autotuner
from tcache.counters import count
from tcache.errors import BundleError, GPUMissing, KernelError, TcacheError, UnsupportedValue
from tcache.overlay import install, only_packed
from tcache.prebaked import prebaked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tcache.bundle import Bundle

__all__ = ["Failed", "Loaded", "Preloaded", "preload"]


@dataclass(frozen=True)
class Loaded:
    """An entry that is on the GPU now: its kernel as ``module:qualname``, its name, and how long it took."""

    kernel: str
    entry: str
    ms: float


@dataclass(frozen=True)
class Failed:
    """An entry that could not be loaded, and why."""

    kernel: str
    entry: str
    reason: str


@dataclass(frozen=True)
class Preloaded:
    """What :func:`preload` did.

    Attributes:
        target: the compile target of the current device, such as ``cuda:90:32``.
        loaded: entries on the GPU.
        failed: entries that could not be loaded.
        seconds: how long all of it took.
    """

    target: str
    loaded: tuple[Loaded, ...]
    failed: tuple[Failed, ...]
    seconds: float


def preload(kernels: str | Sequence[str] | None = None) -> Preloaded:
    """Load packed entries for the current device onto it.

    Args:
        kernels: shell patterns of kernels, ``my_package.*`` or ``*:matmul_kernel``, matched against
            ``module:qualname``; None loads every entry of the device's compile target. The kernels' modules are
            imported if they are not yet.

    Returns:
        What was loaded and how long it took, and what was not and why: a kernel whose module is absent, an entry that
        is damaged or whose source was edited, an argument of a kind that has no stand-in, as a named tuple. Nothing is
        compiled.

    Raises:
        GPUMissing: there is no GPU.
    """
    begin = time.perf_counter()
    try:
        backend, arch, warp_size = current_target()
    except RuntimeError as error:
        raise GPUMissing(f"nothing can be preloaded: {next(iter(str(error).splitlines()), '')}") from error
    target = f"{backend}:{arch}:{warp_size}"
    patterns = [kernels] if isinstance(kernels, str) else kernels
    install()
    loaded: list[Loaded] = []
    failed: list[Failed] = []
    for bundle, kernel, entry, facts in _wanted(target, patterns, failed):
        started = time.perf_counter()
        try:
            _load(bundle, kernel, entry, facts)
        except TcacheError as error:
            failed.append(Failed(kernel, entry, error.message))
        except Exception as error:  # what a module does when imported, or the driver when it loads
            text = next(iter(str(error).splitlines()), "")
            failed.append(Failed(kernel, entry, f"{type(error).__name__}: {text}"))
        else:
            loaded.append(Loaded(kernel, entry, (time.perf_counter() - started) * 1e3))
    count("preloaded", len(loaded))
    return Preloaded(target, tuple(loaded), tuple(failed), time.perf_counter() - begin)


def _wanted(
    target: str, patterns: Sequence[str] | None, failed: list[Failed]
) -> Iterator[tuple[Bundle, str, str, dict[str, Any]]]:
    seen: set[str] = set()
    for bundle in active().bundles:
        try:
            index = bundle.index()
        except BundleError as error:
            failed.append(Failed("*", "*", error.message))
            continue
        for entry, kernel in sorted(index.kernels(), key=lambda row: (row[1], row[0])):
            if entry in seen or (
                patterns is not None and not any(fnmatch.fnmatchcase(kernel, pattern) for pattern in patterns)
            ):
                continue
            facts = index.fact(entry)
            if facts["target"] == target and not facts.get("captured"):  # who generated it also loads it
                seen.add(entry)
                yield bundle, kernel, entry, facts


def _load(bundle: Bundle, kernel: str, entry: str, facts: dict[str, Any]) -> None:
    function, served = _function(kernel)
    packed = prebaked() if served else None
    if packed is not None and packed.preload(function, facts, bundle, entry):
        return
    arguments = {name: stand_in(facts["signature"].get(name, "constexpr"), name, facts) for name in function.arg_names}
    with only_packed():
        load_bound(function, arguments, dict(facts.get("given", ())))


def _function(kernel: str) -> tuple[Any, bool]:
    """Return a kernel's jit function, and whether an autotuner of tcache's launches it."""
    module_name, _, qualname = kernel.rpartition(":")
    module = sys.modules.get(module_name) or importlib.import_module(module_name)
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    # decorators may hide a kernel behind another name: a module then keeps it under that
    for value in (found, *vars(module).values()):
        if is_kernel(value):
            function = jit_of(value)
            if getattr(getattr(function, "fn", None), "__qualname__", None) == qualname:
                return function, _is_served(value)
    raise KernelError(f"{module_name} has no kernel {qualname!r}", "preload where the kernels are importable")


def _is_served(value: Any) -> bool:
    while value is not None and not isinstance(value, Autotuner):
        value = getattr(value, "fn", None) if is_kernel(value) else None
    return value is not None


_TORCH = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2", "fp8e4b8": "float8_e4m3fnuz", "fp8e5b16": "float8_e5m2fnuz", "i1": "bool", "u1": "bool",
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}, **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Triton's element types -> torch's names."""


def stand_in(kind: str, name: str, facts: dict[str, Any]) -> Any:
    """Return a value that Triton's binder specializes to the given type.

    Args:
        kind: the type in Triton's signature: ``*bf16``, ``i32``, ``tensordesc<bf16[64, 64]>``, ``('i32', '*fp32')``.
        name: the argument; of a tuple's member ``name.0``.
        facts: what the index says of the launch: ``constants`` has the values of constexprs, and in ``attributes``
            stands which pointers and integers are divisible by 16.

    Raises:
        UnsupportedValue: there is none for such a type.
    """
    if kind == "constexpr":
        return facts["constants"].get(name)
    if kind.startswith("("):
        members = _members(kind)
        if members is not None:
            return tuple(stand_in(str(one), f"{name}.{place}", facts) for place, one in enumerate(members))
    divisible = "tt.divisibility=16" in facts["attributes"].get(name, ())
    if kind.startswith("*"):
        element = kind.removeprefix("*").removeprefix("k")
        if element in _TORCH:
            return MockTensor(_TORCH[element], (16,), (1,), 16 if divisible else 8)
    elif found := _DESCRIPTOR.fullmatch(kind):
        block = [int(size) for size in found[2].split(",")]
        if found[1] in _TORCH:
            strides = [math.prod(block[place + 1 :]) * 16 for place in range(len(block) - 1)]  # of 16 bytes or more
            base = MockTensor(_TORCH[found[1]], tuple(block), (*strides, 1))
            return tensor_descriptor(base, block, [*strides, 1], block, "zero")
    elif kind in ("i1", "u1"):
        return True
    elif kind[:1] in ("i", "u") and kind[1:].isdigit():
        least = {"i64": 1 << 40, "u64": 1 << 63}.get(kind, 16)  # the smallest type that holds a value is its type
        return least if divisible else least + 2
    elif kind in _TORCH:
        return 2.5
    raise UnsupportedValue(f"an argument of type {kind} has no stand-in: its kernel loads when it is first launched")


_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[(\d+(?:, ?\d+)*)\]>")


def _members(kind: str) -> tuple[Any, ...] | None:
    try:
        found = ast.literal_eval(kind)
    except (ValueError, SyntaxError):
        return None  # a named tuple's
    return found if isinstance(found, tuple) else None
