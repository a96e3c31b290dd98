"""`tcache tune` on all GPUs of this machine against one of them: the same shapes, compiled before.

Where the two runs chose different configs, both are launched in turns in one process to see what the choice costs.
Writes ``two_gpus.json`` to ``--output`` (default: ``benchmarks/results``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import _machine
from _machine import ROOT

from tcache.store import Store

MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - call: {root}/kernels/vector_add.py:axpy
    args: {{a: 2.0, x: {{shape: [n], dtype: float32}}, y: {{shape: [n], dtype: float32}}}}
    cases: [{{n: {sizes}}}]
  - call: {root}/kernels/matmul.py:matmul
    args: {{a: {{shape: [M, K], dtype: bfloat16}}, b: {{shape: [K, N], dtype: bfloat16}}}}
    cases: [{{M: [512, 1024, 2048, 4096], N: [2048, 4096, 6144, 8192], K: [2048, 4096, 8192]}}]
"""


HEAD_TO_HEAD = """
import json, os, statistics, sys
from pathlib import Path
import torch
from tcache._triton.bench import Sampler
from tcache.keys import ShapeKey
from tcache.keys.config import config_key
from tcache.replay import KernelRef, load
sampler, rows = Sampler(), []
for ref, shape, *pair in json.load(sys.stdin):
    name = ref.split(":")[1].removesuffix("_kernel")
    file = {"axpy": "vector_add", "matmul": "matmul"}[name]
    wrapper = load(KernelRef.parse(f"kernels/{file}.py:{name}"), Path(os.environ["ROOT"]))
    kernel = getattr(sys.modules[wrapper.__module__], f"{name}_kernel")
    values = dict(ShapeKey.parse(shape).values)
    if name == "axpy":
        x = torch.randn(values["n"], device="cuda")
        call = lambda: wrapper(2.0, x, x)
    else:
        a = torch.randn(values["M"], values["K"], device="cuda", dtype=torch.bfloat16)
        b = torch.randn(values["K"], values["N"], device="cuda", dtype=torch.bfloat16)
        call = lambda: wrapper(a, b)
    configs, times = kernel.configs, ([], [])
    for _ in range(5):
        for number, key in enumerate(pair):
            kernel.configs = [config for config in configs if config_key(config) == key]
            call()
            times[number].extend(sampler(call, 20))
    kernel.configs = configs
    rows.append([ref, shape, *map(statistics.median, times)])
print(json.dumps(rows))
"""


def head_to_head(folder: Path, pairs: list) -> list:
    """Return ``[kernel, shape, ms of the first config, ms of the second]`` for each pair."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "ROOT": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", HEAD_TO_HEAD], cwd=ROOT, env=environment, input=json.dumps(pairs), text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def tune(folder: Path, name: str, *options: str) -> dict:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TCACHE_")}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "tcache", "tune", "m.yaml", "--store", name, "--json", *options]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, default=600)
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    sizes = [16 * (1000 + 977 * number) for number in range(arguments.sizes)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "m.yaml").write_text(MANIFEST.format(root=ROOT, sizes=sizes))
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
        warm = [sys.executable, "-m", "tcache", "warmup", "m.yaml", "--untuned", "all", "--json"]
        subprocess.run(warm, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        several = tune(folder, "several", "--all-gpus")
        one = tune(folder, "one")
        timings = {
            (record.kernel.ref, str(entry.shape)): entry
            for _, record in Store(folder / "one").records()
            for entry in record.entries.values()
        }
        pairs = [
            [row["kernel"], row["shape"], row["config"], timings[row["kernel"], row["shape"]].config]
            for row in several["shapes"]
        ]
        compared = head_to_head(folder, [pair for pair in pairs if pair[2] != pair[3]])
    behind = [1.0] * (len(pairs) - len(compared)) + [mine / other for *_, mine, other in compared]
    import torch

    behind.sort()
    result = {
        "gpus": torch.cuda.device_count(),
        "shapes": len(behind),
        "one_gpu_s": one["seconds"],
        "all_gpus_s": several["seconds"],
        "times_faster": round(one["seconds"] / several["seconds"], 2),
        "same_winner": len(pairs) - len(compared),
        "winner_on_several_against_one": {
            "min": round(behind[0], 4),
            "median": round(behind[len(behind) // 2], 4),
            "p95": round(behind[int(0.95 * len(behind))], 4),
            "max": round(behind[-1], 4),
        },
    }
    _machine.RESULTS = arguments.output
    print(_machine.write("two_gpus", result).read_text())


if __name__ == "__main__":
    main()
