"""The contract of recording with each Triton release: what is replayed has the entry that the program's launch had."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import threading
from pathlib import Path

import null_driver
import numpy as np
import pytest
import recorded_kernels as k
import torch
import triton
import triton.language as tl
from click.testing import CliRunner
from triton.runtime.jit import reinterpret
from triton.tools.tensor_descriptor import TensorDescriptor

import tcache
from tcache._triton.driver import stub
from tcache._triton.kernels import KernelInterface, jit_of
from tcache.active import activate
from tcache.cli import main
from tcache.keys.gpu import catalogue
from tcache.manifest import load_manifest
from tcache.resolve import resolve
from tcache.rows import read_rows

GPU = "NVIDIA H200"


@pytest.fixture
def driver(triton_cache, monkeypatch):
    monkeypatch.setenv("TCACHE_GPU_NAME", GPU)
    from triton.runtime import driver as drivers

    before = drivers._active
    forget()
    yield null_driver.activate()
    forget()
    gc.collect()  # since 3.8 a kernel unloads its module when it goes: the driver must still be there
    drivers._active = before


def forget():
    for function in [value for value in vars(k).values() if isinstance(value, KernelInterface)]:
        jit_of(function).device_caches.clear()
    for tuner in (k.tuned_over, k.tuned_under.fn, k.hooked, k.stored):
        tuner.cache.clear()
    for launcher in (k.launched, k.launched_tuned):
        launcher.compiled.clear()


def tensor(dtype=torch.float32, offset=0, shape=(64, 64)):
    count = offset + shape[0] * shape[1]
    return torch.zeros(count, dtype=dtype)[offset:].view(shape)


def with_descriptor(kernel, **kwargs):
    return kernel, (TensorDescriptor.from_tensor(tensor(), [32, 32]), tensor()), {"BLOCK": 32, **kwargs}


X = tensor()
FLOAT8 = torch.zeros(4096, dtype=torch.int8)
LAUNCHES = {
    "plain": lambda: (k.add, (X, X, 4096, 1.5, True, None, "plain"), {}),
    "n is one": lambda: (k.add, (X, X, 1, 1.5, True, None, "plain"), {}),
    "n is zero": lambda: (k.add, (X, X, 0, 1.5, True, None, "plain"), {}),
    "odd": lambda: (k.add, (X, X, 4097, 1.5, True, None, "plain"), {}),
    "negative": lambda: (k.add, (X, X, -7, 1.5, False, None, "plain"), {}),
    "64 bits": lambda: (k.add, (X, X, 2**40, 1.5, False, None, "plain"), {}),
    "negative 64 bits": lambda: (k.add, (X, X, -(2**40) - 1, 1.5, False, None, "plain"), {}),
    "unsigned 64 bits": lambda: (k.add, (X, X, 2**63 + 1, 1.5, False, None, "plain"), {}),
    "integer a": lambda: (k.add, (X, X, 4096, 2, True, None, "plain"), {}),
    "infinite a": lambda: (k.add, (X, X, 4096, float("inf"), True, None, "plain"), {}),
    "unaligned": lambda: (k.add, (tensor(offset=1), X, 4096, 1.5, True, None, "plain"), {}),
    "unaligned bytes": lambda: (k.add, (tensor(torch.int8, 3), X, 4096, 1.5, True, None, "plain"), {}),
    "text": lambda: (k.add, (X, X, 4096, 1.5, True, None, "ünï \"q\" 'x'"), {}),
    "text like a number": lambda: (k.add, (X, X, 4096, 1.5, True, None, "1e5"), {}),
    "text like a range": lambda: (k.add, (X, X, 4096, 1.5, True, None, "1..4"), {}),
    "text like null": lambda: (k.add, (X, X, 4096, 1.5, True, None, "null"), {}),
    "float constant": lambda: (k.add, (X, X, 4096, 1.5, True, None, 0.1), {}),
    "not a number": lambda: (k.add, (X, X, 4096, 1.5, True, None, float("nan")), {}),
    "keywords": lambda: (k.add, (X,), {"y_ptr": X, "n": 64, "a": 0.0, "flag": 0, "none": None, "KIND": True,
                                       "BLOCK": 32}),
    "options": lambda: (k.add, (X, X, 64, 1.0, True, None, "x"), {"num_warps": 2, "num_stages": 1}),
    "wrapped constant": lambda: (k.add, (X, X, 64, 1.0, True, None, tl.constexpr(7)), {}),
    "constant for an argument": lambda: (k.add, (X, X, tl.constexpr(48), 1.0, True, None, "x"), {}),
    **{f"dtype {name}": lambda name=name: (k.add, (tensor(getattr(torch, name)), X, 64, 1.0, True, None, "x"), {})
       for name in ("float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool",
                    "float8_e4m3fn", "float8_e5m2")},
    "reinterpreted": lambda: (k.add, (reinterpret(FLOAT8, tl.float8e5), X, 64, 1.0, True, None, "x"), {}),
    "parameter": lambda: (k.add, (torch.nn.Parameter(X), X, 64, 1.0, True, None, "x"), {}),
    "type as constant": lambda: (k.cast, (X, 64, tl.float16, 32), {}),
    "torch type as constant": lambda: (k.anything, (X, torch.bfloat16, 32), {}),
    "tuple as constant": lambda: (k.anything, (X, (1, "a", None, 2.5), 32), {}),
    "sizes as constant": lambda: (k.anything, (X, X.shape, 32), {}),
    "numpy's integer as constant": lambda: (k.anything, (X, np.int64(48), 32), {}),
    "numpy's float as constant": lambda: (k.anything, (X, np.float64(0.1), 32), {}),
    "numpy's numbers in a constant": lambda: (k.anything, (X, (np.float64(0.1), np.int32(1), np.bool_(True)), 32), {}),
    "flags as constant": lambda: (k.anything, (X, k.Flags.LEFT | k.Flags.RIGHT, 32), {}),
    "enum as constant": lambda: (k.anything, (X, k.Kind.SCALED, 32), {}),
    "function": lambda: (k.apply, (X, k.twice, 32), {}),
    "another function": lambda: (k.apply, (X, k.thrice, 32), {}),
    "tuple": lambda: (k.tupled, (X, (4, 16), 64), {}),
    "tuple with one": lambda: (k.tupled, (X, (1, 17), 64), {}),
    "named tuple": lambda: (k.tupled, (X, k.Sizes(4, 16), 64), {}),
    "tuple of pointers": lambda: (k.pointers, ((X, tensor(offset=1)), 64, 32), {}),
    "loose": lambda: (k.loose, (tensor(offset=1), 16, 32), {}),
    "annotated": lambda: (k.annotated, (X, 16, 2.0, 32), {}),
    "annotated one": lambda: (k.annotated, (X, 1, 2.0, 32), {}),
    "descriptor": lambda: with_descriptor(k.described),
    "heuristics": lambda: (k.chosen, (X, 4096), {"BLOCK": 32}),
    "heuristics odd": lambda: (k.chosen, (X, 4097), {"BLOCK": 32}),
    "single config": lambda: (k.single, (X, 48), {}),
    "below a decorator": lambda: (k.single.fn, (X, 48, 128), {}),
}  # fmt: skip


def entry(compiled):
    """The directory that Triton itself wrote."""
    return Path(next(iter(compiled.metadata_group.values()))).parent.name


def entries(path, store=(), untuned="error"):
    resolved, missing = resolve(load_manifest(path).cases(), catalogue()[GPU], store, untuned)
    assert not missing
    return [row.entry for row in resolved]


def test_what_is_replayed_has_the_very_entries(driver, tmp_path):
    path = tmp_path / "all.launches.json"
    launched = {}
    with tcache.record(path):
        for name, make in LAUNCHES.items():
            kernel, args, kwargs = make()
            # Triton itself takes a named tuple for a tuple that it compiled before
            jit_of(kernel).device_caches.clear()
            launched[name] = entry(kernel[(1,)](*args, **kwargs))
    assert set(entries(path)) == set(launched.values())
    for name, make in LAUNCHES.items():  # each by itself, so that no entry stands for another's
        one = tmp_path / "one" / "x.launches.json"
        with tcache.record(one):
            kernel, args, kwargs = make()
            jit_of(kernel).device_caches.clear()
            kernel[(1,)](*args, **kwargs)
        assert entries(one) == [launched[name]], name
        one.unlink()
    assert len(set(launched.values())) > len(LAUNCHES) - 8


def bench(choose):
    return lambda call, **_: (call(), [choose(), 1.0, 1.0])[1]


@pytest.mark.parametrize("kernel", ["tuned_over", "tuned_under"])
def test_autotuned_launches_replay_through_the_autotuner(driver, tmp_path, kernel, monkeypatch):
    outer = getattr(k, kernel)
    tuner = outer if hasattr(outer, "configs") else outer.fn
    times = iter([1.0, 2.0] * 10)
    monkeypatch.setattr(tuner, "_do_bench", bench(lambda: next(times)))
    tuner.__dict__.pop("do_bench", None)
    path = tmp_path / "tuned.launches.json"
    launched = set()
    with tcache.record(path, counts=True):
        for m, n in [(8, 64), (8, 32), (8, 33), (9, 64), (9, 33), (8, 64)]:
            launched.add(entry(outer[(1,)](X, m, n)))
    rows = load_manifest(path).recordings[0].launches
    assert {row.kernel.rpartition(":")[2] for _, row in rows} == {kernel}
    # n is no key: two of its classes with each of two shape keys, although the second finds them compiled
    shapes = [(row.shape.split()[0], "n" in row.specialization.attributes) for _, row in rows]
    assert {shape for shape, _ in shapes} == {"m=8", "m=9"}
    assert {("m=8", False), ("m=8", True), ("m=9", False), ("m=9", True)} == set(shapes)
    assert sum(row.count for _, row in rows) == 6, "benchmarks are no launches"
    assert launched <= set(entries(path, untuned="all"))
    assert launched == set(entries(path, untuned="default")), "the first config won"


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kernel", ["launched", "launched_tuned"])
def test_what_a_librarys_own_launcher_launches(driver, tmp_path, monkeypatch, kernel, before):
    """FlagGems' decorators: a launcher that keeps compiled kernels, and an autotuner that keeps winners elsewhere."""
    path = tmp_path / "x.launches.json"
    outer = getattr(k, kernel)
    if kernel == "launched_tuned":
        monkeypatch.setattr(outer.fn, "cache", k.Winners())
    made = set()
    with tcache.record(path):
        if not before and kernel == "launched_tuned":  # one that is made while launches are recorded
            monkeypatch.setattr(outer, "fn", k.Tuner(outer.fn.fn))
            monkeypatch.setattr(k, "again", outer, raising=False)
        for args in [(64, 64), (64, 65)] if kernel == "launched_tuned" else [(64,), (65,)]:
            made.add(entry(outer[(1,)](X, *args)))
    assert len(made) == 2
    assert made == set(entries(path, untuned="default"))
    rows = [row for _, row in load_manifest(path).recordings[0].launches]
    assert {row.kernel.rpartition(":")[2] for row in rows} == {f"{kernel}.fn"}

    spelled = tmp_path / "m.yaml"
    spelled.write_text(f"""
version: 1
kernels:
  - kernel: {Path(k.__file__)}:{kernel}
    args: {{x_ptr: {{shape: [64, 64], dtype: float32}}, {"m: 64, " if len(args) > 1 else ""}n: n}}
    grid: ["cdiv(n, BLOCK)"]
    cases: [{{n: [64, 65]}}]
""")
    assert made == set(entries(spelled, untuned="default"))


