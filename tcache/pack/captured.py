"""Captured entries as members: those of kernels that others compile and launch, see :mod:`tcache.capture`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tcache._binary import entry_problem
from tcache._fs import sha256_bytes
from tcache._triton import release
from tcache._triton.distribution import distribution
from tcache.capture import captured_folder
from tcache.errors import BundleError
from tcache.pack.members import Member, relocatable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.keys.gpu import GPU
    from tcache.manifest import LoadedManifest
    from tcache.manifest.launches import RecordedLaunch

__all__ = ["CapturedEntry", "captured_entries"]


@dataclass(frozen=True)
class CapturedEntry:
    """An entry that was captured while a program ran.

    Attributes:
        entry: its name.
        gpus: the GPUs it is packed for.
        where: ``file:line:column`` in the recording.
        facts: what its name depends on, as ``index.json`` says it.
        contents: its files, name -> bytes.
        arguments: the kernel's parameters in the order of its signature.
    """

    entry: str
    gpus: tuple[GPU, ...]
    where: str
    facts: dict[str, Any]
    contents: dict[str, bytes]
    arguments: tuple[str, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(json.loads(next(data for name, data in self.contents.items() if name.endswith(".json"))))

    def members(self) -> list[Member]:
        """Return its files, made relocatable."""
        return [
            Member(f"entries/{self.entry}/{name}", relocatable(f"{self.where}: {name}", self.entry, name, data))
            for name, data in sorted(self.contents.items())
        ]

    def kernel(self) -> Any:
        """Return what a launcher is made from."""
        names = list(self.facts["signature"])
        constants = {(names.index(name),): value for name, value in self.facts["constants"].items() if name in names}
        signature = {name: self.facts["signature"][name] for name in self.arguments}
        metadata = self.metadata
        metadata["target"] = SimpleNamespace(**metadata["target"])
        source = SimpleNamespace(fn=SimpleNamespace(arg_names=names), constants=constants, signature=signature)
        return SimpleNamespace(src=source, metadata=SimpleNamespace(**metadata))


def captured_entries(manifests: list[LoadedManifest], gpus: list[list[GPU]]) -> list[CapturedEntry]:
    """Return the captured entries of all recordings that are for these GPUs' targets, sorted by name.

    Args:
        manifests: the manifests that name the recordings.
        gpus: for each manifest its GPUs.

    Raises:
        BundleError: an entry was captured under another Triton, is missing beside its recording, or is damaged.
    """
    found: dict[str, CapturedEntry] = {}
    for manifest, chosen in zip(manifests, gpus, strict=True):
        for part in manifest.everything():
            for recording in part.recordings.values():
                for where, launch in recording.launches:
                    entry = _entry(where, launch, captured_folder(recording.path), chosen)
                    if entry is not None:
                        found.setdefault(entry.entry, entry)
    return [found[name] for name in sorted(found)]


def _entry(where: str, launch: RecordedLaunch, folder: Path, gpus: Iterable[GPU]) -> CapturedEntry | None:
    captured = launch.captured
    if captured is None:
        return None
    mine = tuple(gpu for gpu in gpus if str(gpu.target) == captured.facts.target)
    if not mine:
        return None
    here = distribution().digest
    if launch.triton != release or (captured.build and here and captured.build != here):
        raise BundleError(
            f"{where}: {launch.kernel} was captured under Triton {launch.triton}, of another build than the {release} "
            "here: no service could use both",
            "pack with the Python and the Triton of the recorded service",
        )
    contents = {}
    for name, row in captured.files.items():
        path = folder / captured.entry / name
        try:
            whole = path.stat().st_size == row.size and path.is_file()  # no pipe, and nothing larger than it should be
            contents[name] = path.read_bytes() if whole else b""
        except OSError as error:
            raise BundleError(
                f"{where}: captured entry {path}: {error.strerror}",
                f"keep {folder.name} beside its recording, or record again",
            ) from error
        if len(contents[name]) != row.size or sha256_bytes(contents[name]) != row.sha256:
            raise BundleError(f"{path}: is not what was captured: its digest differs", "record again")
    problem = entry_problem(captured.entry, contents)
    if problem is not None:
        raise BundleError(f"{folder / captured.entry}: {problem}", "record again")
    facts = {**captured.facts.model_dump(), "direct": False, "captured": True}
    return CapturedEntry(captured.entry, mine, where, facts, contents, tuple(captured.arguments))
