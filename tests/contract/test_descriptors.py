"""Host-side tensor descriptors whose blocks a config's pre_hook sets: warmed up, packed, verified, launched frozen."""

from __future__ import annotations

import shutil
from pathlib import Path

import bundle_project
import pytest
import torch

import tcache
from tcache.errors import CacheMiss
from tcache.keys import ShapeKey, find_gpu
from tcache.keys.config import config_key, space_identity
from tcache.lookup import source_of
from tcache.replay import KernelRef, load
from tcache.store import Entry, Kernel, Store, Timing

ROOT = Path(__file__).parents[2]
MANIFEST = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - call: matmuls/matmul_persistent.py:matmul_persistent
    args:
      a: {shape: [M, K], dtype: bfloat16}
      b: {shape: [K, N], dtype: bfloat16, layout: transposed}
    cases: [{M: 200, N: 128, K: 64}]
"""
WINNER = 8


def test_a_frozen_launch_takes_the_block_of_the_winner(tmp_path, null_gpu, monkeypatch):
    shutil.copytree(ROOT / "kernels", tmp_path / "matmuls", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "m.yaml").write_text(MANIFEST)
    text = "matmuls/matmul_persistent.py:"
    tuner = load(KernelRef.parse(text + "matmul_tma_kernel"), tmp_path)
    configs = [config_key(config) for config in tuner.configs]
    key = {"M": 256, "N": 128, "K": 64, "A_ROWS": True, "B_ROWS": False, "ELEMENT": "torch.bfloat16"}
    entry = Entry(
        ShapeKey(tuple(key.items()), ()),
        configs[WINNER],
        {name: Timing(1.0 + (number != WINNER), 0.9, 2.1, 10) for number, name in enumerate(configs)},
        source_of(tuner),
        space_identity(configs),
        "3.7.1",
        "2026-01-01T00:00:00Z",
    )
    kernel = Kernel(tuner.base_fn.__module__, "matmul_tma_kernel", tuple(tuner.keys))
    Store(tmp_path / "store").update(
        find_gpu("NVIDIA H200"), kernel, entry.shape, lambda _: entry, buckets=tuner.buckets
    )
    for command in (("warmup", "m.yaml", "--store", "store"), ("pack", "m.yaml", "-o", "bundle", "--store", "store")):
        bundle_project.run(tmp_path, *command)
    bundle_project.run(tmp_path, "verify", "bundle", "m.yaml")

    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    compiled = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda **event: compiled.append(event["cache_hit"]), raising=False
    )
    tcache.activate([tmp_path / "bundle"], mode="frozen")
    done = tcache.preload()
    assert (len(done.loaded), done.failed) == (1, ())
    wrapper = load(KernelRef.parse(text + "matmul_persistent"), tmp_path)
    a, b = torch.zeros(200, 64, dtype=torch.bfloat16), torch.zeros(128, 64, dtype=torch.bfloat16).t()
    for _ in range(3):
        assert wrapper(a, b).shape == (200, 128)
    assert len(null_gpu.launches) == 3
    assert tuner.best_config.kwargs == tuner.configs[WINNER].kwargs
    assert compiled == [True]
    with pytest.raises(CacheMiss, match="M=512"):
        wrapper(torch.zeros(300, 64, dtype=torch.bfloat16), b)
