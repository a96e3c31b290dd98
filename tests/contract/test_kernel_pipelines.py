"""What the compiler makes of the matmuls' loops over pointers on Hopper: both operands copied ahead, in wide pieces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tcache.replay import KernelRef, load

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the compiler", allow_module_level=True)

ROOT = Path(__file__).parents[2]
STAGES = 3
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}
KERNELS = {
    "matmul": ("matmul", "stride_bk", "stride_bn", {"stride_ak": 1, "stride_cn": 1}),
    "matmul_persistent": (
        "matmul_persistent",
        "stride_bk",
        "stride_bn",
        {"stride_ak": 1, "stride_cn": 1, "EVEN_K": True},
    ),
    "grouped_gemm": (
        *("grouped_gemm", "stride_wk", "stride_wn"),
        {"stride_xk": 1, "stride_yn": 1, "EVEN_K": True, "EXPERTS": 8, "PER_SM": 1},
    ),
    "dequant_matmul": ("dequant_matmul", "stride_wk", "stride_wn", {"stride_ak": 1}),
}


def compiled(name, unit):
    """Compile a kernel for bfloat16 of aligned sizes; ``unit`` is the stride that is 1."""
    module, *_, constants = KERNELS[name]
    kernel = load(KernelRef.parse(f"kernels/{module}.py:{name}_kernel"), ROOT)
    while not isinstance(kernel, triton.runtime.JITFunction):
        kernel = kernel.fn
    fixed = {**BLOCKS, **constants, unit: 1}
    types = {"offsets_ptr": "*i32", "scale_ptr": "*fp32"}
    if name == "dequant_matmul":
        types["w_ptr"] = "*i8"
    names = kernel.arg_names
    fixed = {key: value for key, value in fixed.items() if key in names}
    signature = {
        key: "constexpr" if key in fixed else types.get(key, "*bf16" if key.endswith("_ptr") else "i32")
        for key in names
    }
    at = {key: (number,) for number, key in enumerate(names)}
    aligned = {at[key]: [["tt.divisibility", 16]] for key in names if key not in fixed and key not in ("E", "T")}
    source = ASTSource(kernel, signature, {at[key]: value for key, value in fixed.items()}, aligned)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "num_stages": STAGES}).asm["ttgir"]


@pytest.mark.parametrize("by", ["rows", "columns"])
@pytest.mark.parametrize("name", KERNELS)
def test_both_operands_are_copied_ahead(name, by, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, down, across, _ = KERNELS[name]
    text = compiled(name, across if by == "rows" else down)
    assert text.count("ttg.async_copy_global_to_local") == 2 * STAGES
    assert "warp_group_dot" in text
