"""Strip debug sections from a cubin: they carry the builder's paths and times, and more than half of the bytes.

Source of the layout: System V ABI, chapter 4 (ELF-64 object files). Section numbers stay as they are, so symbols and
section links keep their meaning; a stripped section remains in the table with size 0.
"""

from __future__ import annotations

import struct

from tcache._binary import cubin_problem

__all__ = ["cubin_problem", "strip_debug", "with_name"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_NULL, _NOBITS = 0, 8
_DEBUG = (".debug_", ".nv_debug_", ".rela.debug_", ".rela.nv_debug_", ".rel.debug_", ".rel.nv_debug_")


def strip_debug(data: bytes) -> bytes:
    """Return a cubin without its debug sections, or ``data`` itself when it is no ELF-64 file or has none."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < _HEADER.size:
        return data
    fields = list(_HEADER.unpack_from(data))
    table, count, names_at = fields[6], fields[12], fields[13]
    if table + count * _SECTION.size > len(data) or names_at >= count:
        return data
    sections = [list(_SECTION.unpack_from(data, table + number * _SECTION.size)) for number in range(count)]
    strings = data[sections[names_at][4] : sections[names_at][4] + sections[names_at][5]]
    debug = {number for number, row in enumerate(sections) if _name(strings, row[0]).startswith(_DEBUG)}
    if not debug:
        return data
    out = bytearray(data[: _HEADER.size])
    moved: dict[int, int] = {}
    for number in sorted(range(count), key=lambda number: (sections[number][4], number)):
        row = sections[number]
        kind, offset, size, align = row[1], row[4], row[5], max(1, row[8])
        if kind == _NULL:
            continue
        out += b"\0" * (-len(out) % align)
        row[4] = len(out)
        if number in debug:
            row[5] = 0
        elif kind != _NOBITS and size:
            moved[offset] = len(out)
            out += data[offset : offset + size]
    out += b"\0" * (-len(out) % 8)
    fields[6] = len(out)
    out += b"".join(_SECTION.pack(*row) for row in sections)
    programs_were, fields[5] = fields[5], len(out) if fields[10] else 0
    for number in range(fields[10]):
        program = list(_PROGRAM.unpack_from(data, programs_were + number * _PROGRAM.size))
        if program[2] == programs_were:  # the segments that describe and load this table itself
            program[2] = fields[5]
        elif program[2] in moved:
            program[2] = moved[program[2]]
        elif program[5]:
            return data  # a segment that starts inside a section: leave such a file alone
        out += _PROGRAM.pack(*program)
    out[: _HEADER.size] = _HEADER.pack(*fields)
    return bytes(out)


def with_name(data: bytes, name: str) -> bytes:
    """Return a cubin whose table of section names ends with one more string, which nothing refers to.

    So a binary says which entry it is of, wherever it turns up, and two entries that compiled to the same machine code
    are two files: package checkers take equal files for a mistake. The table moves to the end of the file; ``data``
    itself is returned when it is no ELF-64 file.
    """
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < _HEADER.size:
        return data
    fields = _HEADER.unpack_from(data)
    at = fields[6] + fields[13] * _SECTION.size
    if fields[13] >= fields[12] or at + _SECTION.size > len(data):
        return data
    row = list(_SECTION.unpack_from(data, at))
    strings = data[row[4] : row[4] + row[5]] + name.encode("ascii") + b"\0"
    row[4], row[5] = len(data), len(strings)
    return data[:at] + _SECTION.pack(*row) + data[at + _SECTION.size :] + strings


def _name(strings: bytes, at: int) -> str:
    end = strings.find(b"\0", at)
    return strings[at : end if end >= 0 else len(strings)].decode("ascii", "replace")
