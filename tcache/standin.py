"""Values that stand for a launch's arguments when its kernel is loaded before anybody launches it.

Triton finds a kernel in memory by what its binder makes of the arguments, so loading beforehand takes values of which
it makes the same. Mostly the types in an index say which. Where they do not, packing describes one launch: the value of
a constexpr may be a function or a type, a named tuple has a class, and of an argument called ``num_warps`` it matters
whether it was given by name.
"""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import ONE
from tcache._triton.literals import tensor_descriptor
from tcache._triton.mock import MockTensor
from tcache._triton.values import describe, restore
from tcache.errors import KernelError, UnsupportedValue
from tcache.naming import found_again, module_named

if TYPE_CHECKING:
    from tcache._triton.specialize import Specialized

__all__ = ["described_launch", "stand_in", "stand_ins"]


def described_launch(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Specialized | None
) -> dict[str, Any] | None:
    """Describe a launch where its types do not say enough.

    Args:
        function: the jit function.
        args, kwargs: what it is run with, meta-parameters and compile options included.
        made: what tcache specializes it to; None where only Triton can.

    Returns:
        ``args``, and ``kwargs`` as pairs in the order of the launch, which Triton's memory goes by; values as
        :func:`tcache._triton.values.describe` writes them, without the sizes of tensors. None where types do, or where
        an argument has no description: its kernel loads when it is first launched.
    """
    if made is not None and _told_by_types(function, made):
        return None
    try:
        return {
            "args": [_without_sizes(describe(value, _ref)) for value in args],
            "kwargs": [[name, _without_sizes(describe(value, _ref))] for name, value in kwargs.items()],
        }
    except Exception:  # of values of any kind: preloading is the only one to miss it
        return None


def _told_by_types(function: Any, made: Specialized) -> bool:
    return not any(parameter.name in made.options for parameter in function.params)


def _without_sizes(data: Any) -> Any:
    """Return a description in which tensors of all sizes are equal: what the binder sees is type and address."""
    if isinstance(data, list):
        return [_without_sizes(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return {name: data[name] for name in ("tensor", "address", "storage") if name in data}
    return {name: _without_sizes(item) for name, item in data.items()}


def _ref(value: Any) -> str:
    function = value if isinstance(value, type) else getattr(value, "fn", value)
    found = found_again(value, function)
    if found is None:
        raise UnsupportedValue(f"{function!r} cannot be imported by its name")
    return f"{function.__module__}:{found}"


def _loaded(ref: str) -> Any:
    name, _, attribute = ref.partition(":")
    found: Any = module_named(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise KernelError(f"{name} has no {attribute!r}", "preload where the kernels' modules are those packed")
        found = getattr(found, part)
    return found


def _tensor(data: dict[str, Any]) -> MockTensor:
    return MockTensor(str(data["tensor"]), (16,), (1,), int(data.get("address", 0)), int(data.get("storage", 0)))


def stand_ins(function: Any, facts: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments, compile options among them, that Triton specializes to an entry's facts.

    Args:
        function: the jit function.
        facts: what the index says of the entry.

    Raises:
        UnsupportedValue: an argument is of a kind that nothing stands for.
        KernelError: a function or class among the arguments is not there any more.
        ValueError: the index describes no launch.
    """
    launch = facts.get("launch")
    if launch is None:
        kinds = facts["signature"]
        named = {name: stand_in(kinds.get(name, "constexpr"), name, facts) for name in function.arg_names}
        return (), {**named, **dict(facts.get("given", ()))}
    try:
        args = tuple(restore(value, _tensor, _loaded) for value in launch["args"])
        return args, {str(name): restore(value, _tensor, _loaded) for name, value in launch["kwargs"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{launch!r:.80} describes no launch") from error


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
        if ONE in facts["attributes"].get(name, ()):
            return 1
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
