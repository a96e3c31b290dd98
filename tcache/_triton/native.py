"""Native helpers: the C extensions Triton builds at run time, built here without a driver.

Triton links them against ``libcuda.so.1``. A builder has none, so they are linked against a stub library that
exports the driver's names, taken from the header Triton ships: with an empty stub the linker would drop the
dependency, and loading would fail on the GPU machine with an undefined symbol.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton import knobs

from tcache._triton.cache import CacheManager
from tcache._triton.probe import _manager
from tcache.errors import CompilerMissing, TcacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["HelperSource", "build", "find_hip_library", "helper_sources", "lookup_names", "suffix"]


@dataclass(frozen=True)
class HelperSource:
    """A helper that Triton would build.

    Attributes:
        name: module name.
        text: its C source.
        include_dirs: where its headers are.
        libraries: what it links against, as upstream names it.
    """

    name: str
    text: str
    include_dirs: tuple[str, ...]
    libraries: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the source: what identifies the helper in a bundle."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def keys(self) -> tuple[str, ...]:
        """Return the entry names Triton 3.6 to 3.8 use for this source on machines of this platform.

        ``compile_module_from_src`` hashes the source and ``platform_key()``; the latter differs with and without
        the ``file`` program, so there are two. Releases that hash more simply do not ask for these names.
        """
        import base64

        names = []
        for linkage in ("ELF", ""):
            place = f"{platform.machine()},{platform.system()},64bit,{linkage}"
            digest = hashlib.sha256((self.text + place).encode()).digest()
            names.append(base64.b32encode(digest).decode().rstrip("="))
        return tuple(names)


class _Asked(BaseException):
    pass


class _Empty(CacheManager):  # type: ignore[misc]  # upstream is untyped
    """A cache without entries, so that Triton goes on to build; it notes the name asked for last."""

    asked = ""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        _Empty.asked = key

    def get_file(self, filename: str) -> str | None:
        return None

    def get_group(self, filename: str) -> dict[str, str] | None:
        return None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        raise AssertionError

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        raise AssertionError


@contextlib.contextmanager
def _collecting(seen: Callable[[HelperSource, str], None], driver_dir: str | None) -> Iterator[None]:
    def impl(
        name: str, src: str, _srcdir: str, _library_dirs: list[str], include_dirs: list[str], libraries: list[str]
    ) -> str:
        helper = HelperSource(name, Path(src).read_text("utf-8"), tuple(include_dirs), tuple(libraries))
        seen(helper, _Empty.asked)
        raise _Asked

    before = knobs.build.impl
    library_path = knobs.nvidia.libcuda_path
    knobs.build.impl = impl
    # a path given keeps upstream from asking ldconfig for a driver
    knobs.nvidia.libcuda_path = driver_dir or library_path or "/nonexistent"
    try:
        with _manager(_Empty):
            yield
    finally:
        knobs.build.impl = before
        knobs.nvidia.libcuda_path = library_path


def _ask(kernels: list[Any], hip_library: str | None) -> None:
    """Make Triton ask for every helper of these kernels, and for none to be loaded."""
    from triton.backends.nvidia import driver as nvidia

    by_backend: dict[str, list[Any]] = {"cuda": [], "hip": []}
    for kernel in kernels:
        by_backend[kernel.metadata.target.backend].append(kernel)
    if by_backend["cuda"]:
        with contextlib.suppress(_Asked):
            nvidia.CudaUtils()
        # 3.6 has a launcher per signature; later releases launch through cuda_utils
        if hasattr(nvidia, "make_launcher"):
            for kernel in by_backend["cuda"]:
                with contextlib.suppress(_Asked):
                    nvidia.CudaLauncher(kernel.src, kernel.metadata)
    if by_backend["hip"] and hip_library:
        from triton.backends.amd import driver as amd

        before, amd._get_path_to_hip_runtime_dylib = amd._get_path_to_hip_runtime_dylib, lambda: hip_library
        try:
            with contextlib.suppress(_Asked):
                amd.HIPUtils()
            if hasattr(amd, "make_launcher"):
                for kernel in by_backend["hip"]:
                    with contextlib.suppress(_Asked):
                        amd.HIPLauncher(kernel.src, kernel.metadata)
        finally:
            amd._get_path_to_hip_runtime_dylib = before


def helper_sources(kernels: Iterable[Any], hip_library: str | None = None) -> list[HelperSource]:
    """Return the helpers that launching these kernels needs, sorted by name and digest.

    Args:
        kernels: Triton's ``CompiledKernel`` objects, or anything with their ``src`` and ``metadata``.
        hip_library: path of ``libamdhip64.so`` where AMD kernels will be launched: it is part of their helpers'
            source. Without it AMD kernels are passed over.
    """
    found: dict[str, HelperSource] = {}

    def seen(helper: HelperSource, _name: str) -> None:
        found.setdefault(helper.digest, helper)

    with _collecting(seen, None):
        _ask(list(kernels), hip_library)
    return sorted(found.values(), key=lambda helper: (helper.name, helper.digest))


def lookup_names(
    kernels: Iterable[Any], driver_dirs: Iterable[str], hip_library: str | None = None
) -> dict[str, list[str]]:
    """Return helper digest -> the cache entries in which stock Triton may look for it, as Triton itself names them.

    The name covers the source and ``platform_key()``, which differs with and without the ``file`` program; from 3.8
    on also the directories of Triton and of the driver library.

    Args:
        kernels, hip_library: as for :func:`helper_sources`.
        driver_dirs: directories in which the service may have ``libcuda.so.1``.
    """
    kernels, dirs = list(kernels), list(driver_dirs)
    one_of_each = list({kernel.metadata.target.backend: kernel for kernel in kernels}.values())
    found: dict[str, set[str]] = {}
    for linkage in ("ELF", ""):
        sample: dict[str, set[str]] = {}
        for directory in dirs[:2]:
            _ask_by_name(one_of_each, sample, linkage, directory, hip_library)
        # up to 3.7 the directory is no part of the name: one answers for all
        needed = dirs if any(len(names) > 1 for names in sample.values()) else dirs[:1]
        for directory in needed:
            _ask_by_name(kernels, found, linkage, directory, hip_library)
    return {digest: sorted(names) for digest, names in found.items()}


def _ask_by_name(
    kernels: list[Any], found: dict[str, set[str]], linkage: str, directory: str, hip_library: str | None
) -> None:
    """Add the names of these kernels' helpers on a machine with that linkage and driver directory."""
    from triton.runtime import build as upstream

    def seen(helper: HelperSource, name: str) -> None:
        found.setdefault(helper.digest, set()).add(name)

    before = upstream.platform_key
    upstream.platform_key = lambda: f"{platform.machine()},{platform.system()},64bit,{linkage}"
    _forget_driver_dirs()
    try:
        with _collecting(seen, directory):
            _ask(kernels, hip_library)
    finally:
        upstream.platform_key = before
        _forget_driver_dirs()


