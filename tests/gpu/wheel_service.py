"""A service whose kernels came in wheels: launches everything that was packed, then everything that was not.

Run by the Python of the environment that the wheels were installed into, with nothing else of tcache on its path. It
prints one line of JSON. ``TCACHE_TEST_ROOT`` is the project whose ``shape_manifests/quickstart.yaml`` was packed,
``TCACHE_TEST_LOADABLES`` the folder of ``loadables.py``. ``TCACHE_TEST_DEVICE=null`` launches nothing and computes
nothing, for machines without a GPU: all else is the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import triton

import tcache
from tcache.errors import CacheMiss
from tcache.manifest import KernelItem, load_manifest
from tcache.replay import KernelRef, load
from tcache.replay.arguments import arguments, real
from tcache.replay.launches import _grid, kernel_of, load_target

ROOT, LOADABLES = Path(os.environ["TCACHE_TEST_ROOT"]), Path(os.environ["TCACHE_TEST_LOADABLES"])
NULL = os.environ["TCACHE_TEST_DEVICE"] == "null"
DEVICE = "cpu" if NULL else "cuda"
EDITED = Path(tempfile.mkdtemp(prefix="edited-"))

compiled: list[str] = []
read: list[str] = []


def listen(**event):
    (read if event["cache_hit"] else compiled).append(event["src"].name)


def would_tune(*_, **__):
    raise AssertionError("benchmarked")


def imported(name, path):
    """Import a file anew, under a name that it has in the project."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def edited(name, path, *edits):
    """Import a copy of a file with these edits made."""
    text = path.read_text()
    for old, new in edits:
        assert old in text, (path, old)
        text = text.replace(old, new, 1)
    folder = EDITED / str(len(list(EDITED.iterdir()))) / path.parent.name
    folder.mkdir(parents=True)
    if (path.parent / "__init__.py").exists():
        (folder / "__init__.py").touch()
    (folder / path.name).write_text(text)
    return imported(name, folder / path.name)


def same(found, wanted, rtol=1e-5, atol=1e-6):
    if not NULL:
        torch.cuda.synchronize()
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype) if NULL else torch.randn(shape, device="cuda").to(dtype)


# what was packed


def launch_the_manifest():
    matmul_reference = load(KernelRef.parse("kernels/matmul.py:matmul_reference"), ROOT)
    axpy_reference = load(KernelRef.parse("kernels/vector_add.py:axpy_reference"), ROOT)
    launches, checked, first = 0, 0, None
    for case in load_manifest(ROOT / "shape_manifests" / "quickstart.yaml").cases():
        target, given = load_target(case), arguments(case, partial(real, device=DEVICE))
        begin = time.perf_counter()
        if isinstance(case.item, KernelItem):
            kernel_of(case, target)[_grid(case, given)](**given)
            got = given["z_ptr"]
        else:
            got = target(**given)
        if not NULL:
            torch.cuda.synchronize()
        first = first or (time.perf_counter() - begin) * 1e3
        launches += 1
        if NULL:
            continue
        if isinstance(case.item, KernelItem):
            wanted = axpy_reference(given["a"], given["x_ptr"], given["y_ptr"])
        else:
            wanted = (matmul_reference if "b" in given else axpy_reference)(*given.values())
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if got.dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        if got.dim() == 2:  # the products of K random numbers, rounded to bfloat16 at the end
            tolerance["atol"] = 1e-2 * given["a"].shape[1] ** 0.5
        same(got, wanted, **tolerance)
        checked += 1
    return launches, checked, round(first, 1)


def scale(module, n=4096, offset=0):
    x = tensor(n + offset, dtype=torch.float32)[offset:]
    y = torch.empty_like(x)
    module.scale[(triton.cdiv(n, 64),)](x, y, n, BLOCK=64)
    same(y, 2 * x)


def increment(module):
    x = torch.zeros(64, device=DEVICE, dtype=torch.bfloat16)
    module.increment(x)
    same(x, torch.ones_like(x))