@pytest.mark.parametrize("before", [False, True])
def test_every_launch_of_a_tcache_autotuner(driver, tmp_path, before):
    """Its own launcher answers what was seen before: not while launches are recorded, and again afterwards."""
    activate(bundles=[], mode="lookup", store=tmp_path / "store")
    if before:
        for _ in range(3):
            k.stored[(1,)](X, 8, 64)
        assert k.stored._launcher.variants
    path = tmp_path / "x.launches.json"
    with tcache.record(path, counts=True):
        for m, times in [(8, 4), (9, 3), (8, 2)]:
            for _ in range(times):
                launched = k.stored[(1,)](X, m, 64)
    rows = [row for _, row in load_manifest(path).recordings[0].launches]
    assert [(row.shape.split()[0], row.count) for row in rows] == [("m=8", 6), ("m=9", 3)]
    assert entries(path, untuned="default") == [entry(launched)] * 2
    k.stored[(1,)](X, 8, 64)
    assert k.stored._launcher.variants, "the block left something behind"


def test_every_launch_on_every_device(driver, tmp_path, monkeypatch):
    activate(bundles=[], mode="lookup", store=tmp_path / "store")
    path = tmp_path / "x.launches.json"
    with tcache.record(path, counts=True):
        for device in (0, 1, 0):
            monkeypatch.setattr(driver, "get_current_device", lambda device=device: device)
            for m, times in [(8, 4), (9, 3)]:
                for _ in range(times):
                    k.stored[(1,)](X, m, 64)
    rows = [row for _, row in load_manifest(path).recordings[0].launches]
    assert [(row.shape.split()[0], row.count) for row in rows] == [("m=8", 12), ("m=9", 9)]
    assert type(k.stored.cache).__name__ == "Winners", "the block left something behind"


