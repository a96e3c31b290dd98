"""What a shared object needs from the machine it is loaded on, read from its ELF file.

Source of the layout: System V ABI, chapter 4 and 5; GNU's version needs: LSB core, 10.7 (``Elfxx_Verneed``).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

__all__ = ["Needs", "manylinux", "needs"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERNEED = struct.Struct("<HHIII")
_VERNAUX = struct.Struct("<IHHII")
_SHT_DYNAMIC, _SHT_GNU_VERNEED = 6, 0x6FFFFFFE
_DT_NEEDED = 1


@dataclass(frozen=True)
class Needs:
    """What a shared object asks the dynamic linker for.

    Attributes:
        libraries: names of the libraries it is linked against.
        versions: symbol versions it needs, such as ``GLIBC_2.2.5``.
    """

    libraries: tuple[str, ...]
    versions: tuple[str, ...]


def needs(data: bytes) -> Needs:
    """Read what a shared object needs.

    Raises:
        ValueError: it is no little-endian ELF-64 file, or is cut off.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF-64 file")
    try:
        fields = _HEADER.unpack_from(data)
        table, count = fields[6], fields[12]
        sections = [_SECTION.unpack_from(data, table + number * _SECTION.size) for number in range(count)]
        libraries: list[str] = []
        versions: list[str] = []
        for row in sections:
            strings = sections[row[6]] if row[6] < count else None
            if strings is None:
                continue
            if row[1] == _SHT_DYNAMIC:
                for offset in range(row[4], row[4] + row[5], _DYNAMIC.size):
                    tag, value = _DYNAMIC.unpack_from(data, offset)
                    if tag == _DT_NEEDED:
                        libraries.append(_text(data, strings[4] + value))
            elif row[1] == _SHT_GNU_VERNEED:
                versions += _versions(data, row[4], row[7], strings[4])
    except (struct.error, IndexError) as error:
        raise ValueError("cut off") from error
    return Needs(tuple(sorted(set(libraries))), tuple(sorted(set(versions))))


def _versions(data: bytes, offset: int, count: int, strings: int) -> list[str]:
    found = []
    for _ in range(count):
        _, auxiliaries, _, first, following = _VERNEED.unpack_from(data, offset)
        at = offset + first
        for _ in range(auxiliaries):
            _, _, _, name, after = _VERNAUX.unpack_from(data, at)
            found.append(_text(data, strings + name))
            at += after
        offset += following
    return found


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("ascii", "replace")


_SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libutil|ld-linux[-\w]*)\.so\.\d+|libgcc_s\.so\.1")
"""Libraries that every manylinux platform has (PEP 600: the policies of auditwheel)."""

_DRIVERS = ("libcuda.so.1",)
"""Libraries that come with the GPU's driver and with nothing else; Triton's own wheel needs them in the same way."""

_OLDEST = (2, 17)
"""The oldest glibc that pip and today's images still speak of; an older need is met by it as well."""


def manylinux(found: list[Needs], machine: str) -> str:
    """Return the platform tag of a wheel with these shared objects: ``manylinux_2_17_x86_64``.

    ``linux_<machine>`` when one of them needs what not every Linux of some glibc has.
    """
    glibc = _OLDEST
    for one in found:
        for library in one.libraries:
            if not _SYSTEM.fullmatch(library) and library not in _DRIVERS:
                return f"linux_{machine}"
        for version in one.versions:
            match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
            if match:
                glibc = max(glibc, (int(match[1]), int(match[2])))
            elif not re.fullmatch(r"GCC_[\d.]+", version):
                return f"linux_{machine}"
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}"
