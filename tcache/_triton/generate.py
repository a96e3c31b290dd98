"""Source text of the warm path: what :class:`tcache._triton.launcher.Launcher` runs for one kernel and argument kinds.

The text is made of the kernel's parameter names, which are identifiers, and of literals written here; nothing that
is stored or that a user passes gets into it. Upstream does the same for its binder
(``create_function_from_signature`` in ``triton/runtime/jit.py``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver as _driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Shape", "functions"]


@dataclass(frozen=True)
class Shape:
    """What the generated code depends on.

    Attributes:
        names: the jit function's parameters in order.
        given: parameter -> expression that fetches it from ``args`` or ``kwargs``.
        exact: expressions that make the first key: integers by value, so that a launch just like one before is found
            with the least work.
        keys: expressions that make the second key: integers by what Triton specializes on, sizes by their bucket.
        pointers: parameters that are tensors: their alignment is part of both keys.
        heuristics: parameters that heuristics compute, in order.
        functions: names the expressions and the code use.
    """

    names: tuple[str, ...]
    given: dict[str, str]
    exact: tuple[str, ...]
    keys: tuple[str, ...]
    pointers: tuple[str, ...]
    heuristics: tuple[str, ...]
    functions: dict[str, Any]

    @classmethod
    def of(
        cls,
        function: Any,
        keys: list[str],
        buckets: Mapping[str, Callable[[Any], Any]],
        heuristics: list[tuple[str, Callable[..., Any]]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Shape | None:
        """Return the shape of the code for such arguments; None when one of them is of no kind known here."""
        names = tuple(function.arg_names)
        computed = tuple(dict.fromkeys(name for name, _ in heuristics))
        if len(args) > len(names) or any(name not in names for name in (*kwargs, *computed)):
            return None
        given = {name: f"args[{number}]" for number, name in enumerate(names[: len(args)])}
        if set(given) & set(kwargs) or set(computed) & {*given, *kwargs} or len(computed) != len(heuristics):
            return None
        given |= {name: f"kwargs[{name!r}]" for name in kwargs}
        constexprs = {parameter.name for parameter in function.params if parameter.is_constexpr}
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        found: list[str] = []
        raw: list[str] = []
        pointers: list[str] = []
        used: dict[str, Any] = {"wide": wide}
        for name in given:
            exact = name in constexprs or (name in keys and name not in buckets)
            expressions = _expressions(f"p_{name}", values[name], exact=exact, constexpr=name in constexprs)
            if expressions is None:
                return None
            found += expressions
            if _is_tensor(values[name]):
                pointers.append(name)
                raw += expressions
            elif expressions:
                raw.append(f"p_{name}")
            if name in buckets and name in keys:
                used[f"bucket_{name}"] = buckets[name]
                found.append(f"bucket_{name}(p_{name})")
        for number, (_, heuristic) in enumerate(heuristics):
            used[f"heuristic_{number}"] = heuristic
        return cls(names, given, tuple(raw), tuple(found), tuple(pointers), computed, used)


def _expressions(variable: str, value: Any, *, exact: bool, constexpr: bool) -> list[str] | None:
    """Return what of an argument is part of the key; None for a kind that is not known."""
    kind = type(value)
    if kind is int:
        if exact:
            return [variable]
        fits = f"-2147483648 <= {variable} <= 2147483647"
        return [f"((1 if {variable} == 1 else 2 if {variable} % 16 else 3) if {fits} else wide({variable}))"]
    if kind is float:
        return [variable] if exact else []
    if kind is bool:
        return [variable]
    if value is None:
        return []
    if kind is str:
        return [variable] if exact else None
    if _is_tensor(value):
        return [f"{variable}.dtype"] if not exact and not constexpr else None
    if exact and kind.__name__ == "dtype":
        return [variable]
    return None


def _is_tensor(value: Any) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__name__) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))


def wide(value: int) -> tuple[int, bool]:
    """Return the class of an integer that does not fit into 32 bits: signed or unsigned 64, divisible by 16 or not."""
    if not -(2**63) <= value < 2**64:
        return 0, False  # upstream refuses it, so no launch of this class is ever learnt
    return (64 if value < 2**63 else 65), value % 16 == 0


_MISSING = object()

LARGEST = 4096
"""Launches kept in each table for one kernel and kinds of arguments."""


def functions(
    shape: Shape, table: dict[Any, Any], watched: Any, tuner: Any, function: Any, depends: list[Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``launch(tuner, args, kwargs, grid)`` and ``key_of(args, kwargs, bound)`` for one shape.

    Args:
        shape: what the code depends on.
        table: key -> what was learnt.
        watched: see :class:`tcache._triton.launcher.Launcher`.
        tuner: the autotuner.
        function: the jit function.
        depends: ``(namespace, name, value)`` of the globals that the kernel was compiled with.
    """
    scope = {
        **shape.functions,
        "TABLE": table, "EXACT": {},
        "RUNTIME": knobs.runtime.__dict__, "RUNTIME_WAS": watched.runtime,
        "COMPILATION": knobs.compilation.__dict__, "COMPILATION_WAS": watched.compilation,
        "ENTER": watched.enter, "EXIT": watched.exit,
        "DRIVER": _driver, "ACTIVE": watched.driver, "BINDERS": function.device_caches,
        "get_device": _device_of(watched.driver), "get_stream": watched.driver.get_current_stream,
        "FUNCTION": function, "DEBUG": watched.debug,
        "JIT": JITFunction, "RUN": watched.run, "UPSTREAM": Autotuner, "UPSTREAM_RUN": watched.upstream,
        "FIELDS": function.__dict__, "FN": tuner.fn, "KEYS": tuner.keys, "OWNER": id(tuner),
        "GLOBALS": depends, "MISSING": _MISSING,
        "CONFIGS": tuner.configs, "COUNT": len(tuner.configs), "FIRST": tuner.configs[0],
        "VARIABLES": getattr(os.environ, "_data", None), "VARIABLES_WERE": watched.variables,
    }  # fmt: skip
    exec(text(shape, watched.variables, bool(depends)), scope)  # noqa: S102 - see this module's head
    return scope["launch"], scope["key_of"]


