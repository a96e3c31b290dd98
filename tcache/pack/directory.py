"""A bundle as a directory, for ``COPY --from=builder``; and any tree of members, written all or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tcache._fs import new_directory
from tcache.pack.contents import Contents, Packed, source_date_epoch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.pack.members import Borrowed, Member

__all__ = ["write_directory", "write_tree"]


def write_directory(contents: Contents, target: Path, *, force: bool = False) -> Packed:
    """Write a bundle as a directory.

    Args:
        contents: what is packed.
        target: the bundle directory; it must not exist unless ``force``.
        force: replace an existing directory.

    Raises:
        OutputError: ``target`` exists or cannot be written; nothing is left behind.
    """
    write_tree(contents.files, target, force=force)
    return contents.packed(target, "dir", contents.files)


_MARKS = ("bundle.json", "oci-layout")
_KEY = re.compile(r"[A-Z2-7]{52}")


def _written(folder: Path) -> bool:
    """Return whether a directory is what a writer here makes: a bundle, an image layout, or a cache of nothing else."""
    if any((folder / mark).is_file() for mark in _MARKS):
        return True
    return all(_KEY.fullmatch(child.name) and child.is_dir() for child in folder.iterdir())


def write_tree(members: Iterable[Member | Borrowed], target: Path, *, force: bool = False) -> None:
    """Write members below a new directory, with modes and times that depend on nothing but ``SOURCE_DATE_EPOCH``.

    Raises:
        OutputError: ``target`` exists or cannot be written; nothing is left behind.
    """
    when = source_date_epoch()
    with new_directory(target, force=force, ours=_written) as folder:
        made = {folder}
        for member in members:
            path = folder / member.path
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            path.write_bytes(member.data)
            path.chmod(0o644)
            os.utime(path, (when, when))
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir():
                path.chmod(0o755)
                os.utime(path, (when, when))
        os.utime(folder, (when, when))
