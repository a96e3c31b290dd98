from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import triton

from tcache._triton.driver import stub
from tcache._triton.mock import MockTensor
from tcache._triton.probe import compilation_of
from tcache.pack._cubin import strip_debug

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


def test_what_is_no_cubin_is_left_alone(cubin):
    data, _ = cubin
    for other in (b"", b"text", b"\x7fELF\x01\x01" + bytes(100), data[:200]):
        assert strip_debug(other) == other
