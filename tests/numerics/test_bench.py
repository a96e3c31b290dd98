"""A bench from manifest to rows: real kernels under Triton's interpreter, on the CPU. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

import torch
from click.testing import CliRunner

from tcache.bench.cases import Options, dtype_of, measure_case
from tcache.bench.peaks import Peaks
from tcache.bench.plot import roofline_svg
from tcache.bench.precision import float32_products
from tcache.bench.report import row_of
from tcache.bench.run import Run, select
from tcache.bench.timing import Plan, Sample
from tcache.cli import main
from tcache.errors import ManifestError
from tcache.manifest import load_manifest
from tcache.replay.companions import companion, real_arguments
from tcache.replay.launches import load_target, run_case

ROOT = Path(__file__).parents[2]
OPS = """\
import torch
import triton
import triton.language as tl

import tcache


@tcache.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def gather_kernel(x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.load(index_ptr + o, mask=o < n)
    tl.store(y_ptr + o, tl.load(x_ptr + where, mask=o < n), mask=o < n)


def gather(x, index, scale=1.0):
    y = torch.empty_like(x)
    gather_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, index, y, x.numel())
    return y


def gather_inputs(x, index, scale=1.0):
    index.copy_(torch.randperm(x.numel(), device=x.device))


def gather_reference(x, index, scale=1.0):
    return x[index]


def gather_torch(x, index, scale=1.0):
    return torch.take(x, index)


def gather_flops(x, index, scale=1.0):
    return 0


def gather_bytes(x, index, scale=1.0):
    return x.numel() * 2 * x.element_size() + index.numel() * index.element_size()


@triton.jit
def double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + o, mask=o < n) * 2, mask=o < n)


def double_(x):
    double_kernel[(1,)](x, x.numel(), BLOCK=128)


def double__reference(x):
    x.mul_(2)


def off_by_one(x):
    double_(x)
    return x


def off_by_one_reference(x):
    return x * 2 + 1


def other_shape(x):
    return x


def other_shape_reference(x):
    return x[1:]


def picky(x):
    raise ValueError("expected two vectors")


def sly(x):
    return x


def sly_inputs(x):
    raise IndexError("no such row")


def plain(x):
    double_(x)


def large(x):
    return x + 1


def large_reference(x):
    raise torch.OutOfMemoryError("too large")


def large_torch(x):
    return x + 1


def lonely(x):
    return x.clone()


def lonely_reference(x):
    return x.clone()


def lonely_torch(x):
    raise NotImplementedError("not on this device")


def loose(x):
    return x * 1.01


def loose_reference(x):
    return x


def loose_tolerance(x):
    return 0.02, 0.0
"""
ONE = """\
version: 1
kernels:
  - call: ops.py:{name}
    args: {{x: {{shape: [n], dtype: float32}}{more}}}
    cases: [{{n: {n}}}]
"""


FRONT = """\
import functools
import sys

sys.path.insert(0, FOLDER)
import ops


@functools.wraps(ops.gather)
def gather(x, index):
    return ops.gather(x, index)


class Namespace:
    double_ = staticmethod(ops.double_)

    @staticmethod
    def double__flops(x):
        return 7
"""


class Cpu:
    """This machine, as a bench sees one: the same interface, the processor's own clock."""

    device, name, shrink = "cpu", "NVIDIA H200", 64

    def __init__(self):
        self.calls = 0

    def clock(self, calls):
        found = []
        for call in calls:
            begin = time.perf_counter()
            call()
            ms = (time.perf_counter() - begin) * 1e3
            self.calls += 1
            found.append(Sample(ms, ms, ahead=True))
        return found

    def facts(self):
        return {"gpu": "a processor", "torch": torch.__version__, "triton": "-"}

    def free_bytes(self):
        return 1 << 30

    def release_memory(self):
        pass

    def synchronize(self):
        pass

    def is_faulted(self):
        return False


