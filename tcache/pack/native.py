"""A plain ``TRITON_CACHE_DIR`` for a mount path: for services that install nothing, where stock Triton must hit."""

from __future__ import annotations

import json
import posixpath
from itertools import groupby
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tcache._triton.records import autotune_record
from tcache.autotuner import Autotuner
from tcache.errors import UsageError
from tcache.keys.config import config_key
from tcache.keys.shape import ShapeKey
from tcache.pack.contents import Contents, Packed
from tcache.pack.directory import write_tree
from tcache.pack.members import Member
from tcache.replay import machine

if TYPE_CHECKING:
    from pathlib import Path

    from tcache.resolve import Resolved

__all__ = ["DRIVER_DIRS", "native_members", "write_native"]

DRIVER_DIRS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
)
"""Where ``ldconfig`` finds ``libcuda.so.1`` in containers and on hosts: Triton 3.8 and later name helpers after it."""


def write_native(
    contents: Contents, target: Path, mount_path: str, driver_dirs: tuple[str, ...] = (), *, force: bool = False
) -> Packed:
    """Write a Triton cache directory that works when it lies at ``mount_path``.

    Args:
        contents: what is packed.
        target: the directory; it must not exist unless ``force``.
        mount_path: absolute path at which the service will see it.
        driver_dirs: directories of ``libcuda.so.1`` in the service; empty for :data:`DRIVER_DIRS`.
        force: replace an existing directory.

    Raises:
        UsageError: ``mount_path`` is not absolute.
        OutputError: ``target`` exists or cannot be written; nothing is left behind.
    """
    members, notes = native_members(contents, mount_path, driver_dirs)
    write_tree(members, target, force=force)
    return contents.packed(target, "native", members, notes)


def native_members(
    contents: Contents, mount_path: str, driver_dirs: tuple[str, ...] = ()
) -> tuple[list[Member], tuple[str, ...]]:
    """Return the files of a Triton cache for ``mount_path``, sorted, and what their reader should know.

    Every entry gets the group file Triton looks for first, with the absolute paths it insists on, listing only files
    that are there (Triton 3.9 takes a group with a missing file for a miss).
    """
    mount = PurePosixPath(mount_path)
    if not mount.is_absolute() or posixpath.normpath(mount_path) != str(mount):
        raise UsageError(f"--mount-path {mount_path!r}: expected an absolute path", "such as /opt/triton/cache")
    members = []
    entries = [member for member in contents.files if member.path.startswith("entries/")]
    for key, files in groupby(entries, lambda member: member.path.split("/")[1]):
        own = [Member(member.path.removeprefix("entries/"), member.data) for member in files]
        group = {PurePosixPath(member.path).name: str(mount / member.path) for member in own}
        name = next(file for file in group if file.endswith(".json"))
        text = json.dumps({"child_paths": group}, sort_keys=True)
        members += [*own, Member(f"{key}/__grp__{name}", text.encode())]
    names_of = contents.helpers.lookup_names(tuple(driver_dirs) or DRIVER_DIRS)
    for helper in contents.helpers.built:
        members += [Member(f"{name}/{helper.file}", helper.data) for name in names_of.get(helper.source.digest, [])]
    records, notes = _records(contents)
    if not driver_dirs and any(len(names) > _PLATFORMS for names in names_of.values()):
        notes = (_DRIVER_NOTE, *notes)
    return sorted([*members, *records], key=lambda member: member.path), notes


_PLATFORMS = 2  # with and without the `file` program
_DRIVER_NOTE = (
    "this Triton names native helpers after the folders of Triton and of libcuda.so.1: install it at the same path in "
    "the service, and set TRITON_LIBCUDA_PATH there to the folder given with --libcuda-dir"
)


def _records(contents: Contents) -> tuple[list[Member], tuple[str, ...]]:
    """Return Triton's own records of the best configs of kernels that stock ``triton.autotune`` decorates."""
    found: dict[str, Member] = {}
    notes = set()
    unasked = 0
    for gpu, launches in groupby(contents.resolved, lambda launch: launch.gpu):
        with machine(gpu):
            for launch in launches:
                record = _record(launch, contents)
                if isinstance(record, str):
                    notes.add(record)
                elif record is not None:
                    member, asked_for = record
                    taken = found.setdefault(member.path, member)
                    unasked += not asked_for
                    if (
                        json.loads(taken.data)["configs_timings"][0][0]
                        != json.loads(member.data)["configs_timings"][0][0]
                    ):
                        notes.add(
                            f"{launch.kernel} [{launch.shape}]: {gpu.name} and another GPU of target {gpu.target} have "
                            "different winners, and Triton's record knows no GPU name: the first one's is written"
                        )
    if unasked:
        notes.add("some autotuners do not say cache_results=True: set TRITON_CACHE_AUTOTUNING=1 in the service")
    return list(found.values()), tuple(sorted(notes))


def _record(launch: Resolved, contents: Contents) -> tuple[Member, bool] | str | None:
    if launch.tuning is None or launch.shape is None:
        return None
    autotuner, args, kwargs = launch.tuning
    if isinstance(autotuner, Autotuner):
        return f"{launch.kernel} is tcache.autotune's: a service without tcache cannot import it"
    if launch.tuned is None or launch.config is None:
        return f"{launch.kernel} [{launch.shape}] is untuned: the service will tune it"
    entry = contents.records[launch.gpu.slug, launch.tuned.id].entries[ShapeKey.parse(launch.shape)]
    timing = entry.timings[launch.config]
    median = timing.median or 0.0
    times = (median, timing.p20 or median, timing.p80 or median)
    config = next(one for one in autotuner.configs if config_key(one) == launch.config)
    record = autotune_record(autotuner, args, kwargs, config, times)
    if isinstance(record, str):
        return f"{launch.kernel} [{launch.shape}] has no autotune record: {record}"
    return Member(f"{record.entry}/{record.file}", record.text.encode()), record.asked_for
