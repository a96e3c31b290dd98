"""What shared objects need, and the platform tag that follows."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from tcache.pack._elf import Needs, manylinux, needs

TAGS = [
    ([], "manylinux_2_17_x86_64"),
    ([Needs(("libc.so.6",), ("GLIBC_2.2.5",))], "manylinux_2_17_x86_64"),
    ([Needs(("libc.so.6", "libcuda.so.1"), ("GLIBC_2.2.5", "GLIBC_2.34"))], "manylinux_2_34_x86_64"),
    ([Needs(("libc.so.6",), ("GLIBC_2.4",)), Needs(("libm.so.6",), ("GLIBC_2.29",))], "manylinux_2_29_x86_64"),
    ([Needs(("libc.so.6", "libgcc_s.so.1"), ("GCC_3.0", "GLIBC_2.17"))], "manylinux_2_17_x86_64"),
    ([Needs(("libc.so.6", "libfoo.so.2"), ("GLIBC_2.2.5",))], "linux_x86_64"),
    ([Needs(("libc.musl-x86_64.so.1",), ())], "linux_x86_64"),
    ([Needs(("libc.so.6",), ("GLIBC_PRIVATE",))], "linux_x86_64"),
    ([Needs(("libc.so.6",), ("FOO_1.0",))], "linux_x86_64"),
]


@pytest.mark.parametrize(("found", "tag"), TAGS)
def test_tags(found, tag):
    assert manylinux(found, "x86_64") == tag


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("elf")
    (folder / "a.c").write_text(
        '#include <stdio.h>\n#include <math.h>\ndouble f(double x) { puts(""); return pow(x, x); }'
    )
    command = ["gcc", "-shared", "-fPIC", "-o", "a.so", "a.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "a.so"


def test_needs_are_those_that_readelf_prints(library):
    found = needs(library.read_bytes())
    if not shutil.which("readelf"):
        pytest.skip("no readelf")
    dynamic = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    versions = subprocess.run(["readelf", "-VW", library], capture_output=True, text=True, check=True).stdout
    assert found.libraries == tuple(sorted(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)))
    assert set(found.versions) == set(re.findall(r"Name: (GLIBC_\S+)", versions))
    assert manylinux([found], platform.machine()).startswith("manylinux_2_")


def test_damaged_files_are_a_value_error(library):
    data = library.read_bytes()
    for cut in (0, 5, 63, 64, len(data) // 2, len(data) - 10):
        with pytest.raises(ValueError, match=r"ELF|cut off"):
            needs(data[:cut])
