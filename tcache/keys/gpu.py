"""GPU and target identities, and the catalogue of GPUs known by name."""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import Any

from tcache.errors import UnknownGPU, UsageError

__all__ = ["GPU", "Hardware", "Target", "catalogue", "find_gpu"]


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

    @classmethod
    def parse(cls, row: dict[str, Any]) -> GPU:
        """Return the GPU that a store or a bundle describes.

        Args:
            row: the attributes by name; ``max_shared_mem`` may be left out.

        Raises:
            KeyError: an attribute is missing.
            TypeError, ValueError: an attribute is of another type, or there is no such compile target.
        """
        names = ("name", "backend", "arch", "warp_size", "multiprocessors")
        found = cls(**{name: row[name] for name in names}, max_shared_mem=row.get("max_shared_mem", 0))
        for name, kind in (("name", str), ("multiprocessors", int), ("max_shared_mem", int)):
            value = getattr(found, name)
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise TypeError(f"gpu {name} is {value!r}")
        try:
            known = Target.parse(str(found.target)) == found.target
        except UsageError:
            known = False
        if not known:
            raise ValueError(f"gpu target is {found.backend!r}, {found.arch!r}, {found.warp_size!r}")
        return found

    @property
    def target(self) -> Target:
        return Target(self.backend, self.arch, self.warp_size)

    @property
    def capability(self) -> tuple[int, int]:
        """What ``torch.cuda.get_device_capability`` answers: (9, 0) for cuda:90, (9, 4) for gfx942."""
        if isinstance(self.arch, int):
            return divmod(self.arch, 10)
        return int(self.arch[3:-2], 16), int(self.arch[-2], 16)

    @property
    def torch_arch(self) -> str:
        """The target as ``torch.cuda.get_arch_list`` spells it: ``sm_90``, ``gfx942``."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def hardware(self) -> Hardware:
        """What else the catalogue knows; every field is None for a GPU outside it."""
        return _hardware().get(self.name, Hardware())

    @property
    def slug(self) -> str:
        """The store's directory name: ``nvidia-h200``."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "gpu"

    def identity(self) -> dict[str, Any]:
        """The fields that identify the GPU in a store file's head."""
        named = asdict(self)
        del named["max_shared_mem"]
        return named

    def properties(self) -> dict[str, int]:
        """What ``driver.utils.get_device_properties`` would answer, in Triton's names and units; clocks in kHz."""
        facts = self.hardware
        known = {
            "max_shared_mem": self.max_shared_mem,
            "multiprocessor_count": self.multiprocessors,
            "warpSize": self.warp_size,
            "max_num_regs": 65536 if self.backend == "cuda" else None,  # of every architecture since Maxwell
            "mem_clock_rate": facts.memory_clock and facts.memory_clock * 1000,
            "mem_bus_width": facts.bus_width,
            "sm_clock_rate": facts.clock and facts.clock * 1000,
        }
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class Hardware:
    """Facts of a GPU model that are no part of its identity; None where no source states them.

    Attributes:
        memory: bytes that the driver reports, else the nominal size.
        bandwidth: peak memory bandwidth in GB/s.
        l2_cache: L2 cache in bytes, as the driver reports it (on AMD: of one XCD).
        bus_width: memory bus in bits.
        memory_clock, clock: in MHz, of the memory and the highest of the multiprocessors.
        threads_per_multiprocessor: most threads resident on one multiprocessor.
        sources: documents that state these and the identity's figures.
    """

    memory: int | None = None
    bandwidth: float | None = None
    l2_cache: int | None = None
    bus_width: int | None = None
    memory_clock: int | None = None
    clock: int | None = None
    threads_per_multiprocessor: int | None = None
    sources: tuple[str, ...] = ()


@functools.cache
def _rows() -> list[dict[str, Any]]:
    data = json.loads(resources.files("tcache.keys").joinpath("gpus.json").read_text("utf-8"))
    return [{**row, "sources": tuple(data["sources"][key] for key in row["sources"])} for row in data["gpus"]]


@functools.cache
def catalogue() -> dict[str, GPU]:
    """Return the GPUs known by name, from ``gpus.json`` (sources are cited there)."""
    names = [field.name for field in fields(GPU)]
    return {row["name"]: GPU(**{name: row[name] for name in names}) for row in _rows()}


@functools.cache
def _hardware() -> dict[str, Hardware]:
    names = [field.name for field in fields(Hardware)]
    return {row["name"]: Hardware(**{name: row[name] for name in names if name in row}) for row in _rows()}


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