def tuned(module):
    x = torch.zeros(16, device=DEVICE)
    module.tuned[(1,)](x, 16)
    same(x, torch.arange(16.0, device=DEVICE))


def axpy(module, n=4096, offset=0):
    x, y = tensor(n + offset)[offset:], tensor(n + offset)[offset:]
    same(module.axpy(2.0, x, y), module.axpy_reference(2.0, x, y), 1e-2, 1e-2)


# what was not


def outcome(call, *args, **kwargs):
    before = tcache.stats()
    try:
        call(*args, **kwargs)
    except CacheMiss as miss:
        return {"reasons": list(miss.reasons), "message": str(miss)}
    after = tcache.stats()
    return {"reasons": [], "prebaked": after["prebaked"] - before["prebaked"]}


def misses():
    kernels, loadables = ROOT / "kernels" / "vector_add.py", LOADABLES / "loadables.py"
    own = partial(edited, "loadables", loadables)
    quick = partial(edited, "kernels.vector_add", kernels)
    matmul = load(KernelRef.parse("kernels/matmul.py:matmul"), ROOT)
    down = ("import triton\n", "import triton\n# one line\n# and another\n")
    return {
        "unaligned pointer, tuned kernel": outcome(axpy, quick(), offset=1),
        "unaligned pointer, stock kernel": outcome(scale, own(), offset=1),
        "unseen shape, tuned kernel": outcome(matmul, tensor(64, 4096), tensor(4096, 4096)),
        "unseen shape, stock kernel": outcome(scale, own(), n=4097),
        "edited source, tuned kernel": outcome(axpy, quick(("a * x + y", "a * x - y"))),
        "edited source, stock kernel": outcome(scale, own(("helper(tl.load", "-helper(tl.load"))),
        "edited helper": outcome(scale, own(("return x * 2", "return x * 3"))),
        "moved down, stock kernel": outcome(scale, own(down)),
        "moved down, tuned kernel": outcome(tuned, own(down)),
        "moved down, tuned kernel of the manifest": outcome(axpy, quick(down)),
        "unedited, stock kernel": outcome(scale, own()),
        "variable set late, stock kernel": with_variable(scale, own()),
        "variable set late, tuned kernel": with_variable(tuned, own()),
    }


def with_variable(call, module):
    os.environ["NVPTX_ENABLE_DUMP"] = "1"  # part of every key of Triton's
    try:
        return outcome(call, module)
    finally:
        del os.environ["NVPTX_ENABLE_DUMP"]


def serve():
    launches, checked, first = launch_the_manifest()
    module = imported("loadables", LOADABLES / "loadables.py")
    others = (scale, increment, tuned)
    for call in others:
        call(module)
    packed = {
        "launches": launches,
        "checked": checked,
        "others": len(others),
        "entries": len(read),
        "prebaked": tcache.stats()["prebaked"],
        "first_launch_ms": first,
    }
    return {**packed, "outcomes": misses()}


def under_another_variable():
    module = imported("loadables", LOADABLES / "loadables.py")
    return {"outcomes": {"variable of the process, stock kernel": outcome(scale, module),
                         "variable of the process, tuned kernel": outcome(tuned, module)}}  # fmt: skip


def main():
    triton.knobs.compilation.listener = listen
    triton.testing.do_bench = would_tune
    if NULL:
        from triton.runtime import driver

        from tcache._triton.driver import NullDriver

        facts = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        driver.set_active(NullDriver("cuda", 90, 32, facts))
    else:
        torch.zeros(1, device="cuda")
    try:
        found = under_another_variable() if "NVPTX_ENABLE_DUMP" in os.environ else serve()
    finally:
        shutil.rmtree(EDITED)
    home = os.environ["HOME"]
    report = {
        **found,
        "compiled": compiled,
        "tcache": tcache.__file__,
        "tools": [shutil.which(name) for name in ("gcc", "cc", "clang", "file", "ldconfig")],
        "uid": os.getuid(),
        "home": sorted(os.listdir(home)),
        "home_writable": os.access(home, os.W_OK),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
