"""Native helpers as members: built without a driver, kept in the Triton cache for the next time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tcache._triton import native
from tcache._triton.cache import cache_directory
from tcache.errors import OutputError
from tcache.pack.members import Member, distinct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.resolve import Resolved

__all__ = ["Helper", "Helpers", "build_helpers"]


@dataclass(frozen=True)
class Helper:
    """A helper that was built.

    Attributes:
        source: what it was built from.
        data: the shared object.
    """

    source: native.HelperSource
    data: bytes

    @property
    def file(self) -> str:
        return f"{self.source.name}{native.suffix()}"

    @property
    def path(self) -> str:
        """Where it is in a bundle."""
        return f"native/h{self.source.digest[:16]}/{self.file}"  # a letter first: an importable path

    def row(self) -> dict[str, Any]:
        """Its row in ``bundle.json``."""
        keys = list(self.source.keys())
        return {"name": self.source.name, "source": self.source.digest, "keys": keys, "path": self.path}


@dataclass(frozen=True)
class Helpers:
    """The helpers of a bundle.

    Attributes:
        built: those packed.
        kernels: what needs them, as Triton's launchers take it.
        hip_library: ``libamdhip64.so`` as the AMD helpers name it, None where none is packed.
        notes: what is not packed, and why.
    """

    built: tuple[Helper, ...] = ()
    kernels: tuple[Any, ...] = ()
    hip_library: str | None = None
    notes: tuple[str, ...] = ()

    def members(self) -> list[Member]:
        return [Member(helper.path, helper.data) for helper in self.built]

    def lookup_names(self, driver_dirs: tuple[str, ...]) -> dict[str, list[str]]:
        """Return source digest -> entries in which stock Triton looks for the helper."""
        return native.lookup_names(self.kernels, driver_dirs, self.hip_library) if self.built else {}


NO_HIP = (
    "native helpers for hip are not packed: their source names libamdhip64.so and there is none on this machine; "
    "pass --hip-library with its path in the service, which else needs a C compiler and mode lookup"
)


def build_helpers(resolved: list[Resolved], hip_library: str | None, captured: Iterable[Any] = ()) -> Helpers:
    """Build the native helpers these launches need.

    Args:
        resolved: the launches; their entries are in the Triton cache.
        hip_library: path of ``libamdhip64.so`` in the service; None for the one Triton finds here.
        captured: further kernels that need them, as Triton's launchers take them.

    Raises:
        CompilerMissing: there is no C compiler.
        TcacheError: it failed.
    """
    chosen = distinct(resolved)
    kernels = (*(_kernel(launch) for launch in chosen), *captured)
    hip = any(kernel.metadata.target.backend == "hip" for kernel in kernels)
    library = (hip_library or native.find_hip_library()) if hip else None
    try:
        sources = native.helper_sources(kernels, library)
        paths = native.build(sources, Path(cache_directory(), "tcache-native"))
        built = tuple(Helper(source, path.read_bytes()) for source, path in zip(sources, paths, strict=True))
    except OSError as error:  # a full disk: where temporary files are made, or where the Triton cache is
        raise OutputError(
            f"native helpers cannot be built: {error.strerror or error}",
            "free some space where TMPDIR and the cache are",
        ) from error
    return Helpers(built, kernels, library, (NO_HIP,) if hip and library is None else ())


def _kernel(launch: Resolved) -> Any:
    """Return what a launcher is made from: it is in the entry's metadata, wherever the cache was moved."""
    name = f"{launch.compilation.name[:150]}.json"
    metadata = json.loads(Path(cache_directory(), launch.entry, name).read_bytes())
    metadata["target"] = SimpleNamespace(**metadata["target"])
    return SimpleNamespace(src=launch.compilation.source, metadata=SimpleNamespace(**metadata))
