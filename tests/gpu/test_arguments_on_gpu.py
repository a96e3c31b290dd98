"""On an NVIDIA GPU: what a manifest's arguments are for real runs, and runs under the entry resolved without a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tcache._triton.driver import current_target, stub
from tcache._triton.probe import compilation_of
from tcache.manifest import load_manifest
from tcache.manifest.arguments import DTYPES
from tcache.replay.arguments import arguments, mock, real

pytestmark = pytest.mark.gpu


@triton.jit
def copy(x, y, strides, sizes, BLOCK: tl.constexpr = 1024):
    o = tl.arange(0, BLOCK)
    row, column = o // sizes[1], o % sizes[1]
    value = tl.load(x + row * strides[0] + column * strides[1], mask=o < sizes[0] * sizes[1])
    tl.store(y + o, value, mask=o < sizes[0] * sizes[1])


@triton.jit
def copy_described(d, y, BLOCK: tl.constexpr):
    tile = d.load([0, 0])
    o = tl.arange(0, BLOCK)
    tl.store(y + o[:, None] * BLOCK + o[None, :], tile)


LAYOUTS = {
    "contiguous": ("", "n, 1"),
    "unaligned": (", offset: 1", "n, 1"),
    "transposed": (", layout: transposed", "1, m"),
    "expanded": (", stride: [0, 1]", "0, 1"),
    "strided": (", stride: [2 * n, 2], offset: 3", "2 * n, 2"),
}
# the fnuz kinds are AMD's: NVIDIA's compiler refuses them
DEVICE = [name for name in DTYPES if "fnuz" not in name]


def check(case, kernel, expected):
    with stub(*current_target()):
        wanted = compilation_of(kernel, (), arguments(case, mock)).entry
    given = arguments(case, real)
    compiled = kernel[(1,)](**given)
    torch.cuda.synchronize()
    assert compiled.hash
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[given["y"].dtype.itemsize]
    assert torch.equal(given["y"].view(bits), expected(given).contiguous().view(bits))
    return wanted


@pytest.mark.parametrize("dtype", DEVICE)
def test_every_type_and_layout(tmp_path, triton_cache, dtype):
    for layout, (said, strides) in LAYOUTS.items():
        path = tmp_path / "m.yaml"
        path.write_text(f"""\
version: 1
kernels:
  - kernel: k.py:copy
    args:
      x: {{shape: [m, n], dtype: {dtype}{said}}}
      y: {{shape: [m, n], dtype: {dtype}}}
      strides: {{tuple: [{", ".join(strides.split(", "))}]}}
      sizes: {{tuple: [m, n]}}
    grid: [1]
    cases: [{{m: 16, n: 33}}]
""")
        [case] = load_manifest(path).cases()
        entry = check(case, copy, lambda given: given["x"])
        assert (triton_cache / entry).is_dir(), layout


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs TMA (sm_90)"
)
def test_tensor_descriptors(tmp_path, triton_cache):
    path = tmp_path / "m.yaml"
    path.write_text("""\
version: 1
kernels:
  - kernel: k.py:copy_described
    args:
      d: {descriptor: {shape: [m, 64], dtype: bfloat16, stride: [128, 1], offset: 64}, block: [32, 32]}
      y: {shape: [32, 32], dtype: bfloat16}
      BLOCK: 32
    grid: [1]
    cases: [{m: 48}]
""")
    [case] = load_manifest(path).cases()
    entry = check(case, copy_described, lambda given: given["d"].base[:32, :32])
    assert (triton_cache / entry).is_dir()