def _device_of(driver: Any) -> Callable[[], int]:
    """Return what asks for the current device; torch's own function also initializes CUDA, which has been done."""
    import torch

    given: Callable[[], int] = driver.get_current_device
    direct: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
    return direct if given is torch.cuda.current_device and direct is not None else given


def text(shape: Shape, variables: dict[str, str | None], has_globals: bool) -> str:
    """Return the source of both functions."""
    rest = [name for name in shape.names if name not in shape.given and name not in shape.heuristics]
    fetch = [f"    p_{name} = {source}" for name, source in shape.given.items()]
    key = ", ".join(("device", "aligned", *shape.keys)) + ","
    everything = ", ".join(f"p_{name}" for name in shape.names)
    bound = ", ".join(f"{name!r}: p_{name}" for name in shape.names)
    lines = ["def launch(tuner, args, kwargs, grid):", *_guards(variables), *fetch, *_alignment(shape)]
    lines += ["    device = get_device()", "    if device not in BINDERS:", "        return None"]
    lines += [
        f"    exact = (device, aligned, {', '.join(shape.exact)})",
        "    found = EXACT.get(exact)",
        "    if found is None:",
        f"        found = TABLE.get(({key}))",
        "        if found is None:",
        "            return None",
        f"        if len(EXACT) >= {LARGEST}:",
        "            EXACT.clear()",
        "        EXACT[exact] = found",
    ]
    if shape.heuristics:
        lines += _heuristic_lines(shape)
    opened = ", ".join(f"p_{name}" for name in rest)
    lines.append(f"    kernel, run, function, packed, config, {f'({opened},)' if rest else 'nothing'} = found")
    lines += ["    if config.pre_hook is not None:", "        return None"]
    if has_globals:
        lines += [
            "    for space, name, value in GLOBALS:",
            "        if space.get(name, MISSING) != value:",
            "            return None",
        ]
    lines += [
        "    stream = get_stream(device)",
        "    if type(grid) is not tuple and callable(grid):",
        f"        grid = grid({{{bound}}})",
        "    size = len(grid)",
        "    run(grid[0], grid[1] if size > 1 else 1, grid[2] if size > 2 else 1, stream, function, packed,",
        f"        None, None, None, {everything})",
        "    tuner.best_config = config",
        "    return kernel",
        "",
        "def key_of(args, kwargs, bound):",
        *fetch,
        *_alignment(shape),
        "    device = get_device()",
    ]
    inner = ", ".join(f"type(bound[{name!r}]), bound[{name!r}]" for name in shape.heuristics)
    lines.append(f"    return ({key}), ({inner}{',' if inner else ''})")
    return "\n".join(lines) + "\n"


def _alignment(shape: Shape) -> list[str]:
    """Return the lines that set ``aligned``: 0 where every address is divisible by 16, else each one modulo 16."""
    if not shape.pointers:
        return ["    aligned = 0"]
    addresses = [f"p_{name}.data_ptr()" for name in shape.pointers]
    each = ", ".join(f"{address} & 15" for address in addresses)
    return [f"    aligned = ({' | '.join(addresses)}) & 15", "    if aligned:", f"        aligned = ({each},)"]


def _guards(variables: dict[str, str | None]) -> list[str]:
    """Return the lines that leave the launch to upstream when anything is not as it was."""
    checks = [
        "RUNTIME != RUNTIME_WAS", "COMPILATION != COMPILATION_WAS", "ENTER", "EXIT", "FUNCTION.pre_run_hooks",
        "DRIVER._active is not ACTIVE", "FUNCTION.debug is not DEBUG", "JIT.run is not RUN",
        "UPSTREAM.run is not UPSTREAM_RUN", "'run' in FIELDS", "tuner.fn is not FN", "tuner.keys is not KEYS",
        "id(tuner) != OWNER",
        "tuner.configs is not CONFIGS", "len(CONFIGS) != COUNT", "CONFIGS[0] is not FIRST",
    ]  # fmt: skip
    for name, value in variables.items():
        checks.append(
            f"VARIABLES is None or VARIABLES.get({os.fsencode(name)!r}) != "
            f"{None if value is None else os.fsencode(value)!r}"
        )
    return [f"    if ({' or '.join(checks)}):", "        return None"]


def _heuristic_lines(shape: Shape) -> list[str]:
    """Return the lines that compute heuristics as ``Heuristics.run`` does: each sees the values of those before."""
    arguments = ", ".join(f"{name!r}: p_{name}" for name in shape.given)
    lines = [
        "    meta, inside = found",
        f"    seen = {{{arguments}, 'grid': grid, 'warmup': False, **meta}}",
    ]
    for number, name in enumerate(shape.heuristics):
        lines.append(f"    p_{name} = seen[{name!r}] = heuristic_{number}({{**seen}})")
    inner = ", ".join(f"type(p_{name}), p_{name}" for name in shape.heuristics)
    return [
        *lines,
        "    try:",
        f"        found = inside.get(({inner},))",
        "    except TypeError:",
        "        return None",
        "    if found is None:",
        "        return None",
    ]
