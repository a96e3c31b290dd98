"""Keep entries that somebody else compiles and launches, as torch.compile does with the kernels it generates.

Such a launch cannot be replayed: what generated its kernel is a program that only runs on a GPU. But the entry is there
once it ran, and its name depends on nothing but what was compiled. So recording copies it beside the recording, to
``<recording>.captured/<ENTRY>/``, and packing takes it from there. The cache directory it was in does not matter: torch
moves it, and answers come by name.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache._fs import sha256_bytes
from tcache._triton.distribution import distribution
from tcache.explain import specialization_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tcache._triton.probe import Compilation

__all__ = ["capture", "captured_folder"]

_NEEDED = (".json", ".cubin", ".hsaco")


def captured_folder(recording: Path) -> Path:
    """Return where a recording's captured entries are: beside ``serve.launches.json``, ``serve.launches.captured``."""
    return recording.with_name(f"{recording.name.removesuffix('.json')}.captured")


def capture(
    compilation: Compilation, group: dict[str, str], source: str | None, folder: Path, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy an entry and return what a recording says of it.

    Args:
        compilation: what was compiled.
        group: the entry's files as Triton lists them, name -> path.
        source: identity of the kernel's source, None where it has none.
        folder: where captured entries are kept. A copy stays while it is what was compiled, or what the recording
            says of it: binaries of one entry differ in the paths of their debug sections. A damaged one is replaced.
        known: entry -> ``files``, as the recording has them.

    Returns:
        ``entry`` (its name), ``build`` (of Triton, empty where it cannot be told), ``arguments`` (the kernel's
        parameters in the order of its signature), ``facts`` (see :func:`tcache.explain.facts_of`) and ``files``
        (name -> size and SHA-256).

    Raises:
        OSError: it cannot be copied.
        ValueError: the group is of no single entry.
    """
    paths = [Path(path) for name, path in group.items() if name.endswith(_NEEDED) and not name.startswith("__grp__")]
    places = {path.parent for path in paths}
    if len(places) != 1 or not any(path.suffix == ".json" for path in paths):
        raise ValueError(f"an entry of {len(places)} directories and {len(paths)} files")
    entry = places.pop().name
    place = folder / entry
    kept = _described(place)
    if kept is None or kept not in (_rows(paths), known.get(entry)):
        _copy(paths, place)
    return {
        "entry": entry,
        "build": distribution().digest,
        "arguments": [str(name) for name in compilation.source.signature],
        "facts": _facts(compilation, source),
        "files": _rows(place.iterdir()),
    }


def _rows(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(paths):
        data = path.read_bytes()
        found[path.name] = {"size": len(data), "sha256": sha256_bytes(data)}
    return found


def _described(place: Path) -> dict[str, dict[str, Any]] | None:
    """Return the files of an earlier copy, None where there is none that can be read."""
    try:
        return _rows(place.iterdir())
    except OSError:
        return None


def _copy(paths: list[Path], place: Path) -> None:
    """Copy files to a directory that appears with all of them, whoever else does the same."""
    place.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".capturing-", dir=place.parent))
    try:
        for path in paths:
            shutil.copyfile(path, scratch / path.name)
        scratch.chmod(0o755)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(scratch, place)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not place.is_dir():  # else another process was first
            raise


def _facts(compilation: Compilation, source: str | None) -> dict[str, Any]:
    function, target = compilation.source.fn, compilation.target
    return {
        "kernel": f"{function.__module__}:{function.__qualname__}",
        "target": f"{target.backend}:{target.arch}:{target.warp_size}",
        **specialization_of(compilation),
        "source": source or "",
        "line": int(function.starting_line_number),
        "text": function.cache_key,
        "given": [],
    }
