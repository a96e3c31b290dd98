"""Record a real forward and backward, warm up without a GPU, run frozen: zero compiles, zero tuning, same outputs.

The model is a small language model built from what others wrote: gated linear attention and the delta rule of fla-core
(which refuses the gated delta rule's backward on Hopper with Triton 3.6), RMSNorm, RoPE, SwiGLU and cross entropy of
liger-kernel. Three steps, the second on a machine without a GPU,
with the same Python, torch and Triton (H200: Python 3.12, torch 2.11, Triton 3.6.0):

    python benchmarks/record_model.py record WORK         # on the GPU: WORK/model.launches.json, store, reference.pt
    tcache warmup WORK/model.launches.json --store WORK/store --cache-dir WORK/cache
    tcache pack WORK/model.launches.json --store WORK/store --cache-dir WORK/cache -o WORK/bundle
    python benchmarks/record_model.py frozen WORK         # on the GPU, an empty Triton cache

fla-core and liger-kernel are read from where they are installed; ``pip install --no-deps fla-core==0.6.0
liger-kernel==0.8.5 einops`` is enough. Writes ``record_model.json`` to ``--output`` (default: ``benchmarks/results``).
``--null`` replaces the GPU by a driver that compiles and launches nothing, to try the steps; outputs mean nothing then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import _machine
from _machine import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "contract")]

SIZES = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 4096, "batch": 2, "lengths": [256, 1000]}
TOLERANCE = 2e-2
"""Relative error (norm of the difference over norm of the reference) allowed where atomics order sums differently."""


def build(device: str):
    """Return the model's parameters and a function from token ids to the loss."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gla import chunk_gla
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    width, heads, inner = SIZES["width"], SIZES["heads"], SIZES["width"] * 3
    head = width // heads
    made = torch.Generator().manual_seed(0)
    parameters: dict[str, torch.nn.Parameter] = {}

    def parameter(name: str, *shape: int, scale: float | None = None):
        value = torch.randn(shape, generator=made) * (scale if scale is not None else shape[-1] ** -0.5)
        parameters[name] = torch.nn.Parameter(value.to(device, torch.bfloat16))

    parameter("embedding", SIZES["vocabulary"], width, scale=1.0)
    for layer in range(SIZES["layers"]):
        for name, rows in (("q", width), ("k", width), ("v", width), ("g", width), ("beta", heads), ("o", width)):
            parameter(f"{layer}.{name}", rows, width)
        parameter(f"{layer}.gate", inner, width)
        parameter(f"{layer}.up", inner, width)
        parameter(f"{layer}.down", width, inner)
        for name in ("norm1", "norm2"):
            parameters[f"{layer}.{name}"] = torch.nn.Parameter(torch.ones(width, device=device, dtype=torch.bfloat16))

    def attention(x, layer: int, cos, sin):
        batch, length, _ = x.shape
        q, k, v = (F.linear(x, parameters[f"{layer}.{n}"]).view(batch, length, heads, head) for n in "qkv")
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        if layer % 2:
            beta = F.linear(x, parameters[f"{layer}.beta"]).sigmoid()
            o, _ = chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)
        else:
            gates = F.logsigmoid(F.linear(x, parameters[f"{layer}.g"]).float()) / 16
            o, _ = chunk_gla(q, k, v, gates.view(batch, length, heads, head))
        return F.linear(o.reshape(batch, length, width), parameters[f"{layer}.o"])

    norm_options = (1e-6, 0.0, "llama", False)

    def loss(tokens):
        length = tokens.shape[1]
        angle = torch.arange(length, device=device)[:, None] / 10000 ** (
            torch.arange(0, head, 2, device=device)[None] / head
        )
        angle = torch.cat([angle, angle], -1)[None].to(torch.bfloat16)
        cos, sin = angle.cos(), angle.sin()
        x = F.embedding(tokens, parameters["embedding"])
        for layer in range(SIZES["layers"]):
            norms = [parameters[f"{layer}.norm{n}"] for n in (1, 2)]
            x = x + attention(LigerRMSNormFunction.apply(x, norms[0], *norm_options), layer, cos, sin)
            h = LigerRMSNormFunction.apply(x, norms[1], *norm_options)
            gate, up = F.linear(h, parameters[f"{layer}.gate"]), F.linear(h, parameters[f"{layer}.up"])
            x = x + F.linear(LigerSiLUMulFunction.apply(gate, up), parameters[f"{layer}.down"])
        logits = F.linear(x, parameters["embedding"]).view(-1, SIZES["vocabulary"])
        found = LigerCrossEntropyFunction.apply(logits, tokens.roll(-1, 1).reshape(-1), None)
        return found[0] if isinstance(found, tuple) else found

    return parameters, loss


