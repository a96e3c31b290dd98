"""A bundle as a wheel: ``pip install`` puts it where ``tcache.bundles`` entry points find it.

Source of the format: https://packaging.python.org/specifications/binary-distribution-format/ and PEP 425, 600.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
import time
import zipfile
from typing import TYPE_CHECKING

from tcache import __version__
from tcache._fs import new_file
from tcache.errors import BundleError, UsageError
from tcache.pack._elf import manylinux, needs
from tcache.pack.contents import Contents, Packed, source_date_epoch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GROUP", "write_wheel"]

GROUP = "tcache.bundles"
"""Entry point group: name of the bundle -> the package that holds it."""

_EARLIEST = 315532800  # 1980-01-01, the first time a zip archive can say
_NUMBER = r"(0|[1-9]\d*)"
_VERSION = re.compile(
    rf"{_NUMBER}(\.{_NUMBER})*((a|b|rc){_NUMBER})?(\.post{_NUMBER})?(\.dev{_NUMBER})?(\+[a-z0-9]+(\.[a-z0-9]+)*)?",
    re.ASCII,
)


def write_wheel(contents: Contents, target: Path, version: str | None = None, *, force: bool = False) -> Packed:
    """Write a bundle as a wheel.

    The distribution is ``tcache-bundle-<name>`` and the bundle is its package ``tcache_bundle_<name>``, so several
    install side by side.

    Args:
        contents: what is packed.
        target: directory for the wheel, or the wheel's own path, which must then end in the name its contents give.
        version: the distribution's version; None for one that follows from the contents.
        force: replace an existing file.

    Raises:
        UsageError: the name or version cannot be a wheel's, or ``target`` names another wheel.
        OutputError: the wheel exists or cannot be written; nothing is left behind.
    """
    wheel = _Wheel(contents, version)
    data = wheel.build()
    path = target / wheel.name
    if target.suffix == ".whl":
        path = target
        if target.name != wheel.name:
            raise UsageError(f"{target}: this wheel's name is {wheel.name}", "give its directory with --output")
    new_file(path, data, force=force)
    return contents.packed(path, "wheel", contents.files)


class _Wheel:
    """Builds one wheel; each member is added together with its row in RECORD."""

    def __init__(self, contents: Contents, version: str | None) -> None:
        stem = re.sub(r"[^a-z0-9]+", "_", contents.name.lower()).strip("_")
        if not stem:
            raise UsageError(f"{contents.name!r} cannot be the name of a wheel", "pass --name with letters or digits")
        self._contents = contents
        self._package = f"tcache_bundle_{stem}"
        self._version = version or _version_of(contents)
        if not _VERSION.fullmatch(self._version):
            raise UsageError(f"--version {self._version!r} is no normalized version", "such as 1.2.0, see PEP 440")
        self._tag = _tag(contents)
        self._info = f"{self._package}-{self._version}.dist-info"
        self._records: list[str] = []
        moment = time.gmtime(max(source_date_epoch(), _EARLIEST))
        self._when = moment[:6]
        self._buffer = io.BytesIO()
        self._zip = zipfile.ZipFile(self._buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6)

    @property
    def name(self) -> str:
        return f"{self._package}-{self._version}-{self._tag}.whl"

    def build(self) -> bytes:
        with self._zip:
            self._add(f"{self._package}/__init__.py", self._module())
            for member in self._contents.files:
                self._add(f"{self._package}/{member.path}", member.data)
            self._add(f"{self._info}/METADATA", self._metadata())
            self._add(f"{self._info}/WHEEL", self._wheel())
            self._add(f"{self._info}/entry_points.txt", f"[{GROUP}]\n{self._package} = {self._package}\n")
            self._add_record()
        return self._buffer.getvalue()

    def _add(self, path: str, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else content
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._records.append(f"{path},sha256={digest},{len(data)}\n")
        self._write(path, data)

    def _add_record(self) -> None:
        path = f"{self._info}/RECORD"
        self._write(path, "".join([*self._records, f"{path},,\n"]).encode())

    def _write(self, path: str, data: bytes) -> None:
        info = zipfile.ZipInfo(path, self._when)
        info.create_system = 3
        info.external_attr = 0o100644 << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        self._zip.writestr(info, data)

    def _module(self) -> str:
        return f'"""Prebaked Triton kernels: the bundle {self._contents.name!r} of tcache lies in this directory."""\n'

    def _metadata(self) -> str:
        environment = self._contents.environment
        python = environment.python.removeprefix("cpython-3")
        gpus = ", ".join(gpu.name for gpu in self._contents.gpus)
        kernels = sorted({launch.kernel for launch in self._contents.resolved})
        count = len(self._contents.entries) + len(self._contents.captured)
        about = (
            f"{count} compiled kernels for {gpus}, for Triton {environment.triton} and {environment.python} on "
            f"{environment.platform}, packed by tcache {__version__}:"
        )
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {self._package.replace('_', '-')}",
            f"Version: {self._version}",
            f"Summary: Prebaked Triton kernels for {gpus}",
            f"Requires-Python: ==3.{python}.*",
            f"Requires-Dist: triton == {environment.triton}",
            f"Requires-Dist: triton-tcache >= {__version__}",
            "Description-Content-Type: text/markdown",
            "",
            about,
            "",
            *(f"- `{kernel}`" for kernel in kernels),
        ]
        return "\n".join(lines) + "\n"

    def _wheel(self) -> str:
        pure = "true" if self._tag == _PURE else "false"
        tags = f"Tag: {self._tag}\n"
        return f"Wheel-Version: 1.0\nGenerator: tcache {__version__}\nRoot-Is-Purelib: {pure}\n{tags}"


_PURE = "py3-none-any"


def _tag(contents: Contents) -> str:
    """Return the wheel's tag: what its native helpers need, if there are any."""
    if not contents.helpers.built:
        return _PURE
    machine = contents.environment.platform.rpartition("-")[2]
    try:
        platform = manylinux([needs(helper.data) for helper in contents.helpers.built], machine)
    except ValueError as error:
        raise BundleError(f"a native helper cannot be read: {error}", "delete it from the Triton cache") from error
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}{sys.abiflags}-{platform}"


def _version_of(contents: Contents) -> str:
    """Return a version that is another one whenever the contents are."""
    text = next(member.data for member in contents.files if member.path == "bundle.json")
    return f"0+g{hashlib.sha256(text).hexdigest()[:12]}"  # a letter: an all-digit part would be normalized
