"""On an NVIDIA GPU: a model that torch.compile compiled is recorded, packed, and runs frozen elsewhere, Triton idle.

Inductor still traces, generates code and times its configs in the second process; only Triton compiles nothing there.
Packs on this machine, so it needs a C compiler and Python's headers. ``TCACHE_TEST_COMPILE_REPORT`` names a file to
write the result to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
import bundle_project

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, time
from pathlib import Path

import torch
import triton

events = {True: [], False: []}
before = triton.knobs.compilation.listener


def listen(**event):
    events[event["cache_hit"]].append(event["src"].name)
    if before is not None:
        before(**event)


triton.knobs.compilation.listener = listen


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) + x
        return torch.softmax(y, -1).amax(0), y.sum()


torch.manual_seed(0)
model = Block(512).cuda()
compiled = torch.compile(model)
x = torch.randn(256, 512, device="cuda")
begin = time.perf_counter()
largest, total = compiled(x)
total.backward()
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
gradient = model.up.weight.grad.clone()
model.zero_grad()
wanted, wanted_total = model(x)
wanted_total.backward()
torch.testing.assert_close(largest, wanted, rtol=1e-3, atol=1e-5)
torch.testing.assert_close(total, wanted_total, rtol=1e-3, atol=1e-1)
torch.testing.assert_close(gradient, model.up.weight.grad, rtol=1e-2, atol=1e-2)
folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
print(json.dumps({
    "hits": events[True], "compiled": events[False], "seconds": round(seconds, 2),
    "cubins": len({path.parent for path in folder.rglob("*.cubin")}), "generated": len(list(folder.rglob("*.py"))),
}))
"""


def program(root, cache, threads, wrap=(), code=0, **more):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TCACHE_", "TRITON_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": str(root / cache), **more,
    }  # fmt: skip
    if threads:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    command = [sys.executable, *wrap, "program.py"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (code == 0), f"{done.stdout}\n{done.stderr}"
    return done.stderr if code else json.loads(done.stdout.splitlines()[-1])


def frozen(root, cache, threads, **more):
    """Run it again with nothing compiled, in another cache directory of Inductor's, and no C compiler for Triton."""
    return program(
        root, cache, threads, TCACHE_BUNDLES=str(root / "bundle"), TCACHE_MODE="frozen", CC="/nonexistent",
        TRITON_CACHE_MANAGER="tcache.overlay:OverlayCacheManager", **more,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[1, None], ids=["in-process", "workers"])
def recorded(request, tmp_path_factory):
    """A model that was recorded and packed, with Inductor compiling here or in worker processes, as it does unasked."""
    import torch

    root = tmp_path_factory.mktemp("compiled")
    (root / "program.py").write_text(PROGRAM)
    manifest = f"version: 1\ngpus: [{torch.cuda.get_device_name()}]\nkernels:\n  - launches: serve.launches.json\n"
    (root / "m.yaml").write_text(manifest)
    wrap = ("-m", "tcache", "record", "-o", "serve.launches.json", "--", sys.executable)
    first = program(root, "one", request.param, wrap=wrap)
    assert first["cubins"] > 0
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    packed = bundle_project.run(root, "pack", "m.yaml", "--include-captured", "-o", "bundle", "--json", **environment)
    return root, request.param, first, json.loads(packed.stdout)


def test_triton_compiles_nothing_in_a_service_with_the_bundle(recorded):
    root, threads, first, packed = recorded
    assert packed["entries"] >= first["cubins"] > 0
    found = frozen(root, "two", threads)
    assert found["compiled"] == []
    assert found["cubins"] == 0
    assert found["generated"] > 0, "Inductor generated its code anew"
    if threads == 1:
        assert set(found["hits"]) == {*first["hits"], *first["compiled"]}
    target = os.environ.get("TCACHE_TEST_COMPILE_REPORT")
    if target:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from _machine import describe

        path = Path(target)
        known = json.loads(path.read_text()) if path.exists() else {"machine": describe()}
        rows = {"recorded": {**first, "compiled": len(first["compiled"])}, "packed": packed["entries"], "frozen": found}
        path.write_text(json.dumps({**known, "in process" if threads else "in workers": rows}, indent=1) + "\n")


def test_an_entry_that_is_missing_is_a_miss_that_names_it(recorded, tmp_path):
    root, threads, *_ = recorded
    for name in ("program.py", "bundle"):
        source = root / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    lost = min((tmp_path / "bundle" / "entries").iterdir())
    kernel = next(lost.glob("*.json")).stem
    shutil.rmtree(lost)
    bundle_project.sign(tmp_path / "bundle")
    error = frozen(tmp_path, "three", threads, code=1)
    assert "CacheMiss" in error
    assert f"{kernel} is not prebaked for this launch (mode frozen)" in error or f"{kernel}.fn is not prebaked" in error
    assert f"entry: {lost.name}" in error
    assert not list((tmp_path / "three").rglob("*.cubin"))