def test_decorating_while_launches_are_recorded_asks_for_no_device(driver, tmp_path, monkeypatch):
    """It would set up CUDA while modules are imported, and a server that forks afterwards could not use it."""

    def asked():
        raise AssertionError

    with tcache.record(tmp_path / "x.launches.json"), monkeypatch.context() as patched:
        patched.setattr(driver, "get_current_device", asked)
        made = tcache.autotune(k.CONFIGS, key=["m"])(k.stored.fn)
        patched.undo()
        assert type(made.cache).__name__ == "_Winners"


def test_a_tensor_as_a_constant_is_recorded_with_its_reason(driver, tmp_path):
    path = tmp_path / "x.launches.json"
    with tcache.record(path):
        k.anything[(1,)](X, (1, X), 32)
    [line] = load_manifest(path).unreplayable()
    assert "argument SPEC is a constexpr, and a tensor was passed" in line


def test_a_recording_that_cannot_begin_leaves_nothing(driver, tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("tcache._triton.watch._watch_tuner", fail)
    with pytest.raises(ZeroDivisionError), tcache.record(tmp_path / "a.json"):
        pass
    monkeypatch.undo()
    monkeypatch.setenv("TCACHE_GPU_NAME", GPU)
    with tcache.record(tmp_path / "a.json"):
        k.add[(1,)](X, X, 1, 1.5, True, None, "later")
    assert len(entries(tmp_path / "a.json")) == 1


def test_a_hook_that_changes_arguments_runs_again(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(k.hooked, "_do_bench", bench(lambda: 1.0))
    k.hooked.__dict__.pop("do_bench", None)
    path = tmp_path / "hooked.launches.json"
    with tcache.record(path):
        args = (TensorDescriptor.from_tensor(tensor(), [64, 64]), tensor(), 1)
        launched = entry(k.hooked[(1,)](*args))
    assert entries(path, untuned="default") == [launched]


def test_grid_shape_and_gpu_are_recorded_and_launches_only_once(driver, tmp_path):
    path = tmp_path / "x.launches.json"
    k.add[(1,)](X, X, 4096, 1.5, True, None, "plain")  # before the block: recorded when it is made again
    with tcache.record(path, counts=True):
        for n in (4096, 4112, 4096):
            k.add[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]), 2)](X, X, n, 1.5, True, None, "plain")
    k.add[(1,)](X, X, 1, 1.5, True, None, "after")
    [(_, row)] = load_manifest(path).recordings[0].launches
    assert row.kernel.endswith("recorded_kernels.py:add")
    assert row.grid == [64, 2]
    assert row.gpus == [GPU]
    assert row.count == 3
    assert row.specialization.signature["x_ptr"] == "*fp32"
    assert row.options == {}
    assert type(k.add.device_caches[driver.get_current_device()][0]) is dict, "the block left something behind"


