"""What would be packed, and why: the answer of ``tcache pack --dry-run``, which builds and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tcache.pack.members import best_configs, distinct, entry_members, index_text, missing_entries, store_members

if TYPE_CHECKING:
    from tcache.pack.captured import CapturedEntry
    from tcache.resolve import Resolved
    from tcache.store import Store

__all__ = ["Plan", "PlannedEntry", "plan"]


@dataclass(frozen=True)
class PlannedEntry:
    """One entry that would be packed.

    Attributes:
        entry: its name.
        kernel: the jit function as ``module:qualname``.
        gpus, shapes: for which GPUs and shape keys it is.
        config: config key, None without autotuner.
        specialization: what Triton's binder made of the arguments.
        launches: how many launches need it.
        where: ``file:line:column`` of the manifest cases that need it.
        files: name -> bytes as packed; empty when the entry is missing.
    """

    entry: str
    kernel: str
    gpus: tuple[str, ...]
    shapes: tuple[str, ...]
    config: str | None
    specialization: dict[str, Any]
    launches: int
    where: tuple[str, ...]
    files: dict[str, int]

    @property
    def present(self) -> bool:
        return bool(self.files)

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Plan:
    """What would be packed.

    Attributes:
        entries: sorted by kernel and entry.
        launches: how many launches there are.
        others: what else is packed, name -> bytes: best configs, captured entries and the index. Native helpers are
            built when packing.
    """

    entries: tuple[PlannedEntry, ...]
    launches: int
    others: dict[str, int]

    @property
    def missing(self) -> tuple[PlannedEntry, ...]:
        return tuple(entry for entry in self.entries if not entry.present)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries) + sum(self.others.values())


def plan(
    resolved: list[Resolved],
    stores: tuple[Store, ...],
    include_ir: tuple[str, ...] = (),
    captured: list[CapturedEntry] | None = None,
) -> Plan:
    """Return what would be packed for these launches.

    Args:
        resolved: the launches.
        stores: where their best configs are.
        include_ir: kinds of intermediate files to include.
        captured: captured entries to include.

    Raises:
        BundleError: an entry that is in the Triton cache is damaged.
    """
    absent = {launch.entry for launch in missing_entries(resolved)}
    present = [launch for launch in resolved if launch.entry not in absent]
    sizes: dict[str, dict[str, int]] = {}
    for member in entry_members(present, include_ir):
        path = PurePosixPath(member.path)
        sizes.setdefault(path.parts[1], {})[path.name] = len(member.data)
    users: dict[str, list[Resolved]] = {}
    for launch in resolved:
        users.setdefault(launch.entry, []).append(launch)
    rows = [
        PlannedEntry(
            entry=first.entry,
            kernel=first.kernel,
            gpus=_unique(launch.gpu.name for launch in users[first.entry]),
            shapes=_unique(launch.shape for launch in users[first.entry]),
            config=first.config,
            specialization=first.compilation.specialization(),
            launches=len(users[first.entry]),
            where=_unique(launch.where for launch in users[first.entry]),
            files=sizes.get(first.entry, {}),
        )
        for first in distinct(resolved)
    ]
    others = {member.path: len(member.data) for member in store_members(best_configs(resolved, stores))}
    others |= {member.path: len(member.data) for one in captured or [] for member in one.members()}
    others["index.json"] = len(index_text(resolved, {one.entry: one.facts for one in captured or []}))
    return Plan(tuple(sorted(rows, key=lambda row: (row.kernel, row.entry))), len(resolved), others)


def _unique(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value is not None))
