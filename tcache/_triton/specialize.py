"""What Triton's binder makes of a launch's arguments, computed without it, for the kinds of arguments known here.

Asking Triton's own specializer imports Gluon and its look-up hashes the whole compiler: half a second before the first
launch of a process. What follows is the same function in Python. That it is the same is shown where it matters: packing
compares both for every launch and marks those that agree, and only marked entries are found this way.

Source: ``handle_*`` in ``python/src/specialize.cc`` and ``create_function_from_signature`` in
``triton/runtime/jit.py``, alike in 3.6 to 3.9 but for what ``_TEXT_IS_A_PROPERTY`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import triton
from triton import knobs
from triton._utils import type_canonicalisation_dict
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.driver import driver as _driver
from triton.runtime.jit import JITFunction

from tcache._triton.kernels import ONE, is_typed

__all__ = ["Specialized", "compiled", "launch", "specialize", "unusual"]

_TEXT_IS_A_PROPERTY = triton.__version__.startswith("3.6.")
"""3.6 also reads strings passed as constexpr for properties: one with a D in it is "divisible by 16", in the entry's
key too. Since 3.7 ``JITFunction._pack_args`` leaves constexprs out."""


@dataclass(frozen=True)
class Specialized:
    """A launch as the compiler sees it.

    Attributes:
        bound: parameter -> value, defaults and meta-parameters included, in order.
        signature: parameter -> type, such as ``*bf16``, ``i32`` or ``constexpr``.
        constants: parameter -> value of those whose type is ``constexpr``.
        divisible: parameters that upstream holds for divisible by 16.
        options: compile options as the backend completes them.
        ones: parameters with a type whose value is 1, see :data:`tcache._triton.kernels.ONE`.
    """

    bound: dict[str, Any]
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, Any]
    ones: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return this as named JSON values, equal to what :func:`tcache.explain.facts_of` says of Triton's own."""
        return {
            "signature": self.signature,
            "constants": {name: _plain(value) for name, value in self.constants.items()},
            "attributes": {name: ["tt.divisibility=16"] for name in self.divisible} | {n: [ONE] for n in self.ones},
            "options": {
                name: _plain_option(value) for name, value in sorted(self.options.items()) if name != "extern_libs"
            },
        }


def specialize(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialized | None:
    """Bind and specialize a launch for the active driver's target.

    Args:
        function: the jit function.
        args, kwargs: what it would be run with: meta-parameters and compile options included, ``grid`` and
            ``warmup`` not.

    Returns:
        None for what is not known here: other kinds of arguments and of parameters, targets other than CUDA, names that
        do not bind.
    """
    target = _driver.active.get_current_target()
    if target.backend != "cuda" or "extern_libs" in kwargs:
        return None
    found = _bound(function, args, kwargs)
    if found is None:
        return None
    bound, rest = found
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible, ones = [], []
    for parameter, (name, value) in zip(function.params, bound.items(), strict=True):
        kind = _specialized(parameter, value)
        if kind is None:
            return None
        signature[name] = kind[0]
        if kind[0] == "constexpr":
            constants[name] = value
            if _TEXT_IS_A_PROPERTY and type(value) is str and "D" in value:
                divisible.append(name)
        elif kind[1] == "D":
            divisible.append(name)
        elif not isinstance(kind[1], str) and is_typed(parameter):
            ones.append(name)
    options = _options(function, kwargs, target)
    if not options.keys() >= rest:
        return None
    return Specialized(bound, signature, constants, tuple(divisible), options, tuple(ones))


def _bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], set[str]] | None:
    """Return the arguments by name, in the order of the parameters, and the names of what is left. None: not bound."""
    if len(args) > len(function.params) or not all(map(_is_plain, function.params)):
        return None
    given = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
    if len(given) != len(args) + len(kwargs):
        return None
    bound: dict[str, Any] = {}
    for parameter in function.params:
        if parameter.name not in given and not parameter.has_default:
            return None
        bound[parameter.name] = given.get(parameter.name, parameter.default)
    return bound, given.keys() - bound.keys()


def _is_plain(parameter: Any) -> bool:
    """Return whether a parameter takes a value by position or name, and not one that upstream puts there itself.

    3.9 refuses what is only named when it is given by position, where earlier releases take it.
    """
    kind = parameter._param.kind
    return kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) and parameter.name not in _IMPOSED


_IMPOSED = ("debug", "instrumentation_mode", "fpsan_homomorphic_casts")
"""What ``JITFunction.run`` adds to the keyword arguments."""


