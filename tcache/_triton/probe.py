"""The entry name of a launch, taken from Triton's own ``compile`` and never built by hand.

``JITFunction.run(warmup=True)`` binds and specializes the arguments and hands an ``ASTSource`` to ``compile``;
``compile`` hashes source, target, options and environment and asks the cache manager for that name. Both steps
run here unchanged. The only thing replaced is the cache manager: it notes the name and stops.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import compiler as _compiler
from triton.runtime import _async_compile
from triton.runtime.cache import CacheManager
from triton.runtime.driver import driver as _driver

from tcache._triton.ahead import key_begun
from tcache._triton.driver import stub
from tcache._triton.kernels import ONE, Autotuner, Heuristics, JITFunction, is_typed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Compilation",
    "LaunchSeen",
    "compilation_of",
    "compile_in_progress",
    "key_environment",
    "launch_in_progress",
]


class _Asked(BaseException):
    def __init__(self, payload: Any) -> None:
        self.payload = payload


class _Name(CacheManager):  # type: ignore[misc]  # upstream is untyped
    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        raise _Asked(key)

    def get_file(self, filename: str) -> str | None:
        raise AssertionError

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        raise AssertionError

    def get_group(self, filename: str) -> dict[str, str] | None:
        raise AssertionError

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        raise AssertionError


@contextlib.contextmanager
def _manager(cls: type) -> Iterator[None]:
    before = knobs.cache.__dict__.get("manager_class", _manager)
    knobs.cache.manager_class = cls
    try:
        yield
    finally:
        if before is _manager:
            del knobs.cache.manager_class
        else:
            knobs.cache.manager_class = before


@dataclass(frozen=True)
class Compilation:
    """One call of Triton's ``compile``: everything needed to do it later, and the entry it reads or writes.

    Attributes:
        entry: name of the directory in the Triton cache.
        name: the kernel function's name, which Triton also gives its files.
        source, target, options: the arguments of ``triton.compile``.
        given: compile options the launch itself stated, in order: they are part of the key under which ``JITFunction``
            keeps a kernel in memory.
    """

    entry: str
    name: str
    source: Any
    target: Any
    options: dict[str, Any]
    given: tuple[tuple[str, Any], ...] = ()

    def run(self) -> Any:
        """Compile (or read from the cache) and return Triton's ``CompiledKernel``."""
        return _compiler.compile(self.source, target=self.target, options=dict(self.options))

    def build(self) -> None:
        """Compile into the cache, in a process where no other thread launches anything.

        A kernel may ask what it is compiled for (``tl.target_info``, atomics on descriptors), and upstream answers with
        the active driver's target, not the one given to ``compile``: so a driver of that target is active meanwhile.
        """
        with stub(self.target.backend, self.target.arch, self.target.warp_size):
            self.run()

    def effort(self) -> float:
        """Return a guess of how long compiling takes, in no unit: only good for beginning with what takes longest.

        Code is unrolled over a thread's share of a tile, so it grows with the block sizes, which are the powers of two
        among the constants, and shrinks with the warps.
        """
        blocks = 1.0
        for constant in self.source.constants.values():
            value = getattr(constant, "value", constant)
            if type(value) is int and 8 <= value <= 1 << 17 and value & (value - 1) == 0:
                blocks *= value
        return blocks / int(self.options.get("num_warps") or 4)

    def specialization(self, *, texts: bool = True) -> dict[str, Any]:
        """Return what Triton's binder made of the arguments, as named JSON values.

        Args:
            texts: whether functions among the constants are told apart by their text and line, as in an entry's name;
                else by their name, which outlives edits.

        Keys: ``signature`` (argument -> type), ``constants`` (argument -> value) and ``attributes``
        (argument -> list of properties such as ``tt.divisibility=16``, or :data:`tcache._triton.kernels.ONE`).
        """
        names = list(self.source.fn.arg_names)
        typed = [number for number, parameter in enumerate(self.source.fn.params) if is_typed(parameter)]
        return {
            "signature": {name: str(kind) for name, kind in self.source.signature.items()},
            "constants": {_path(names, path): _plain(value, texts) for path, value in self.source.constants.items()},
            "attributes": {
                _path(names, path): [f"{name}={value}" for name, value in found]
                for path, found in self.source.attrs.items()
                if found
            }
            | {names[number]: [ONE] for number in typed if (number,) not in self.source.attrs},
        }


def _path(names: list[str], path: tuple[int, ...]) -> str:
    return ".".join([names[path[0]], *map(str, path[1:])])


def _plain(value: Any, texts: bool) -> Any:
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item, texts) for item in value]
    if hasattr(value, "cache_key"):  # a jit function passed as a constant
        name = f"{value.__module__}.{value.__qualname__}"
        return f"{name} {value.cache_key[:12]}" if texts else name
    return str(value)


