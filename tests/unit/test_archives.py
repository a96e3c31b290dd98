"""Archives from anywhere: what leaves its root, lies about its size or is no file is refused, and nothing is left out
of the target directory."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import tarfile
import tracemalloc
import zipfile
from random import Random

import pytest

from tcache.archives import opened
from tcache.bundle import Bundle
from tcache.errors import BundleError
from tcache.unpacking import Limits, unpack_tar, unpack_zip

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


def a_wheel():
    record = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (("p/bundle.json", b"{}" * 40), ("p/entries/A/k.cubin", bytes(range(256)))):
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        archive.writestr("p-1.dist-info/RECORD", "".join([*record, "p-1.dist-info/RECORD,,\n"]))
    return buffer.getvalue()


def an_image(tmp_path, *above):
    layers = [tar_of("opt/b/bundle.json", "opt/b/entries/A/k.cubin", data=bytes(range(256))), *above]
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(data, kind):
        digest = hashlib.sha256(data).hexdigest()
        files[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    config = {
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]},
        "config": {"Labels": {"io.tcache.bundle": "/opt/b"}},
    }
    manifest = {
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(gzip.compress(one, mtime=0), "layer.v1.tar+gzip") for one in layers],
    }
    files["index.json"] = json.dumps({"manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["wheel", "image"])
def test_no_mutation_does_more_than_be_refused(tmp_path, kind):
    """Bytes flipped, cut, doubled or inserted: a refusal, or exactly the files that were packed."""
    whole = a_wheel() if kind == "wheel" else an_image(tmp_path)
    path = tmp_path / "x.any"
    path.write_bytes(whole)
    with opened(path) as root:
        good = {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}
    assert set(good) == {"bundle.json", "entries/A/k.cubin"}
    random = Random(5)
    refusals = others = 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(data))
            match random.randrange(4):
                case 0:
                    data[at] = random.randrange(256)
                case 1:
                    del data[at : at + random.randint(1, 600)]
                case 2:
                    data[at:at] = data[at : at + random.randint(1, 600)]
                case 3:
                    data[at : at + 4] = random.choice([b"\xff\xff\xff\xff", b"../a", b"\0\0\0\0", b"9999"])
            if not data:
                data = bytearray(b"P")
        path.write_bytes(data)
        try:
            with opened(path, Limits(bytes=10_000_000)) as root:
                if root == path:
                    refusals += 1  # no archive any more: opening it as a bundle says so
                    continue
                found = {name: (root / name).read_bytes() for name in good if (root / name).is_file()}
                # the bundle's own digests judge what is missing; nothing may be another file
                assert all(found[name] == good[name] for name in found), "another file"
                others += 1
        except BundleError as error:
            refusals += "\n" not in error.message
    assert refusals > 500
    assert refusals + others == 1500
    assert {file.name for file in tmp_path.iterdir()} == {"x.any"}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
@pytest.mark.parametrize("size", [64 << 20, -512])
def test_a_header_is_not_read_in_one_piece_whatever_its_size(tmp_path, kind, size):
    head = tarfile.TarInfo("x")
    head.type, head.size = kind, size
    data = gzip.compress(head.tobuf(tarfile.GNU_FORMAT) + bytes(max(0, size)) + tar_of("a"), compresslevel=1)
    tracemalloc.start()
    refused(tmp_path, f"damaged archive: a header of {size} bytes", lambda: unpack(data, tmp_path))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_member_that_leads_back_to_itself(tmp_path):
    """Of a base image even members that are left alone are walked over."""
    back = tarfile.TarInfo("etc/b")
    back.size = -tarfile.BLOCKSIZE
    data = tar_of("etc/a")[:1024] + back.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    refused(tmp_path, "a size of -512 bytes", lambda: unpack(data, tmp_path, prefix="opt"))


def test_members_beside_the_prefix_are_counted(tmp_path):
    data = tar_of(*(f"etc/{number}" for number in range(9)), "opt/a")
    refused(tmp_path, "more than 9 members", lambda: unpack(data, tmp_path, Limits(files=9), prefix="opt"))


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "x.whl")
    with opened(tmp_path / "x.whl") as found:
        assert found == tmp_path / "x.whl"


def test_what_is_wrong_inside_names_the_archive(tmp_path):
    path = tmp_path / "b.tar"
    path.write_bytes(tar_of("bundle.json"))
    with pytest.raises(BundleError) as caught, opened(path) as folder:
        Bundle(folder)
    assert caught.value.message.startswith(f"{path}/bundle.json: corrupt")


@pytest.mark.parametrize(
    "member",
    [
        "opt/b/.wh.bundle.json", "opt/b/entries/.wh.A", "opt/b/.wh..wh..opq", "opt/.wh.b", ".wh.opt",
        ".wh..wh..opq", "opt",
        "opt/b/entries/A/k.cubin", "./opt/b/x", special("opt", tarfile.SYMTYPE, "etc"),
    ],
)  # fmt: skip
def test_a_layer_above_that_changes_the_bundle(tmp_path, member):
    """What a container sees is not what the layer with the bundle holds."""
    path = tmp_path / "x.tar"
    path.write_bytes(an_image(tmp_path, tar_of("app/main.py"), tar_of(member)))
    with pytest.raises(BundleError, match="a layer above the bundle's changes /"), opened(path):
        pass


def test_a_layer_above_that_leaves_the_bundle_alone(tmp_path):
    path = tmp_path / "x.tar"
    folder = special("opt/b", tarfile.DIRTYPE)
    path.write_bytes(an_image(tmp_path, tar_of(folder, "opt/bc", "app/.wh.opt", "app/.wh..wh..opq")))
    with opened(path) as found:
        assert sorted(one.name for one in found.iterdir()) == ["bundle.json", "entries"]
