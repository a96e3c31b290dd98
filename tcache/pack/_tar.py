"""Tar archives whose bytes depend on their members and ``SOURCE_DATE_EPOCH`` only."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tcache.pack.contents import source_date_epoch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tcache.pack.members import Borrowed, Member

__all__ = ["gzipped", "tar"]


def tar(members: Iterable[Member | Borrowed]) -> bytes:
    """Return a PAX archive: regular files and the directories above them, sorted, owned by root, mode 0644 and 0755.

    Names have no leading ``./``: MCV compares prefixes.
    """
    files = {member.path: member for member in members}
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents if str(parent) != "."}
    buffer = io.BytesIO()
    when = source_date_epoch()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted({*files, *folders}):
            info = tarfile.TarInfo(path)
            info.mtime = when
            if path in folders:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            else:
                data = files[path].data
                info.size, info.mode = len(data), 0o644
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def gzipped(data: bytes) -> bytes:
    """Return ``data`` compressed, without a name or a time. Compressors differ between machines; ``data`` does not."""
    return gzip.compress(data, compresslevel=6, mtime=0)