def _entry_of(source: Any, target: Any, options: dict[str, Any]) -> str:
    key_begun()
    with _manager(_Name):
        try:
            _compiler.compile(source, target=target, options=dict(options))
        except _Asked as asked:
            return str(asked.payload)
    raise AssertionError("triton.compile did not ask its cache")


def compilation_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compilation:
    """Bind a launch with Triton's own binder and return the compilation it leads to, without compiling.

    Args:
        function: the ``JITFunction``.
        args: positional arguments: tensors, mock tensors and scalars.
        kwargs: keyword arguments, meta-parameters and compile options such as ``num_warps``.

    Raises:
        Exception: whatever Triton's binder raises for these arguments (missing, unknown or untypable).
    """
    if not isinstance(function, JITFunction):
        raise TypeError(f"{function!r} is not a triton.jit function")
    function.device_caches[_driver.active.get_current_device()]  # makes the binder, which sets function.compile

    def asked(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        raise _Asked((source, target, dict(options or {})))

    compile_before = function.compile
    hook_before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, None
    function.compile = asked
    asynchronous = _async_compile.active_mode.set(None)  # under AsyncCompileMode a thread of its pool would be asked
    # A kernel compiled before is answered from JITFunction's own cache: look past it.
    caches = function.device_caches[_driver.active.get_current_device()]
    known = dict(caches[0])
    caches[0].clear()
    try:
        function.run(*args, grid=(1, 1, 1), warmup=True, **kwargs)
    except _Asked as found:
        source, target, options = found.payload
    else:
        raise AssertionError("JITFunction.run did not compile")
    finally:
        _async_compile.active_mode.reset(asynchronous)
        caches[0].update(known)
        function.compile = compile_before
        knobs.runtime.jit_cache_hook = hook_before
    given = tuple((name, value) for name, value in kwargs.items() if name not in function.arg_names)
    return Compilation(_entry_of(source, target, options), source.name, source, target, options, given)


def compile_in_progress() -> Compilation | None:
    """Return the compilation that the calling frame is part of, read from ``triton.compile``'s own variables.

    Only used to explain a miss: cache managers are given a name and nothing else.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _compiler.compile.__code__:
            found = frame.f_locals
            source = found.get("src")
            if source is None or not hasattr(source, "constants"):
                return None
            options = getattr(found.get("options"), "__dict__", {})
            return Compilation("", source.name, source, found.get("target"), dict(options))
        frame = frame.f_back
    return None


@dataclass(frozen=True)
class LaunchSeen:
    """The launch that the calling frame is part of.

    Attributes:
        function: the ``JITFunction``.
        arguments: every argument by name, defaults included, and compile options that the caller stated.
        filled: names of arguments that an autotuner's config or a heuristic filled in.
        grid: the grid, None where it cannot be told.
        named: names of what was given by name.
    """

    function: Any
    arguments: dict[str, Any]
    filled: frozenset[str]
    grid: tuple[int, ...] | None
    named: frozenset[str] = frozenset()


def launch_in_progress() -> LaunchSeen | None:
    """Return the launch that the calling frame is part of, read from ``JITFunction.run``'s own variables.

    Only used to explain a miss, like :func:`compile_in_progress`.
    """
    frame = inspect.currentframe()
    launch: dict[str, Any] | None = None
    filled: set[str] = set()
    while frame is not None:
        found = frame.f_locals
        if launch is None:
            if frame.f_code is JITFunction.run.__code__ and isinstance(found.get("bound_args"), dict):
                launch = found
        elif frame.f_code is Autotuner.run.__code__ and found.get("config") is not None:
            filled |= set(found["config"].all_kwargs())
        elif frame.f_code is Heuristics.run.__code__:
            filled |= set(found["self"].values)
        frame = frame.f_back
    if launch is None:
        return None
    bound = launch["bound_args"]
    stated = {name: value for name, value in launch["kwargs"].items() if name in _STATED and value is not None}
    named = frozenset(launch["kwargs"])
    return LaunchSeen(launch["self"], {**bound, **stated}, frozenset(filled), _grid_of(launch["grid"], bound), named)


_STATED = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def _grid_of(grid: Any, bound: dict[str, Any]) -> tuple[int, ...] | None:
    try:
        sizes = grid(bound) if callable(grid) else grid
        return tuple(int(size) for size in sizes)
    except Exception:  # the caller's function, asked at a moment it did not choose
        return None


def key_environment() -> dict[str, str]:
    """Return the environment variables that are part of Triton's keys, as Triton reads them."""
    found = get_cache_invalidating_env_vars()
    return json.loads(json.dumps({str(name): str(value) for name, value in sorted(found.items())}))  # type: ignore[no-any-return]
