"""GPU and target identities, and the catalogue of GPUs known by name."""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from tcache.errors import UnknownGPU, UsageError

__all__ = ["GPU", "Target", "catalogue", "find_gpu"]


@dataclass(frozen=True)
class Target:
    """What the compiler needs to know of a GPU: ``cuda:90:32``, ``hip:gfx942:64``."""

    backend: str
    arch: int | str
    warp_size: int

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}:{self.warp_size}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse ``backend:arch:warp_size``.

        Raises:
            UsageError: the text has another form.
        """
        match = re.fullmatch(r"(?:(cuda):([1-9]\d{1,2})|(hip):(gfx[0-9a-f]+)):(32|64)", text)
        if not match:
            raise UsageError(
                f"{text!r} is not a target: expected backend:arch:warp_size",
                "for example cuda:90:32 (NVIDIA, compute capability 9.0) or hip:gfx942:64 (AMD)",
            )
        if match[1]:
            return cls("cuda", int(match[2]), int(match[5]))
        return cls("hip", match[4], int(match[5]))


@dataclass(frozen=True)
class GPU:
    """A GPU model as tuning sees it.

    Attributes:
        name: as the driver reports it, such as ``NVIDIA H200``; winners are never shared between names unasked.
        backend, arch, warp_size: the compile target.
        multiprocessors: streaming multiprocessors (compute units on AMD).
        max_shared_mem: most shared memory one block may use, in bytes; 0 where unknown. Not part of the identity.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    multiprocessors: int
    max_shared_mem: int = 0

    @property
    def target(self) -> Target:
        return Target(self.backend, self.arch, self.warp_size)

    @property
    def slug(self) -> str:
        """The store's directory name: ``nvidia-h200``."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "gpu"

    def identity(self) -> dict[str, Any]:
        """The fields that identify the GPU in a store file's head."""
        fields = asdict(self)
        del fields["max_shared_mem"]
        return fields

    def properties(self) -> dict[str, int]:
        """What ``driver.utils.get_device_properties`` would answer, in Triton's names and units."""
        return {
            "max_shared_mem": self.max_shared_mem,
            "multiprocessor_count": self.multiprocessors,
            "warpSize": self.warp_size,
        }


@functools.cache
def catalogue() -> dict[str, GPU]:
    """Return the GPUs known by name, from ``gpus.json`` (sources are cited there)."""
    data = json.loads(resources.files("tcache.keys").joinpath("gpus.json").read_text("utf-8"))
    return {row["name"]: GPU(**row) for row in data["gpus"]}


def find_gpu(name: str, target: Target | None = None, known: dict[str, GPU] | None = None) -> GPU:
    """Return the GPU called ``name``.

    Args:
        name: the driver's name.
        target: compile target for a GPU that is not known, or to be checked against a known one.
        known: further GPUs, such as those a store has best configs for; the catalogue is always included.

    Raises:
        UnknownGPU: nothing known has that name and no target was given.
        UsageError: the GPU is known with another target.
    """
    gpus = {**(known or {}), **catalogue()}
    if name in gpus:
        found = gpus[name]
        if target is not None and target != found.target:
            raise UsageError(f"{name} has target {found.target}, not {target}", "leave out --target")
        return found
    if target is not None:
        return GPU(name, target.backend, target.arch, target.warp_size, 0)
    folded = {known_name.lower(): known_name for known_name in gpus}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.4)
    nearest = f"; the nearest known name is {folded[close[0]]!r}" if close else ""
    raise UnknownGPU(
        f"unknown GPU {name!r}{nearest}",
        "for a GPU outside the catalogue pass --target as well, for example --target cuda:90:32",
    )