def _forget_driver_dirs() -> None:
    from triton.backends.nvidia import driver as nvidia

    for name in ("libcuda_dirs", "library_dirs"):
        getattr(nvidia, name).cache_clear()


def find_hip_library() -> str | None:
    """Return the path of ``libamdhip64.so`` that Triton would use on this machine, None when there is none."""
    from triton.backends.amd import driver as amd

    try:
        return str(amd._get_path_to_hip_runtime_dylib())
    except Exception:
        return None


def suffix() -> str:
    """Return the ending Triton gives a helper's file: ``.cpython-312-x86_64-linux-gnu.so``."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _driver_stub(folder: Path, compiler: list[str]) -> None:
    """Build a ``libcuda.so.1`` that exports every function in Triton's ``cuda.h`` and does nothing."""
    from triton.backends.nvidia import driver as nvidia

    header = Path(nvidia.dirname, "include", "cuda.h").read_text("utf-8")
    names = set(re.findall(r"\bCUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header))
    names |= set(re.findall(r"#define\s+cu\w+\s+(cu\w+_v\d+)", header))
    if not names:
        raise TcacheError("Triton's cuda.h names no driver function: native helpers cannot be built", "--no-native")
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(names)))
    library = folder / "libcuda.so.1"
    _run([*compiler, "-shared", "-fPIC", "-o", str(library), "-Wl,-soname,libcuda.so.1", str(source)], folder)


def build(helpers: list[HelperSource], target: Path) -> list[Path]:
    """Build helpers with the C compiler of this machine, as Triton would, without a driver.

    Args:
        helpers: what to build.
        target: an existing directory; each helper gets a directory of its digest in it, and an existing file there
            is taken as built.

    Returns:
        The shared objects, in the order of ``helpers``.

    Raises:
        CompilerMissing: there is no C compiler.
        TcacheError: it failed; the message has its first line.
    """
    paths = [target / helper.digest[:16] / f"{helper.name}{suffix()}" for helper in helpers]
    todo = [(helper, path) for helper, path in zip(helpers, paths, strict=True) if not path.exists()]
    if not todo:
        return paths
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("clang") or ""]
    if not shutil.which(compiler[0]):
        raise CompilerMissing(
            "native helpers have to be built and there is no C compiler",
            "install gcc and Python's headers on the builder, or pass --no-native",
        )
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _driver_stub(folder, compiler)
        for helper, path in todo:
            source = folder / f"{helper.name}.c"
            source.write_text(helper.text)
            out = folder / path.name
            # upstream's flags (triton/runtime/build.py) and what keeps the bytes from depending on this machine: no
            # symbol table, no build id, and a source named without its directory, for __FILE__
            command = [*compiler, source.name, "-O3", "-s", "-Wl,--build-id=none", "-shared", "-fPIC", "-Wno-psabi"]
            command += ["-o", out.name]
            command += [f"-l:{library}" for library in helper.libraries]
            command += [f"-L{scratch}", *(f"-I{path}" for path in (*helper.include_dirs, headers))]
            _run(command, folder)
            _make_directory(path.parent)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            shutil.copyfile(out, partial)
            os.replace(partial, path)
    return paths


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise TcacheError(f"{path}: cannot keep native helpers: {reason}", "use a writable --cache-dir") from error


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        hint = "install Python's headers (python3-dev) on the builder" if "Python.h" in done.stderr else None
        raise TcacheError(f"building a native helper failed: {lines[0].strip()}", hint)