def run(device: str) -> dict:
    """Run forward and backward at every length; return losses and gradients on the CPU."""
    import torch

    parameters, loss = build(device)
    results = {}
    for length in SIZES["lengths"]:
        made = torch.Generator().manual_seed(length)
        tokens = torch.randint(SIZES["vocabulary"], (SIZES["batch"], length), generator=made).to(device)
        value = loss(tokens)
        value.backward()
        results[f"{length} loss"] = value.detach().cpu()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                results[f"{length} {name}"] = parameter.grad.cpu()
                parameter.grad = None
    return results


def child(step: str, work: Path, device: str) -> None:
    """One step in a process of its own; the last line of its output is its result."""
    import torch
    import triton

    import tcache

    if device == "cpu":
        _pretend()
    compiled: list[str] = []
    before = triton.knobs.compilation.listener

    def listener(*, src, cache_hit, **rest):
        if not cache_hit:
            compiled.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **rest)

    triton.knobs.compilation.listener = listener
    if step == "frozen":  # before the libraries are imported: they ask for the driver, which takes a packed helper then
        settings = tcache.activate([work / "bundle"], mode="frozen")
        assert settings.bundles, settings.skipped
    build(device)  # imports the libraries
    if device == "cpu":
        _first_config_wins()
    if step == "record":
        adopted = _adopt()
        with tcache.record(work / "model.launches.json", counts=True):
            begin = time.perf_counter()
            results = run(device)
            first = time.perf_counter() - begin
        torch.save(results, work / "reference.pt")
        again = _compare(results, run(device))  # what this GPU itself does not repeat is no fault of the bundle
        (work / "record.json").write_text(json.dumps({"run_to_run": again}))
        found = {"kernels_adopted": len(adopted), "run_to_run": again}
    else:
        _adopt()
        begin = time.perf_counter()
        results = run(device)
        first = time.perf_counter() - begin
        found = {"same": _compare(torch.load(work / "reference.pt"), results)}
    print(json.dumps({"seconds": round(first, 3), "compiled": len(compiled), "stats": tcache.stats(), **found}))


def _adopt() -> list[str]:
    """Give tcache's store to every autotuned kernel of fla; liger-kernel's here choose by heuristics of their own."""
    import tcache

    return tcache.adopt("fla.ops") + tcache.adopt("fla.modules")


def _pretend() -> None:
    """Stand for a GPU that is not there, as far as the libraries ask for one while they are imported."""
    import null_driver
    import torch

    null_driver.activate()
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def _first_config_wins() -> None:
    """Tune without launching: there is nothing to measure."""
    import gc

    from triton.runtime.autotuner import Autotuner

    for found in gc.get_objects():
        if issubclass(type(found), Autotuner):
            found._do_bench = lambda _call, quantiles: [1.0 for _ in quantiles]


def _compare(wanted: dict, results: dict) -> dict:
    """Return how many results are equal bit by bit, and the largest relative error of the others."""
    assert wanted.keys() == results.keys()
    import torch

    differing = {}
    for name, value in wanted.items():
        if not torch.equal(value, results[name]):
            a, b = value.double(), results[name].double()
            differing[name] = float((a - b).norm() / a.norm())
    return {
        "tensors": len(wanted),
        "bitwise_equal": len(wanted) - len(differing),
        "largest_relative_error": max(differing.values(), default=0.0),
        "not_bitwise": sorted(differing),
    }


def process(step: str, work: Path, device: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    cache = work / f"cache-{step}"
    environment |= {"TRITON_CACHE_DIR": str(cache), "HOME": str(work), "TCACHE_STORE": str(work / "store")}
    if device == "cpu":
        environment["TCACHE_GPU_NAME"] = "NVIDIA H200"
    if step == "frozen":
        del environment["TCACHE_STORE"]
        assert not cache.exists(), f"{cache} must not exist: the cache has to be empty"
    command = [sys.executable, __file__, step, str(work), "--child", *(["--null"] if device == "cpu" else [])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{step}: exit {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    if step == "frozen":
        written = sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())
        found["files_written_to_the_cache"] = written
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["record", "frozen"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--null", action="store_true", help="no GPU: launch nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    work, device = arguments.work.resolve(), "cpu" if arguments.null else "cuda"
    work.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        child(arguments.step, work, device)
        return
    found = process(arguments.step, work, device)
    if arguments.step == "record":
        (work / "record.json").write_text(json.dumps(found))
        print(json.dumps(found, indent=1))
        return
    recorded = json.loads((work / "record.json").read_text())
    result = {"model": SIZES, "record_and_tune": recorded, "frozen": found, "tolerance": TOLERANCE}
    _machine.RESULTS = arguments.output
    print(_machine.write("record_model", result).read_text())
    stats = found["stats"]
    assert found["compiled"] == 0, "something was compiled"
    assert stats["tuned"] == stats["misses"] == stats["default"] == stats["nearest"] == 0, stats
    assert not found["files_written_to_the_cache"], found["files_written_to_the_cache"]
    if not arguments.null:
        assert found["same"]["largest_relative_error"] <= TOLERANCE, found["same"]


if __name__ == "__main__":
    main()
