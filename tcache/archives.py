"""A bundle in whatever form it comes, as a directory: wheels and images are unpacked safely to a temporary place."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tcache._fs import sha256_file
from tcache.errors import BundleError
from tcache.layout import BUNDLE_LABEL, Image, Layer, is_layout, read_layout
from tcache.unpacking import LIMITS, Limits, changed, inside, unpack_tar, unpack_zip

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["opened", "opened_image"]

_MARK = "bundle.json"


@contextlib.contextmanager
def opened(path: Path, limits: Limits = LIMITS) -> Iterator[Path]:
    """Give a bundle's directory inside the block.

    Args:
        path: a bundle directory (given as it is), a wheel, an image layout, or a tar archive of a layout or a bundle.
        limits: what an archive may unpack to.

    Raises:
        BundleError: it is none of these, is damaged, or an archive's member is not what a bundle may have.
    """
    with contextlib.ExitStack() as stack:
        try:
            found = _bundle(path, stack, limits)
        except OSError as error:
            raise BundleError(f"{path}: cannot be unpacked: {error.strerror or error}", _SPACE) from error
        try:
            yield found
        except BundleError as error:
            if found == path:
                raise
            raise _renamed(error, found, path) from error


def _renamed(error: BundleError, folder: Path, what: str | Path) -> BundleError:
    """Return an error that names the archive, not the temporary directory it was unpacked to."""
    return BundleError(error.message.replace(str(folder), str(what)), error.hint)


_SPACE = "free some space where TMPDIR is, or set it to another place"


def _bundle(path: Path, stack: contextlib.ExitStack, limits: Limits) -> Path:
    if path.is_dir():
        return _from_layout(path, stack, limits, str(path)) if is_layout(path) else path
    kind = _kind(path)
    if kind is None:
        return path  # a file or nothing: opening it as a bundle says so
    folder = _scratch(stack)
    if kind == "zip":
        unpack_zip(path, folder, limits)
        return _from_wheel(path, folder)
    with path.open("rb") as file:
        unpack_tar(file, folder, limits, what=str(path))
    return _from_layout(folder, stack, limits, str(path)) if is_layout(folder) else folder


@contextlib.contextmanager
def opened_image(path: Path, limits: Limits = LIMITS) -> Iterator[Image]:
    """Give an image inside the block, every blob of it checked.

    Args:
        path: an image layout, or a tar archive of one.
        limits: what an archive may unpack to.

    Raises:
        BundleError: it is neither, or is damaged.
    """
    with contextlib.ExitStack() as stack:
        root = path
        if not path.is_dir() and _kind(path) == "tar":
            root = _scratch(stack)
            try:
                with path.open("rb") as file:
                    unpack_tar(file, root, limits, what=str(path))
            except OSError as error:
                raise BundleError(f"{path}: cannot be unpacked: {error.strerror or error}", _SPACE) from error
        image = _named(root, str(path))
        yield image


def _scratch(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tcache-")))


def _kind(path: Path) -> str | None:
    try:
        if not path.is_file():  # a pipe would block
            return None
        with path.open("rb") as file:
            head = file.read(512)
    except OSError:
        return None
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "zip"
    return "tar" if head[:2] == b"\x1f\x8b" or head[257:262] == b"ustar" else None


def _from_wheel(path: Path, folder: Path) -> Path:
    found = [mark.parent for mark in sorted(folder.glob(f"*/{_MARK}"))]
    if len(found) != 1:
        raise BundleError(f"{path}: holds {len(found)} bundles, expected one", "give a wheel that `tcache pack` wrote")
    _check_record(path, folder)
    return found[0]


def _check_record(path: Path, folder: Path) -> None:
    """Compare a wheel's files with its RECORD: what pip installs is what was packed."""
    records = list(folder.glob("*.dist-info/RECORD"))
    if len(records) != 1:
        raise BundleError(f"{path}: no wheel: {len(records)} RECORD files", "pack it again")
    try:
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(records[0].read_text("utf-8"))) if row}
    except (UnicodeDecodeError, csv.Error) as error:
        raise BundleError(f"{path}: RECORD is corrupt: {error}", "pack it again") from error
    own = records[0].relative_to(folder).as_posix()
    present = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    for name in sorted({*rows, *present} - {own}):
        if name not in present or name not in rows:
            where = "is in RECORD and not in the wheel" if name not in present else "is not in RECORD"
            raise BundleError(f"{path}: {name} {where}", "pack it again")
        digest = base64.urlsafe_b64encode(bytes.fromhex(sha256_file(present[name]))).rstrip(b"=").decode()
        if rows[name] != [f"sha256={digest}", str(present[name].stat().st_size)]:
            raise BundleError(f"{path}: {name} is not what RECORD says", "pack it again")


def _from_layout(root: Path, stack: contextlib.ExitStack, limits: Limits, what: str) -> Path:
    image = _named(root, what)
    place = image.labels.get(BUNDLE_LABEL)
    if place is None:
        raise BundleError(f"{what}: the image has no label {BUNDLE_LABEL}", "give an image that `tcache pack` wrote")
    prefix = inside(place.strip("/"), what)
    folder = _scratch(stack)
    for layer in reversed(image.layers):
        if _unpack_layer(layer, folder, prefix, limits, what):
            return folder / prefix
    raise BundleError(f"{what}: no layer has a bundle at /{prefix}", "pack it again")


def _named(root: Path, what: str) -> Image:
    try:
        return read_layout(root)
    except BundleError as error:
        raise _renamed(error, root, what) from error


def _unpack_layer(layer: Layer, folder: Path, prefix: str, limits: Limits, what: str) -> bool:
    """Unpack what a layer has below ``prefix``; a base's other files are looked over and left alone."""
    with tempfile.TemporaryFile() as file:
        size = 0
        for block in layer.blocks():
            size += len(block)
            if size > limits.bytes:
                raise BundleError(f"{what}: a layer unpacks to more than {limits.bytes} bytes")
            file.write(block)
        file.seek(0)
        unpack_tar(file, folder, limits, what=what, prefix=prefix)
        if (folder / prefix / _MARK).is_file():
            return True
        file.seek(0)
        other = changed(file, prefix)
        if other is not None:
            raise BundleError(f"{what}: a layer above the bundle's changes /{other}", "pack it on top of that image")
    return False