OPTIONS = Options(Plan(budget_ms=1.0, fewest=3, most=4, batch=4), compiled=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ops.py").write_text(OPS)
    return tmp_path


def case_of(folder, name, more="", n=100):
    path = folder / f"{name}.yaml"
    path.write_text(ONE.format(name=name, more=more, n=n))
    [case] = load_manifest(path).cases()
    return case


INDEX = ", index: {shape: [n], dtype: int64}"


def test_inputs_are_filled_in_and_the_same_for_one_seed(folder):
    case = case_of(folder, "gather", INDEX)
    wrapper = load_target(case)
    torch.manual_seed(3)
    first = real_arguments(case, wrapper, "cpu")
    assert sorted(first["index"].tolist()) == list(range(100))
    torch.manual_seed(3)
    again = real_arguments(case, wrapper, "cpu")
    assert torch.equal(first["index"], again["index"])
    assert torch.equal(first["x"], again["x"])


def test_a_companion_that_raises_is_named(folder):
    case = case_of(folder, "sly")
    with pytest.raises(
        ManifestError,
        match=r"sly.yaml:5:13: ops.py:sly_inputs failed for n=100 at .*ops.py:\d+: IndexError: no such row",
    ) as caught:
        real_arguments(case, load_target(case), "cpu")
    assert "exactly the arguments of sly" in caught.value.hint


def test_tuning_runs_a_case_on_inputs_filled_in(folder, monkeypatch):
    """What `tcache tune` does with a case, but for the device."""
    replaying = sys.modules["tcache.replay.launches"]  # the package has a function of that name
    monkeypatch.setattr(replaying, "real_arguments", partial(real_arguments, device="cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    case = case_of(folder, "gather", INDEX)
    seen = []
    module = load_target(case).__globals__
    original = module["gather_kernel"]

    class Watching:
        def __getitem__(self, grid):
            return lambda x, index, *rest: seen.append(index.clone()) or original[grid](x, index, *rest)

    monkeypatch.setitem(module, "gather_kernel", Watching())
    run_case(case)
    assert sorted(seen[0].tolist()) == list(range(100))


def test_companions_of_a_reexported_wrapper(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "ops", raising=False)
    (folder / "front.py").write_text(FRONT.replace("FOLDER", repr(str(folder))))
    path = folder / "front.yaml"
    path.write_text(ONE.format(name="gather", more=INDEX, n=4).replace("ops.py", "front.py"))
    [case] = load_manifest(path).cases()
    assert companion(case, load_target(case), "flops").__name__ == "gather_flops"
    path.write_text(ONE.format(name="Namespace.double_", more="", n=4).replace("ops.py", "front.py"))
    [case] = load_manifest(path).cases()
    assert companion(case, load_target(case), "flops")(None) == 7
    assert companion(case, load_target(case), "reference").__name__ == "double__reference"
    assert companion(case, load_target(case), "bytes") is None


def test_a_case_with_everything(folder):
    machine = Cpu()
    found = measure_case(case_of(folder, "gather", INDEX), machine, OPTIONS)
    assert found.error is None
    assert (found.agreement.largest_error, found.agreement.problem, found.against) == (0.0, None, "reference")
    assert (found.flops, found.moved, found.dtype, found.peak) == (0, 100 * (8 + 8), "float32", "tf32")
    assert set(found.times) == {"tcache", "torch"}
    assert found.torch_is == "gather_torch"
    assert all(timed.ms.count in (3, 4) and timed.ms.median > 0 and timed.gpu_only for timed in found.times.values())
    [launch] = found.launches
    assert (launch["kernel"], launch["chosen"], launch["registers"]) == ("gather_kernel", "first", None)
    assert launch["config"].startswith("BLOCK=64 |")
    assert machine.calls >= 6


def test_a_reference_is_in_float32_whatever_the_program_set(folder):
    """Containers for training set TF32; what a user of torch would call is timed as the program has it."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    source = (
        "def noted_reference(x):\n    SEEN.append(torch.backends.cuda.matmul.allow_tf32)\n    return x * 2\n\n\n"
        "def noted_torch(x):\n    TIMED.append(torch.backends.cuda.matmul.allow_tf32)\n    return x * 2\n\n\n"
        "def noted(x):\n    return x * 2\n\n\nSEEN, TIMED = [], []\n"
    )
    (folder / "ops.py").write_text(f"{OPS}\n\n{source}")
    case = case_of(folder, "noted")
    settings.allow_tf32 = True
    try:
        found = measure_case(case, Cpu(), OPTIONS)
        assert settings.allow_tf32
    finally:
        settings.allow_tf32 = before
    assert found.error is None
    module = load_target(case).__globals__
    assert module["SEEN"] == [False]
    assert set(module["TIMED"]) == {True}


def test_a_wrapper_that_writes_its_argument(folder):
    found = measure_case(case_of(folder, "double_"), Cpu(), OPTIONS)
    assert (found.error, found.agreement.largest_error) == (None, 0.0)
    assert found.torch_is == "double__reference"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "off_by_one",
            "wrong result: 100 of 100 values differ by more than 1e-05 relative and 1e-06 absolute; the largest diff",
        ),
        ("other_shape", "wrong result: (100,) torch.float32, the reference (99,) torch.float32"),
        ("picky", "ops.py:picky refused n=100: ValueError: expected two vectors"),
        ("sly", "ops.py:sly_inputs failed for n=100"),
        ("absent", "ops.py has no function 'absent'"),
    ],
)
def test_what_goes_wrong_is_told(folder, name, said):
    found = measure_case(case_of(folder, name), Cpu(), OPTIONS)
    assert said in found.error
    assert ("tcache" in found.times) == name.startswith("o")  # a wrong result is timed all the same


def test_without_companions_there_are_times_and_nothing_else(folder):
    found = measure_case(case_of(folder, "plain"), Cpu(), OPTIONS)
    assert (found.error, found.agreement, found.flops, found.moved) == (None, None, None, None)
    assert set(found.times) == {"tcache"}


def test_torch_stands_in_for_a_reference_that_does_not_fit(folder):
    found = measure_case(case_of(folder, "large"), Cpu(), OPTIONS)
    assert (found.error, found.against, found.torch_is) == (None, "torch", "large_torch")


def test_an_alternative_that_fails_does_not_fail_the_case(folder):
    found = measure_case(case_of(folder, "lonely"), Cpu(), OPTIONS)
    assert found.error is None
    assert found.times["torch"].error == "NotImplementedError: not on this device"
    assert found.times["tcache"].ms.median > 0


def test_further_alternatives(folder):
    def more(case, given):
        def broken():
            raise RuntimeError("not here")

        return {"sorted": given["x"].sort, "broken": broken}

    found = measure_case(case_of(folder, "lonely"), Cpu(), Options(OPTIONS.plan, compiled=False, more=more))
    assert (found.error, found.times["broken"].error) == (None, "RuntimeError: not here")
    assert found.times["sorted"].ms.count == found.times["tcache"].ms.count
    row = row_of(found, Peaks(1.0, {"bfloat16": 1.0}, {"tf32": "not here"}))
    assert row["speedup_over_sorted"] == row["times"]["sorted"]["median_ms"] / row["times"]["tcache"]["median_ms"]
    assert (row["speedup_over_broken"], row["peak"]) == (None, "bfloat16")


def test_a_stated_tolerance(folder):
    found = measure_case(case_of(folder, "loose"), Cpu(), OPTIONS)
    assert found.error is None
    assert found.agreement.largest_error > 1e-3


def test_a_run(folder):
    """The library's matmul beside a kernel that is wrong: everything is kept, and can be drawn."""
    path = folder / "all.yaml"
    path.write_text(
        f"""\
version: 1
kernels:
  - call: {ROOT}/kernels/matmul.py:matmul
    args: {{a: {{shape: [M, K], dtype: dtype}}, b: {{shape: [K, N], dtype: dtype}}}}
    cases: [{{M: [16, 33], N: 32, K: 40, dtype: [float32, float16]}}]
  - call: ops.py:off_by_one
    args: {{x: {{shape: [n], dtype: float32}}}}
    cases: [{{n: 10}}, {{n: 11, gpus: NVIDIA L4}}]
  - kernel: ops.py:double_kernel
    args: {{x_ptr: {{shape: [n], dtype: float32}}, n: n, BLOCK: 16}}
    grid: [1]
    cases: [{{n: 10}}]
""".replace("gpus: NVIDIA L4", "gpus: [NVIDIA L4]")
    )
    everything = list(load_manifest(path).cases())
    cases = select(everything, "NVIDIA H200")
    assert [str(case).rpartition("/")[2] for case in cases] == [
        *(f"matmul.py:matmul M={m} N=32 K=40 dtype={t}" for m in (16, 33) for t in ("float32", "float16")),
        "ops.py:off_by_one n=10",
    ]
    assert [dtype_of(case) for case in cases] == ["float32", "float16", "float32", "float16", "float32"]
    assert select(everything, "NVIDIA H200", "matmul M=33 ") == cases[2:4]
    assert select(everything, "NVIDIA H200", "M=3 ") == []  # M=33 is another value
    assert select(everything, "NVIDIA H200", "M=* dtype=float16") == cases[1:4:2]
    run = Run(cases, Cpu(), OPTIONS)
    for case in cases:
        run.add(case)
    run.finish()
    document = json.loads(json.dumps(run.document()))
    assert set(document["peaks"]["used"]["tflops"]) == {"bfloat16", "tf32", "float16"}
    assert document["peaks"]["end"]["gbps"] > 0
    *good, bad = document["rows"]
    assert [row["error"] for row in good] == [None] * 4
    assert bad["error"].startswith("wrong result")
    for row in good:
        used = document["peaks"]["used"]["tflops"][row["peak"]]
        assert row["flops"] == 2 * row["shape"]["M"] * 32 * 40
        assert row["tflops"] == pytest.approx(row["flops"] / row["times"]["tcache"]["median_ms"] / 1e9)
        assert row["percent_of_flops"] == pytest.approx(100 * row["tflops"] / used)
        assert row["speedup_over_torch"] > 0
        assert row["launches"][0]["kernel"] == "matmul_kernel"
    assert roofline_svg(document).count('<path class="point"') == 4 + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it imports its compiler
def test_torch_compile_is_an_alternative(folder):
    found = measure_case(case_of(folder, "large"), Cpu(), Options(OPTIONS.plan, compiled=True))
    assert found.error is None
    compiled = found.times["compiled"]
    assert (compiled.ms is None) == (compiled.error is not None)  # needs a C++ compiler on a CPU


def test_the_command(folder, monkeypatch):
    """Everything but the clock is what runs on a GPU."""
    monkeypatch.setattr("tcache.bench.machine.Gpu", Cpu)
    monkeypatch.setattr("tcache.bench.timing.QUICK", OPTIONS.plan)
    (folder / "all.yaml").write_text(f"""\
version: 1
kernels:
  - call: {ROOT}/kernels/matmul.py:matmul
    args: {{a: {{shape: [M, K], dtype: float16}}, b: {{shape: [K, N], dtype: float16}}}}
    cases: [{{M: 16, N: 32, K: 40}}]
  - call: ops.py:off_by_one
    args: {{x: {{shape: [n], dtype: float32}}}}
    cases: [{{n: 10}}]
""")
    given = ["bench", str(folder / "all.yaml"), "--quick", "--no-compile", "--plot", str(folder / "roofline.svg")]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 1, done.output
    assert re.search(
        r"^matmul *\n.*\nM=16 N=32 K=40 .*float16 .* BLOCK_K=128 .*\(first\) *$", done.stdout, re.MULTILINE
    )
    assert re.search(r"^off_by_one *\n.*\nn=10 .* FAILED", done.stdout, re.MULTILINE)
    assert "measured peaks: copy " in done.stdout
    assert re.search(r"^\[1/2\] .*matmul M=16 N=32 K=40 .* \(torch .*x\)$", done.stderr, re.MULTILINE)
    assert "note: 1 cases ran configs not tuned for their shape" in done.stderr
    assert re.search(r"error: .*all.yaml:8:13: ops.py:off_by_one n=10: wrong result: 10 of 10", done.stderr)
    assert (folder / "roofline.svg").read_text().startswith("<svg")
    done = CliRunner().invoke(main, [*given[:4], "--json", "--case", "matmul"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["version"], len(document["rows"])) == (1, 1)
    assert "left out" not in done.stderr
    for more, said in [
        (["--case", "nothing"], "--case 'nothing' matches no case"),
        (["--plot", str(folder / "no" / "r.svg")], "no such directory"),
        (["--store", str(folder / "no")], "no such store"),
    ]:
        done = CliRunner().invoke(main, [*given[:2], *more])
        assert done.exit_code == 2
        assert said in done.stderr


def test_launches_without_companions_are_left_out_and_told_of(folder, monkeypatch):
    monkeypatch.setattr("tcache.bench.machine.Gpu", Cpu)
    monkeypatch.setattr("tcache.bench.timing.QUICK", OPTIONS.plan)
    spelled = """\
  - kernel: ops.py:double_kernel
    args: {x_ptr: {shape: [n], dtype: float32}, n: n, BLOCK: 16}
    grid: [1]
    cases: [{n: [10, 11]}, {n: 12, gpus: [NVIDIA L4]}]
  - launches: serve.json
"""
    row = {"schema": 1, "id": "a", "kernel": "ops.py:double_kernel", "args": [1]}
    (folder / "serve.json").write_text(json.dumps(row) + "\n")
    (folder / "all.yaml").write_text(ONE.format(name="loose", more="", n=10) + spelled)
    given = ["bench", str(folder / "all.yaml"), "--quick", "--no-compile", "--json"]
    done = CliRunner().invoke(main, given)
    assert (done.exit_code, len(json.loads(done.stdout)["rows"])) == (0, 1)
    assert "note: 3 cases of 'kernel:' or 'launches:' items are left out" in done.stderr
    for pattern in (["--case", "double_kernel"], []):
        if not pattern:
            (folder / "all.yaml").write_text("version: 1\nkernels:\n" + spelled)
        done = CliRunner().invoke(main, [*given[:-1], *pattern])
        assert done.exit_code == 2
        assert "nothing to bench on NVIDIA H200: no case of a 'call:' item is for it" in done.stderr


def test_what_was_measured_is_printed_where_the_picture_cannot_be_written(folder, monkeypatch):
    monkeypatch.setattr("tcache.bench.machine.Gpu", Cpu)
    monkeypatch.setattr("tcache.bench.timing.QUICK", OPTIONS.plan)
    (folder / "all.yaml").write_text(ONE.format(name="loose", more="", n=10))
    given = ["bench", str(folder / "all.yaml"), "--quick", "--no-compile", "--json"]
    done = CliRunner().invoke(main, [*given, "--plot", str(folder / f"{'r' * 300}.svg")])
    assert done.exit_code == 1
    assert len(json.loads(done.stdout)["rows"]) == 1
    assert "cannot be written: File name too long" in done.stderr


def test_an_interrupted_run_prints_what_it_has(folder, monkeypatch):
    monkeypatch.setattr("tcache.bench.machine.Gpu", Cpu)
    monkeypatch.setattr("tcache.bench.timing.QUICK", OPTIONS.plan)
    (folder / "all.yaml").write_text(ONE.format(name="loose", more="", n="[10, 11, 12]"))
    add, done = Run.add, []

    def interrupted(run, case):
        if done:
            raise KeyboardInterrupt
        done.append(case)
        return add(run, case)

    monkeypatch.setattr(Run, "add", interrupted)
    found = CliRunner().invoke(main, ["bench", str(folder / "all.yaml"), "--quick", "--no-compile", "--json"])
    assert found.exit_code == 130
    assert [row["shape"] for row in json.loads(found.stdout)["rows"]] == [{"n": 10}]
    assert "note: interrupted after 1 of 3 cases" in found.stderr


def test_after_a_fault_nothing_is_measured(folder):
    class Faulted(Cpu):
        def is_faulted(self):
            return True

    cases = [case_of(folder, "picky"), case_of(folder, "plain")]
    run = Run(cases, Faulted(), OPTIONS)
    for case in cases:
        run.add(case)
    run.finish()
    assert "faulted" in run.stopped
    assert ["picky" in run.found[0].error, run.found[1].error] == [True, "not run: the GPU faulted before"]
    assert run.document()["peaks"]["end"] is None


def _precisions():
    places = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    found = [place.fp32_precision for place in places]
    for ask in (torch.get_float32_matmul_precision, lambda: places[0].allow_tf32):
        try:
            found.append(ask())
        except RuntimeError:
            found.append("newer alone")
    return found


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("setting", ["highest", "high", "medium", "newer"])
def test_precision_of_products_is_put_back(setting, tf32):
    before, places = _precisions(), (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    try:
        if setting == "newer":
            places[0].fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(setting)
        programs = _precisions()
        with float32_products(tf32=tf32):
            assert _precisions()[2:] == (["high", True] if tf32 else ["highest", False])
        assert _precisions() == programs
    finally:
        torch.set_float32_matmul_precision(before[2])
        for place, value in zip(places, before, strict=False):
            place.fp32_precision = value
    assert _precisions() == before
