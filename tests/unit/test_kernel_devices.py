"""Every launch of the kernel library goes to the GPU that holds its tensors, and tensors without memory are refused.

Triton launches on the current device, whatever device the tensors are on, and takes an address of 0 for a valid one.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tcache.keys import find_gpu
from tcache.replay import KernelRef, load, machine

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "kernels").glob("*.py") if "_kernel[" in path.read_text())


def outside(tree: ast.AST, inside: bool = False) -> list[int]:
    """Return the lines of launches that no ``with on_device_of(…)`` or ``with torch.cuda.device_of(…)`` encloses."""
    found = []
    if isinstance(tree, ast.With):
        inside |= any("device_of(" in ast.unparse(item.context_expr) for item in tree.items)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Subscript) and not inside:
        found += [tree.lineno] if ast.unparse(tree.func.value).endswith("_kernel") else []
    for child in ast.iter_child_nodes(tree):
        found += outside(child, inside)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_launch_goes_to_the_tensors_device(module):
    assert not outside(ast.parse((ROOT / "kernels" / f"{module}.py").read_text()))


def test_a_launch_elsewhere_is_found():
    text = "with on_device_of(x):\n    a_kernel[grid](x)\nb_kernel[lambda meta: (1,)](x)\n"
    assert outside(ast.parse(text)) == [3]


def calls():
    x, whole = torch.empty(16, 16, device="meta"), torch.empty(16, device="meta", dtype=torch.int32)
    table, heads = whole.view(4, 4), torch.empty(1, 1, 16, 16, device="meta")
    pages = heads.transpose(1, 2)
    return {
        "vector_add:axpy": (1.0, x[0], x[1]), "matmul:matmul": (x, x),
        "softmax:softmax": (x,), "layernorm:layernorm": (x,), "rmsnorm:rmsnorm": (x,),
        "layernorm:layernorm_backward": (x, x, x[0], x[0], x[0]), "elementwise:affine_relu": (x, 1.0, 1.0),
        "elementwise:affine_relu_": (x, 1.0, 1.0), "quantize:quantize_int8": (x,),
        "matmul_decode:matmul_decode": (x, x), "matmul_persistent:matmul_persistent": (x, x, False),
        "grouped_gemm:grouped_gemm": (x, x[None], whole[:2]),
        "dequant_matmul:dequant_matmul": (x.half(), x.to(torch.int8), x[0]),
        "moe:route": (x, 2), "moe:align": (table, 4), "moe_rows:gather": (x, whole, 1),
        "moe_rows:combine": (x, table, x[:4, :4].contiguous()), "moe_rows:silu_gate": (x,),
        "attention:attention": (heads, heads, heads),
        "attention_backward:attention_backward": (heads, heads, heads, heads, heads, heads[..., 0].contiguous()),
        "decode_attention:decode_attention": (heads[0], pages, pages, table[:1], whole[:1]),
        "sparse_conv:sparse_conv": (x[:4], torch.empty(4, 16, 8, device="meta"), table),
        "sparse_conv_backward:sparse_conv_weight_gradient": (x[:4], x[:4], table),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_tensors_without_memory_are_refused(name):
    module, wrapper = name.split(":")
    with pytest.raises(ValueError, match="memory"):
        load(KernelRef.parse(f"kernels/{module}.py:{wrapper}"), ROOT)(*calls()[name])


def test_streams_of_threads_that_share_a_handle_share_no_counters(monkeypatch):
    """``cudaStreamPerThread`` is one handle for every thread's own stream; other streams keep theirs."""
    counters = load(KernelRef.parse("kernels/matmul_decode.py:_counters"), ROOT)
    zeros, device = torch.zeros, torch.device("cuda", 0)
    monkeypatch.setattr(torch, "zeros", lambda count, device, dtype: zeros(count, dtype=dtype))  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sys.modules["kernels.matmul_decode"], "_arrived", {})
    for handle, shared in [(0, True), (140_000_000, True), (2, False)]:
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda _device, handle=handle: SimpleNamespace(cuda_stream=handle)
        )
        assert (counters(device, 64) is counters(device, 64)) == shared
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setitem(counters.__globals__, "is_traced", lambda: True)
    assert counters(device, 64) is not counters(device, 64), "what torch.compile traces may be a CUDA graph's"


def test_counters_of_a_replay_are_left_to_it(monkeypatch):
    """They have no memory: a launch of the same process, later and for real, would count at address 0."""
    counters = load(KernelRef.parse("kernels/matmul_decode.py:_counters"), ROOT)
    kept = {}
    monkeypatch.setitem(counters.__globals__, "_arrived", kept)
    with machine(find_gpu("NVIDIA H200")):
        assert counters(torch.device("cuda", 0), 64).is_cuda
    assert kept == {}


def test_checks_of_arguments_are_traced_whole():
    """By torch.compile, without a break of the graph for each tensor."""
    readable, check_device, check_shape, integer, flag = (
        load(KernelRef.parse(f"kernels/_check.py:{name}"), ROOT)
        for name in ("readable", "check_device", "check_shape", "integer", "flag")
    )

    def checked(x, y):
        x, y = readable("x", x, (torch.float32,), 2), readable("y", y, (torch.float32,))
        check_device(x=x, y=y)
        check_shape("y", y, (x.shape[0],), "x", contiguous=True)
        return x * integer("two", 2, 1, 3) + y * flag("yes", 1)

    x, y = torch.randn(3, 3), torch.randn(3)
    whole = torch.compile(checked, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(x, y), x * 2 + y)
    torch.testing.assert_close(whole(x._neg_view(), y), y - x * 2)
    with pytest.warns(UserWarning, match="^x requires a gradient"):  # and nothing of dynamo's, which is an error here
        torch.compile(checked, backend="eager")(x.requires_grad_(), y)
