"""What the bytes of an entry say about themselves: metadata and binary must agree, and with the entry's name."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

__all__ = ["cubin_problem", "entry_problem", "hsaco_problem", "needed_glibc"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<4xI16xQQ24x")
"""Of a section header: type, offset, size."""
_PROGRAM_SIZE = 56
_NULL, _NOBITS = 0, 8
_BINARIES = {"cuda": "cubin", "hip": "hsaco"}


def cubin_problem(data: bytes, arch: int) -> str | None:
    """Return what is wrong with a cubin for ``sm_<arch>``, None when nothing is.

    The architecture stands in the ELF header's flags: in the low byte up to ABI version 7, in the byte above it in
    version 8 (read off cubins of ptxas 12.8 to 13.2 for known architectures); other versions are not judged.
    """
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < _HEADER.size:
        return "it is no ELF-64 file"
    fields = _HEADER.unpack_from(data)
    table, count, flags = fields[6], fields[12], fields[7]
    if not count or table + count * _SECTION.size > len(data):
        return "its section table is cut off"
    length = len(data)
    for kind, offset, size in _SECTION.iter_unpack(data[table : table + count * _SECTION.size]):
        if offset + size > length and kind not in (_NULL, _NOBITS):
            return "a section is cut off"
    if fields[5] + fields[10] * _PROGRAM_SIZE > len(data):
        return "its program table is cut off"
    shift = {7: 0, 8: 8}.get(data[8])
    if shift is not None and (flags >> shift) & 0xFF != arch:
        return f"it is for sm_{(flags >> shift) & 0xFF}, not sm_{arch}"
    return None


_AMD = {0x3F: "gfx90a", 0x40: "gfx940", 0x41: "gfx1100", 0x4B: "gfx941", 0x4C: "gfx942", 0x4F: "gfx950",
        0x48: "gfx1200", 0x4E: "gfx1201"}  # fmt: skip


def hsaco_problem(data: bytes, arch: str) -> str | None:
    """Return what is wrong with an AMD code object for ``arch``, None when nothing is.

    Source of the numbers: EF_AMDGPU_MACH in https://llvm.org/docs/AMDGPUUsage.html; others are not judged.
    """
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < _HEADER.size:
        return "it is no ELF-64 file"
    fields = _HEADER.unpack_from(data)
    if max(fields[5] + fields[10] * _PROGRAM_SIZE, fields[6] + fields[12] * _SECTION.size) > len(data):
        return "its tables are cut off"
    found = _AMD.get(fields[7] & 0xFF)
    known = arch.partition(":")[0]
    if found is not None and known in _AMD.values() and found != known:
        return f"it is for {found}, not {known}"
    return None


def entry_problem(key: str, files: dict[str, bytes]) -> str | None:
    """Return what is wrong with an entry as a whole, None when nothing is.

    Triton itself takes an entry as it finds it: an empty metadata file crashes it, an edited architecture still hits.

    Args:
        key: the entry's name: Triton's hash, which its metadata repeats, in base 32.
        files: name -> bytes.
    """
    names = [name for name in files if name.endswith(".json")]
    if len(names) != 1:
        return f"{len(names)} metadata files, expected one"
    try:
        metadata = _loads(files[names[0]].decode())
        target = metadata["target"]
        backend, arch, own = target["backend"], target["arch"], bytes.fromhex(metadata["hash"])
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        return f"{names[0]}: corrupt: {type(error).__name__}"
    if not _is_name_of(key, own):
        return f"{names[0]}: metadata of another entry"
    stem = names[0].removesuffix(".json")
    if any(name.rpartition(".")[0] != stem for name in files):
        return f"files of other names than {stem}"
    return _shape_problem(metadata) or _binary_problem(files, stem, metadata["name"], backend, arch)


_loads = json.JSONDecoder().decode
"""As ``json.loads``, for text that is known to be UTF-8."""


def _is_name_of(key: str, own: bytes) -> bool:
    """Return whether ``key`` is ``own`` in base 32 without padding: by numbers, a tenth of what ``b32encode`` takes."""
    if len(own) != _HASH or len(key) != _NAME or not key.isascii():
        return False
    digits = key.encode().translate(_DIGITS)
    return b"!" not in digits and int(digits, 32) == int.from_bytes(own, "big") << (5 * _NAME - 8 * _HASH)


_HASH, _NAME = 32, 52
"""Bytes of a SHA-256, and its length in base 32."""
_DIGITS = bytearray(b"!" * 256)
for _digit, _letter in zip(b"0123456789abcdefghijklmnopqrstuv", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", strict=True):
    _DIGITS[_letter] = _digit
"""Base 32's letters -> the digits that ``int`` reads; all others -> ``!``."""


def _shape_problem(metadata: dict[str, Any]) -> str | None:
    for name, kind in (("name", str), ("shared", int), ("num_warps", int)):
        if type(metadata.get(name)) is not kind:
            return f"metadata: {name} is {metadata.get(name)!r}"
    if not 1 <= metadata["num_warps"] <= _MOST_WARPS or not 0 <= metadata["shared"] < 2**31:
        return f"metadata: {metadata['num_warps']} warps and {metadata['shared']} bytes of shared memory"
    return None


_MOST_WARPS = 32
"""1024 threads a block, CUDA's and HIP's limit, in warps of 32."""


def _binary_problem(files: dict[str, bytes], stem: str, name: str, backend: Any, arch: Any) -> str | None:
    kind = _BINARIES.get(backend) if isinstance(backend, str) else None
    if kind is None:
        return f"metadata: unknown backend {backend!r}"
    file = f"{stem}.{kind}"
    if file not in files:
        return f"no {file}"
    if type(arch) is not (int if kind == "cubin" else str):
        return f"metadata: arch is {arch!r}"
    known: Any = arch
    problem = cubin_problem(files[file], known) if kind == "cubin" else hsaco_problem(files[file], known)
    if problem is None and _symbol(kind, name) not in files[file]:
        problem = f"it has no kernel {name}"
    return f"{file}: {problem}" if problem else None


def _symbol(kind: str, name: str) -> bytes:
    """Return what stands in a binary's table of strings for a kernel: its section's name, its descriptor's symbol."""
    encoded = name.encode("utf-8", "surrogatepass")
    return b"\0.text." + encoded + b"\0" if kind == "cubin" else b"\0" + encoded + b".kd\0"


def needed_glibc(data: bytes) -> tuple[int, int]:
    """Return the newest glibc whose symbols a shared object names, ``(0, 0)`` for none."""
    return max(((int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)), default=(0, 0))
