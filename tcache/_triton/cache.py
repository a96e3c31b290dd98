"""Triton's cache managers and compile events, named once."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.cache import CacheManager, FileCacheManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "CacheManager",
    "FileCacheManager",
    "cache_directory",
    "compile_events",
    "platform_key",
    "see_reads",
    "set_build_impl",
    "set_manager",
    "spare_platform_search",
    "without_build_impl",
]


def cache_directory() -> str:
    """Return the directory of Triton's own cache (``TRITON_CACHE_DIR`` or below the home directory)."""
    return str(knobs.cache.dir)


def told_to_compile() -> str | None:
    """Return what makes Triton compile whether or not the cache has an entry, None when nothing does."""
    return "TRITON_ALWAYS_COMPILE is set" if knobs.compilation.always_compile else None


def set_manager(cls: type[Any]) -> None:
    """Make ``cls`` the class Triton instantiates for every cache entry in this process."""
    knobs.cache.manager_class = cls


def set_build_impl(impl: Callable[..., str]) -> Callable[..., str] | None:
    """Make ``impl`` answer for native helpers: ``impl(name, src, srcdir, library_dirs, include_dirs, libraries)``.

    Returns the implementation that was there before, for ``impl`` to fall back to.
    """
    before: Callable[..., str] | None = knobs.build.impl
    knobs.build.impl = impl
    return before


@contextlib.contextmanager
def without_build_impl() -> Iterator[None]:
    """Let Triton run its own C compiler call inside the block."""
    before, knobs.build.impl = knobs.build.impl, None
    try:
        yield
    finally:
        knobs.build.impl = before


def build_natively(
    name: str, src: str, srcdir: str, library_dirs: list[str], include_dirs: list[str], libraries: list[str]
) -> str:
    """Build a native helper with Triton's own compiler call and return the path of the shared object."""
    from triton.runtime import build

    with without_build_impl():
        return str(build._build(name, src, srcdir, library_dirs, include_dirs, libraries, []))


def see_reads(seen: Callable[[Any, dict[str, str], Exception | None, Callable[[dict[str, str]], None]], None]) -> None:
    """Have ``seen(kernel, group, error, again)`` told after Triton has read an entry's files, in all of this process.

    A cache manager answers with paths, and ``CompiledKernel`` reads them later: only there does it show whether they
    could still be read. ``error`` is what came of it, None when nothing did, and ``seen`` raises it or another;
    ``again(group)`` reads other files into the same kernel.
    """
    upstream = CompiledKernel.__init__

    def __init__(self: Any, src: Any, metadata_group: dict[str, str], hash: Any) -> None:  # noqa: A002, N807
        self.module = None  # what ``__del__`` asks for, also of a kernel that could not be read

        def read(group: dict[str, str]) -> None:
            upstream(self, src, group, hash)

        problem = None
        try:
            read(metadata_group)
        except Exception as error:  # for the listener to raise
            problem = error
        seen(self, metadata_group, problem, read)

    CompiledKernel.__init__ = __init__


@contextlib.contextmanager
def compile_events(seen: Callable[[str, bool], None]) -> Iterator[None]:
    """Report every pass through ``triton.compile`` inside the block as ``seen(kernel_name, cache_hit)``.

    Chains to a listener that was there before.
    """
    before = knobs.compilation.listener

    def listener(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        seen(src.name, cache_hit)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listener
    try:
        yield
    finally:
        knobs.compilation.listener = before


def skip_driver_search() -> None:
    """Keep Triton from running ``ldconfig`` for a driver library that it would only link against.

    ``library_dirs()`` is evaluated even when a native helper is found; a slim image has no ``ldconfig``. Loading a
    helper finds the driver through the dynamic linker, as ever.
    """
    if knobs.nvidia.libcuda_path is None:
        knobs.nvidia.libcuda_path = "/nonexistent"


def platform_key(executable: str, *, file_program: bool) -> str | None:
    """Return what ``triton.runtime.build.platform_key`` returns, from a header instead of a process.

    Upstream asks ``platform.architecture()``, which runs the ``file`` program on Python: 10 to 15 ms at the first
    native helper. What it reads from the answer are the word size and the word ELF; both stand in the first five
    bytes. Where there is no ``file`` program the second is empty (``platform.architecture`` and ``_syscmd_file`` in
    CPython's ``Lib/platform.py``). A wrong answer would cost a search by key, not a wrong helper: those are packed by
    source too.

    Args:
        executable: the running Python.
        file_program: whether there is a ``file`` program to ask.

    Returns:
        The key; None where only upstream's way tells.
    """
    import platform
    import struct

    if not sys.platform.startswith("linux"):
        return None
    bits = f"{struct.calcsize('P') * 8}bit"
    if not file_program:
        return f"{platform.machine()},{platform.system()},{bits},"
    try:
        with open(os.path.realpath(executable), "rb") as file:
            head = file.read(5)
    except OSError:
        return None
    if head[:4] != b"\x7fELF" or head[4] not in (1, 2):
        return None
    return ",".join([platform.machine(), platform.system(), ("32bit", "64bit")[head[4] - 1], "ELF"])


def spare_platform_search() -> None:
    """Let Triton name its native helpers without running the ``file`` program."""
    from triton.runtime import build

    upstream = build.platform_key
    if getattr(upstream, "spares_a_process", False):
        return

    @functools.lru_cache
    def answer() -> str:
        found = platform_key(sys.executable or "", file_program=shutil.which("file") is not None)
        return found if found is not None else upstream()

    answer.spares_a_process = True  # type: ignore[attr-defined]
    build.platform_key = answer


def set_cache_directory(path: str) -> None:
    """Use ``path`` as Triton's cache in this process and its children."""
    os.environ["TRITON_CACHE_DIR"] = path
    knobs.cache.dir = path
