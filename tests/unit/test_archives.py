"""Archives from anywhere: what leaves its root, lies about its size or is no file is refused, and nothing is left out
of the target directory."""

from __future__ import annotations

import io
import tarfile
import zipfile

import pytest

from tcache.archives import Limits, opened, unpack_tar, unpack_zip
from tcache.errors import BundleError

NAMES = ["../up", "a/../../up", "/etc/up", "a//b", "a\\b", "./../up", "..", "a/.."]


def tar_of(*members, data=b"text", mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return buffer.getvalue()


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def unpack(data, folder, limits=Limits(), **options):  # noqa: B008 - frozen
    inner = folder / "inner"
    inner.mkdir()
    unpack_tar(io.BytesIO(data), inner, limits, what="x.tar", **options)
    return sorted(path.relative_to(inner).as_posix() for path in inner.rglob("*"))


def refused(folder, message, call):
    """The refusal is a BundleError with one line, and nothing was put beside the target."""
    with pytest.raises(BundleError, match=message) as caught:
        call()
    assert "\n" not in caught.value.message
    assert {path.name for path in folder.iterdir()} <= {"inner", "x.zip"}


def test_files_and_directories_arrive(tmp_path):
    data = tar_of("a/b", special("c", tarfile.DIRTYPE), "./d", mode="w:gz")
    assert unpack(data, tmp_path) == ["a", "a/b", "c", "d"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_the_root(tmp_path, name):
    refused(tmp_path, "leaves the archive's root", lambda: unpack(tar_of(name), tmp_path))
    (tmp_path / "inner").rmdir()
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), "text")
    (tmp_path / "inner").mkdir()
    refused(tmp_path, "leaves the archive's root", lambda: unpack_zip(path, tmp_path / "inner"))


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "a"), (tarfile.CHRTYPE, ""), (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""), (tarfile.CONTTYPE + b"", ""),
    ],
)  # fmt: skip
def test_what_is_neither_file_nor_directory(tmp_path, kind, target):
    if kind == tarfile.CONTTYPE:  # tarfile reads a contiguous file as a regular one
        assert unpack(tar_of("a", special("b", kind)), tmp_path) == ["a", "b"]
        return
    data = tar_of("a", special("b", kind, target))
    refused(tmp_path, "neither a file nor a directory", lambda: unpack(data, tmp_path))


def test_a_link_and_a_member_below_it(tmp_path):
    """The classic: a link out of the root, then a file through it."""
    data = tar_of(special("out", tarfile.SYMTYPE, str(tmp_path)), "out/up")
    refused(tmp_path, "neither a file nor a directory", lambda: unpack(data, tmp_path))


def test_a_zip_with_a_link(tmp_path):
    path = tmp_path / "x.zip"
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    (tmp_path / "inner").mkdir()
    refused(tmp_path, "neither a file nor a directory", lambda: unpack_zip(path, tmp_path / "inner"))


def test_a_name_that_stands_twice(tmp_path):
    refused(tmp_path, "'a' stands twice", lambda: unpack(tar_of("a", "a"), tmp_path))


def test_a_file_where_a_directory_is(tmp_path):
    refused(tmp_path, "is both file and directory", lambda: unpack(tar_of("a", "a/b"), tmp_path))


def test_limits(tmp_path):
    refused(tmp_path, "exceeds the limit", lambda: unpack(tar_of("a", data=b"x" * 100), tmp_path, Limits(bytes=99)))
    (tmp_path / "inner" / "a").unlink()
    (tmp_path / "inner").rmdir()
    refused(tmp_path, "more than 2 members", lambda: unpack(tar_of("a", "b", "c"), tmp_path, Limits(files=2)))


def test_a_zip_bomb_stops_at_the_limit(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"\0" * 50_000_000)
    (tmp_path / "inner").mkdir()
    limits = Limits(bytes=1_000_000)
    refused(tmp_path, "exceeds the limit", lambda: unpack_zip(path, tmp_path / "inner", limits))
    assert (tmp_path / "inner" / "a").stat().st_size <= 1_000_000


def test_sizes_that_lie(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"x" * 1000)
    data = path.read_bytes()
    small = (1000).to_bytes(4, "little")
    (tmp_path / "inner").mkdir()
    for lie in (10, 2000):
        path.write_bytes(data.replace(small, lie.to_bytes(4, "little")))
        refused(tmp_path, "damaged archive|bytes", lambda: unpack_zip(path, tmp_path / "inner"))
        (tmp_path / "inner" / "a").unlink(missing_ok=True)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_truncated_and_flipped(tmp_path, mode):
    whole = tar_of(*(f"member{number}" for number in range(20)), data=bytes(range(256)) * 10, mode=mode)
    for number, cut in enumerate(range(10, len(whole) - 1024 * 11 if mode == "w" else len(whole) - 1, 997)):
        folder = tmp_path / str(number)
        folder.mkdir()
        refused(folder, "damaged archive|not the", lambda cut=cut, folder=folder: unpack(whole[:cut], folder))


def test_only_the_prefix_is_judged(tmp_path):
    """A base image's other files may be links and devices."""
    data = tar_of(special("dev/null", tarfile.CHRTYPE), special("bin", tarfile.SYMTYPE, "usr/bin"), "opt/b/x", "optic")
    assert unpack(data, tmp_path, prefix="opt/b") == ["opt", "opt/b", "opt/b/x"]


def test_what_is_no_archive_is_given_as_it_is(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with opened(path) as found:
            assert found == path


def test_a_zip_that_is_no_wheel(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "text")
    with pytest.raises(BundleError, match="holds 0 bundles"), opened(path):
        pass
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p/bundle.json", "{}")
        archive.writestr("p-1.dist-info/RECORD", "p/bundle.json,sha256=AAAA,2\n")
    with pytest.raises(BundleError, match=r"bundle.json is not what RECORD says"), opened(path):
        pass