def _specialized(parameter: Any, value: Any) -> tuple[str, Any] | None:
    if parameter.is_constexpr:
        return ("constexpr", value) if _is_constant(value) else None
    found = _kind(
        value,
        const=parameter.is_const,
        specialize=not parameter.do_not_specialize,
        align=not parameter.do_not_specialize_on_alignment,
    )
    annotated = parameter.annotation_type
    if found is None or not annotated:
        return found
    if annotated == "u1" or annotated[:2] in ("fp", "bf"):
        return annotated, None
    return annotated, found[1]


def _kind(value: Any, *, const: bool, specialize: bool, align: bool) -> tuple[str, Any] | None:
    kind = type(value)
    if kind is int:
        if specialize and value == 1:
            return "constexpr", 1
        width = _width(value)
        return None if width is None else (width, _divisible(value, align=align) if specialize else None)
    if kind is bool:
        return "u1", None
    if kind is float:
        return "fp32", None
    if value is None:
        return "constexpr", None
    dtype, address = getattr(value, "dtype", None), getattr(value, "data_ptr", None)
    if dtype is None or address is None or hasattr(value, "tma_desc_cpu_ptr") or hasattr(value, "base"):
        return None
    element = type_canonicalisation_dict.get(str(dtype).rpartition(".")[2])
    if element is None:
        return None
    return f"*{'k' if const else ''}{element}", _divisible(address(), align=align) if specialize else None


def _divisible(value: int, *, align: bool) -> str:
    return "D" if align and value % 16 == 0 else ""


def _width(value: int) -> str | None:
    if -(2**31) <= value < 2**31:
        return "i32"
    if -(2**63) <= value < 2**63:
        return "i64"
    return "u64" if 0 <= value < 2**64 else None


def _is_constant(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _options(function: Any, kwargs: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    # all of them: an argument that is given by name is also the option of that name, such as a kernel's num_warps
    asked = {**kwargs, "debug": kwargs.get("debug", function.debug) or knobs.runtime.debug}
    asked["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    if hasattr(type(knobs.compilation), "fpsan_homomorphic_casts"):
        asked["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
    return dict(make_backend(target).parse_options(asked).__dict__)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _plain_option(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain_option(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


def unusual() -> str | None:
    """Return what is set that a launch around ``triton.compile`` would not honour, None when nothing is."""
    for name in ("always_compile", "override", "dump_ir", "use_ir_loc"):
        if getattr(knobs.compilation, name, None):
            return f"knobs.compilation.{name} is set"
    for name in ("jit_cache_hook", "jit_post_compile_hook", "add_stages_inspection_hook"):
        if getattr(knobs.runtime, name, None) is not None:
            return f"knobs.runtime.{name} is set"
    for name in ("ptxas", "ptxas_blackwell", "libdevice_path", "mock_ptx_version"):
        if vars(knobs.nvidia).get(name) is not None:
            return f"knobs.nvidia.{name} is set"
    if JITFunction.create_binder.__module__ != JITFunction.__module__:
        return "launches are recorded"  # see tcache._triton.watch
    return None


def compiled(function: Any, made: Specialized, files: dict[str, str], key: str) -> Any:
    """Return Triton's own ``CompiledKernel`` of an entry's files.

    Args:
        function: the jit function.
        made: the launch it serves.
        files: file name in the entry -> path.
        key: SHA-256, in hexadecimal, that Triton knows the entry by.
    """
    place = {name: number for number, name in enumerate(function.arg_names)}
    backend = make_backend(_driver.active.get_current_target())
    attributes = {(place[name],): backend.parse_attr("D") for name in made.divisible}
    constants = {(place[name],): value for name, value in made.constants.items()}
    signature = {name: made.signature[name] for name in function.arg_names}  # launchers are made in this order
    source = ASTSource(function, signature, constants, attributes)
    kernel = CompiledKernel(source, files, key)
    listener = knobs.compilation.listener
    if listener is not None:  # as triton.compile does on a hit
        times = knobs.CompileTimes(ir_initialization=0, lowering_stages=[], store_results=0)
        listener(src=source, metadata=kernel.metadata._asdict(), metadata_group=files, times=times, cache_hit=True)
    return kernel


def launch(kernel: Any, made: Specialized, grid: Any) -> None:
    """Launch a compiled kernel with bound arguments. Source: the second half of ``JITFunction.run``."""
    device = _driver.active.get_current_device()
    stream = _driver.active.get_current_stream(device)
    if callable(grid):
        grid = grid(made.bound)
    first, second, third = (*grid, 1, 1)[:3] if len(grid) < 3 else grid[:3]
    metadata = kernel.launch_metadata(grid, stream, *made.bound.values())
    kernel.run(
        first, second, third, stream, kernel.function, kernel.packed_metadata, metadata,
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *made.bound.values(),
    )  # fmt: skip
