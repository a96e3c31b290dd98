"""Replay the forward and backward launches of an 80-layer, 70B-parameter model without a GPU; report memory and time.

python benchmarks/ghosts.py [layers]
"""

import json
import resource
import sys
import time

import torch
import triton
import triton.language as tl
from torch import nn

from tcache._triton.kernels import outermost_launches
from tcache.keys import find_gpu
from tcache.replay import machine

HIDDEN, WIDE, HEADS, GROUPS, VOCABULARY = 8192, 28672, 64, 8, 128256  # Llama 3 70B


@triton.jit
def rms_norm(x, w, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n) * tl.load(w + o, mask=o < n), mask=o < n)


@triton.jit
def swiglu(a, b, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(a + o, mask=o < n) * tl.load(b + o, mask=o < n), mask=o < n)


class Function(torch.autograd.Function):
    """A kernel on one row, forward and backward."""

    @staticmethod
    def forward(ctx, kernel, *inputs):
        ctx.kernel = kernel
        ctx.save_for_backward(*inputs)
        y = torch.empty_like(inputs[0])
        kernel[(1,)](*inputs, y, y.shape[-1], BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(value) for value in inputs]
        ctx.kernel[(1,)](dy, inputs[1], gradients[0], dy.shape[-1], BLOCK=1024)
        return (None, *gradients)


class Layer(nn.Module):
    """One layer: RMS norm, grouped attention, SwiGLU."""

    def __init__(self):
        super().__init__()
        options = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
        self.norm = nn.ParameterList(torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * GROUPS) * 128, **options)
        self.out = nn.Linear(HIDDEN, HIDDEN, **options)
        self.gate, self.up = (nn.Linear(HIDDEN, WIDE, **options) for _ in range(2))
        self.down = nn.Linear(WIDE, HIDDEN, **options)

    def forward(self, x):
        q, k, v = self.qkv(Function.apply(rms_norm, x, self.norm[0])).split(
            [HEADS * 128, GROUPS * 128, GROUPS * 128], -1
        )
        q, k, v = (value.unflatten(-1, (-1, 128)).transpose(1, 2) for value in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = Function.apply(rms_norm, x, self.norm[1])
        return x + self.down(Function.apply(swiglu, self.gate(h), self.up(h)))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main():
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    launches = []

    def sink(kernel, _grid, _args, _kwargs):
        launches.append(kernel)

    with machine(find_gpu("NVIDIA H200")), outermost_launches(sink):
        before, begin = peak(), time.perf_counter()
        embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda")
        stack = nn.Sequential(*(Layer() for _ in range(layers)))
        head = nn.Linear(HIDDEN, VOCABULARY, bias=False).to("cuda", torch.bfloat16)
        tokens = torch.randint(0, VOCABULARY, (8, 8192), device="cuda")
        logits = head(stack(embedding(tokens)))
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        parameters = sum(p.numel() for module in (embedding, stack, head) for p in module.parameters())
        seconds = time.perf_counter() - begin
    report = {"layers": layers, "parameters": parameters, "launches": len(launches), "seconds": round(seconds, 2)}
    print(json.dumps({**report, "peak_rss_mb": round(peak()), "before_mb": round(before)}))


if __name__ == "__main__":
    main()
