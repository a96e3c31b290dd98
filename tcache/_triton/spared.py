"""What an unchanged Triton would compute again: the parts of its keys that depend on the installed release alone.

``triton_key`` hashes 415 MB of ``libtriton`` (350 to 420 ms) and the backend's hash runs ``ptxas --version`` (10 ms),
in every process that launches a kernel. Both are functions of the installed files. A bundle records them; where
:func:`tcache._triton.distribution.distribution` says that the files are those the bundle was packed with, Triton is
given the recorded values: the key only if the digests in it are those of installed files, the version only if there is
a ``ptxas`` among them.

Source: ``triton_key`` and ``get_cache_key`` in ``triton/runtime/cache.py``; ``CUDABackend.hash`` and
``get_ptxas_version`` in ``triton/backends/nvidia/compiler.py``; Triton 3.9 hands the key to its own worker processes in
the same way (``_initialize_preload_worker`` in ``triton/_compile_warmup_pool.py``).
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from triton import knobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["believable", "recorded", "spare"]

_KEY = "triton_key"
_PTXAS = "ptxas "
_lock = threading.Lock()
_versions: dict[int, str] = {}


def recorded(arches: Iterable[int | str]) -> dict[str, str]:
    """Return what this process's Triton computes for itself, whatever it was given.

    Args:
        arches: of the packed targets; those of NVIDIA are numbers.

    Returns:
        ``triton_key``, and ``ptxas N`` for each NVIDIA arch: what ``ptxas --version`` prints for it.
    """
    from triton.backends.nvidia import compiler
    from triton.runtime import cache

    key = getattr(cache.triton_key, "spared", cache.triton_key)
    version = getattr(compiler.get_ptxas_version, "spared", compiler.get_ptxas_version)
    found = {_KEY: str(key())}
    for arch in sorted({arch for arch in arches if isinstance(arch, int)}):
        found[f"{_PTXAS}{arch}"] = str(version(arch))
    return found


def believable(known: Mapping[str, str], version: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return those of the recorded values that can be of this Triton.

    ``triton_key`` is the release and, joined by hyphens, the SHA-256 of each source and of ``libtriton``: all of them
    stand in the distribution's record too. A wheel without a ``ptxas`` of its own says nothing of the one it finds.

    Args:
        known: what a bundle recorded.
        version: Triton's release.
        files: the installed files, name -> SHA-256, see :class:`tcache._triton.distribution.Distribution`.
    """
    found = {}
    for name, value in known.items():
        arch = name.removeprefix(_PTXAS)
        if name == _KEY:
            parts = value.removeprefix(version).split("-")
            needed = {digest for file, digest in files.items() if file.startswith(("triton/_C/libtriton", _CACHE))}
            if value.startswith(version) and needed <= set(parts) <= set(files.values()):
                found[name] = value
        elif arch != name and len(arch) < _LONGEST and arch.isascii() and arch.isdigit():
            tool = "ptxas-blackwell" if int(arch) >= _BLACKWELL else "ptxas"
            if f"triton/backends/nvidia/bin/{tool}" in files:
                found[name] = value
    return found


_CACHE = "triton/runtime/cache.py"
_BLACKWELL = 100
"""From this arch on Triton runs ``ptxas-blackwell``: ``get_ptxas`` in ``triton/backends/nvidia/compiler.py``."""
_LONGEST = 6


def spare(known: Mapping[str, str]) -> None:
    """Give Triton recorded values that are :func:`believable`; the caller knows that the installed files are the ones
    they were computed from.
    """
    from triton.backends.nvidia import compiler
    from triton.runtime import autotuner, cache

    with _lock:
        key = known.get(_KEY)
        if key is not None and not hasattr(cache.triton_key, "spared"):
            cache.triton_key = autotuner.triton_key = _constant(key, cache.triton_key)
        for name, text in known.items():
            if name.startswith(_PTXAS):
                _versions[int(name.removeprefix(_PTXAS))] = text
        if _versions and not hasattr(compiler.get_ptxas_version, "spared"):
            compiler.get_ptxas_version = _ptxas_version(compiler.get_ptxas_version)


def _constant(value: str, upstream: Any) -> Any:
    def triton_key() -> str:
        return value

    triton_key.spared = upstream  # type: ignore[attr-defined]
    triton_key.cache_clear = upstream.cache_clear  # type: ignore[attr-defined]
    return triton_key


def _ptxas_version(upstream: Any) -> Any:
    # the first answer stands, as upstream's: torch.compile names a ptxas of its own after it has asked
    @functools.lru_cache
    def get_ptxas_version(arch: int = 80) -> str:
        known = _versions.get(arch)
        return known if known is not None and not _another_ptxas() else str(upstream(arch))

    get_ptxas_version.spared = upstream  # type: ignore[attr-defined]
    return get_ptxas_version


def _another_ptxas() -> bool:
    """Return whether the process was told to use another ptxas than the release's own."""
    names = ("ptxas", "ptxas_blackwell", "mock_ptx_version")
    if any(vars(knobs.nvidia).get(name) is not None for name in names):
        return True
    variables = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_MOCK_PTX_VERSION")
    return any(os.environ.get(name) for name in variables)