def test_what_is_warmed_up_is_recorded_and_no_launch(driver, tmp_path):
    """Programs compile by ``kernel.warmup``, ask for registers, and launch by the handle: they need its entry."""
    path = tmp_path / "x.launches.json"
    with tcache.record(path, counts=True):
        warmed = k.add.warmup(X, X, 17, 1.5, True, None, "warmed", grid=(1,))
        k.add.warmup(X, X, 17, 1.5, True, None, "warmed", grid=(1,))
        warmed[(1, 1, 1)](X, X, 17, 1.5, True, None, "warmed", 64)
        dtypes = k.add.warmup(torch.float16, torch.float32, 18, 1.5, True, None, "warmed", grid=(1,))
        configs = k.single.warmup(X, 48, grid=(1,))
        k.add[(1,)](X, X, 19, 1.5, True, None, "warmed")  # as the first
    rows = [row for _, row in load_manifest(path).recordings[0].launches]
    assert {entry(made) for made in (warmed, dtypes, *configs)} == set(entries(path))
    assert [row.count for row in rows] == [1, None, None]
    assert driver.launches


def test_threads(driver, tmp_path):
    path = tmp_path / "x.launches.json"
    with tcache.record(path, counts=True):
        go = threading.Barrier(8)

        def launch(number):
            go.wait()
            for n in range(1, 40):
                k.loose[(1,)](X, n, 32 << number % 4)

        threads = [threading.Thread(target=launch, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = [row for _, row in load_manifest(path).recordings[0].launches]
    assert len(rows) == 4
    assert sum(row.count for row in rows) == 8 * 39


def test_what_cannot_be_imported_is_recorded_with_its_reason(driver, tmp_path):
    path = tmp_path / "x.launches.json"
    with tcache.record(path):
        k.nested()[(1,)](X, 32)
        k.apply[(1,)](X, k.twice, 32)
    manifest = load_manifest(path)
    [line] = manifest.unreplayable()
    assert "inside" in line
    assert "made inside a function" in line
    assert len(list(manifest.cases())) == 1


def test_one_recording_at_a_time(driver, tmp_path):
    with tcache.record(tmp_path / "a.json"):
        again = tcache.record(tmp_path / "b.json")
        with pytest.raises(tcache.TcacheError, match="records already"), again:
            pass
    k.add[(1,)](X, X, 1, 1.5, True, None, "later")
    assert not (tmp_path / "b.json").exists() or not read_rows(tmp_path / "b.json")[0]


def test_replay_works_for_other_targets(driver, tmp_path):
    path = tmp_path / "x.launches.json"
    with tcache.record(path):
        k.add[(1,)](X, X, 4096, 1.5, True, None, "plain")
    found = {name: resolve(load_manifest(path).cases(), catalogue()[name], ())[0][0].entry for name in
             (GPU, "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X")}  # fmt: skip
    assert len(set(found.values())) == 3
    with stub("cuda", 80, 32):
        pass
    assert json.loads(path.read_text().splitlines()[0])["schema"] == 1


def test_generalized_covers_what_was_recorded(driver, tmp_path, monkeypatch):
    path, output = tmp_path / "rec" / "all.launches.json", tmp_path / "all.yaml"
    monkeypatch.setattr(k.tuned_over, "_do_bench", bench(lambda: 1.0))
    k.tuned_over.__dict__.pop("do_bench", None)
    with tcache.record(path):
        for make in LAUNCHES.values():
            kernel, args, kwargs = make()
            kernel[(1,)](*args, **kwargs)
        for m, n in [(64, 64), (64, 65), (1, 128), (4096, 128)]:
            k.tuned_over[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](X, m, n)
        for rows in (16, 17, 1):
            x = tensor(shape=(rows, 48))
            k.add[(triton.cdiv(x.numel(), 64),)](x, x.t(), x.numel(), 1.0, True, None, rows)
    done = CliRunner().invoke(main, ["manifest", "generalize", str(path), "-o", str(output)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = output.read_text()
    assert set(entries(path, untuned="all")) <= set(entries(output, untuned="all")), text
    assert "cdiv(n, BLOCK)" in text
    items = [
        item for item in load_manifest(output).model.kernels if getattr(item, "kernel", "").endswith(":tuned_over")
    ]
    [item] = items
    assert [case.model_extra for case in item.cases] == [{"m": 64, "n": [64, 65]}, {"m": [1, 4096], "n": 128}]
    assert "# m: 3 values (1, 64, 4096); classes: 1, divisible by 16" in text
    assert "y_ptr: {shape: [48, KIND], dtype: float32, stride: [1, 48]}" in text
    assert "x_ptr: {shape: [64, 64], dtype: dtype}" in text
    assert (tmp_path / "all.rest.launches.json").is_file(), "descriptors and functions stay as they were recorded"


def test_what_others_compile_and_launch_is_recorded_with_its_reason(driver, tmp_path):
    """torch.compile hands generated kernels to triton.compile and launches them by itself."""
    from triton.compiler import ASTSource

    path = tmp_path / "x.launches.json"
    seen = []
    triton.knobs.compilation.listener = lambda **event: seen.append(event["src"].name)
    try:
        with tcache.record(path):
            k.loose[(1,)](X, 16, 64)
            constants = {(2,): 32}
            signature = {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
            triton.compile(ASTSource(k.loose, signature, constants), target=driver.get_current_target())
    finally:
        triton.knobs.compilation.listener = None
    assert seen == ["loose", "loose"], "whoever listened before still does"
    manifest = load_manifest(path)
    [line] = manifest.unreplayable()
    assert "not launched by Triton" in line
    assert str(tmp_path) not in path.read_text()
    assert len(list(manifest.cases())) == 1


def test_a_kernel_that_differs_from_the_recorded_one_is_told(driver, tmp_path):
    path = tmp_path / "x.launches.json"
    with tcache.record(path):
        k.loose[(1,)](X, 16, 64)
    [same] = resolve(load_manifest(path).cases(), catalogue()[GPU], ())[0]
    path.write_text(path.read_text().replace('"source":"', '"source":"0'))
    [other] = resolve(load_manifest(path).cases(), catalogue()[GPU], ())[0]
    assert same.notice is None
    assert "recorded from another source" in other.notice


def test_a_function_among_the_arguments_that_moves_is_the_same_launch(driver, tmp_path, monkeypatch):
    """A line added above it changes Triton's key of everything; a recording that is continued does not double."""
    path = tmp_path / "x.launches.json"
    text = Path(k.__file__).read_text()
    monkeypatch.setitem(sys.modules, "moved", None)
    made = set()
    for number, source in enumerate((text, text.replace("\n@triton.jit\ndef twice", "\n\n\n@triton.jit\ndef twice"))):
        file = tmp_path / str(number) / "moved.py"
        file.parent.mkdir()
        file.write_text(source)
        spec = importlib.util.spec_from_file_location("moved", file)
        sys.modules["moved"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        file = file.rename(tmp_path / "moved.py")
        module.__file__ = str(file)
        with tcache.record(path, counts=True):
            made.add(entry(module.apply[(1,)](X, module.twice, 64)))
    assert len(made) == 2
    [(_, row)] = load_manifest(path).recordings[0].launches
    assert row.count == 2
