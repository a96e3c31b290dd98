"""Recording on a GPU: the launches of a real driver, replayed by the stub driver, have the same entries."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def test_recorded_launches_resolve_to_the_entries_that_were_compiled(triton_cache, tmp_path):
    import torch

    import tcache
    from tcache.keys.gpu import find_gpu
    from tcache.lookup import current_gpu
    from tcache.manifest import load_manifest
    from tcache.replay import KernelRef, load
    from tcache.resolve import resolve

    axpy = load(KernelRef.parse("kernels/vector_add.py:axpy_kernel"), ROOT).fn  # below its autotuner
    path = tmp_path / "gpu.launches.json"
    launched = set()
    with tcache.record(path, counts=True):
        for n, offset in [(4096, 0), (4097, 0), (1, 0), (4096, 1)]:
            x, y, z = (torch.randn(n + offset, device="cuda")[offset:] for _ in range(3))
            for _ in range(3):
                made = axpy[((n + 1023) // 1024,)](x, y, z, 2.0, n, BLOCK=1024)
            torch.testing.assert_close(z, 2 * x + y)
            launched.add(Path(next(iter(made.metadata_group.values()))).parent.name)
    gpu = find_gpu(current_gpu().name)
    found, missing = resolve(load_manifest(path).cases(), gpu, ())
    assert not missing
    assert {row.entry for row in found} == launched
    assert [row.count for _, row in load_manifest(path).recordings[0].launches] == [3] * 4
