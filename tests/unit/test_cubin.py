from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import triton

from tcache._triton.driver import stub
from tcache._triton.mock import MockTensor
from tcache._triton.probe import compilation_of
from tcache.pack._cubin import cubin_problem, strip_debug, with_name

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(p, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p + o, tl.load(p + o, mask=o < n) * 2, mask=o < n)
"""


@pytest.fixture
def cubin(triton_cache, kernel_file):
    from tcache.replay import KernelRef, load

    path = kernel_file("scale_kernel.py", KERNEL)
    kernel = load(KernelRef.parse("scale_kernel.py:scale"), path.parent)
    with stub("cuda", 90, 32):
        x = MockTensor("float32", (4096,), (1,))
        return compilation_of(kernel, (x, 4096), {"BLOCK": 1024}).run().asm["cubin"], path


def machine_code(data, tmp_path):
    path = tmp_path / "x.cubin"
    path.write_bytes(data)
    done = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.strip().startswith("/*")]


def test_stripping_keeps_the_code_and_drops_the_paths(cubin, tmp_path):
    data, source = cubin
    stripped = strip_debug(data)
    assert str(source.parent).encode() in data
    assert str(source.parent).encode() not in stripped
    assert len(stripped) < 0.75 * len(data)
    assert machine_code(stripped, tmp_path) == machine_code(data, tmp_path) != []


def test_stripping_twice_changes_nothing_more(cubin):
    stripped = strip_debug(cubin[0])
    assert strip_debug(stripped) == stripped


def test_a_name_changes_nothing_but_the_table_of_section_names(cubin, tmp_path):
    stripped = strip_debug(cubin[0])
    named = with_name(stripped, "NAMEOFANENTRY")
    assert named.endswith(b"\0NAMEOFANENTRY\0")
    assert cubin_problem(named, 90) is None
    assert machine_code(named, tmp_path) == machine_code(stripped, tmp_path) != []
    lists = []
    for data in (stripped, named):
        (tmp_path / "x.cubin").write_bytes(data)
        command = [TOOLS / "cuobjdump", "-elf", tmp_path / "x.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in text.splitlines()]
        lists.append([row[4:] for row in rows if len(row) > 8 and row[0].isdigit() and "shstrtab" not in row[-1]])
    assert lists[0] == lists[1] != []
    for other in (b"", b"text", b"\x7fELF\x01\x01" + bytes(100)):
        assert with_name(other, "x") == other


def test_what_is_no_cubin_is_left_alone(cubin):
    data, _ = cubin
    for other in (b"", b"text", b"\x7fELF\x01\x01" + bytes(100), data[:200]):
        assert strip_debug(other) == other
