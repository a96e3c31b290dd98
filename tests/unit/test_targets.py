"""How rows of a bench are held against the library's targets, by rows made up for it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _targets import LARGE, TARGETS, judge, wanted


def row(kernel, dtype="bfloat16", error=None, *, shape, **figures):
    return {"kernel": kernel, "dtype": dtype, "shape": shape, "error": error, **figures}


def verdicts(*rows):
    found = judge(list(rows))
    assert [each["target"] for each in found] == [target.name for target in TARGETS]
    return {each["target"]: each for each in found}


def cube(n):
    return {"M": n, "N": n, "K": n}


def test_nothing_measured_is_no_verdict():
    assert {each["passed"] for each in verdicts().values()} == {None}


def test_the_best_kernel_of_a_shape_counts_and_the_worst_shape():
    found = verdicts(
        row("matmul", shape=cube(4096), speedup_over_torch=0.8),
        row("matmul_persistent", shape={**cube(4096), "tma": True}, speedup_over_torch=0.91),
        row("matmul_persistent", shape={**cube(4096), "tma": False}, speedup_over_torch=0.7),
        row("matmul", shape=cube(8192), speedup_over_torch=0.84),
        row("matmul", "float32", shape=cube(8192), speedup_over_torch=3.0),
        row("matmul_persistent", shape=cube(8192), speedup_over_torch=0.99, error="wrong result"),
    )
    first, second = found["matmul bf16 4096^3: of cuBLAS"], found["matmul bf16 8192^3: of cuBLAS"]
    assert (first["figure"], first["passed"], first["shapes"][0]["kernel"]) == (0.91, True, "matmul_persistent")
    assert (second["figure"], second["passed"], len(second["shapes"])) == (0.84, False, 1)


def test_decode_shapes():
    shape = {"M": 16, "N": 4096, "K": 4096}
    found = verdicts(
        row("matmul", shape=dict(reversed(shape.items())), fraction=0.5),
        row("matmul_decode", shape=shape, fraction=0.92),
        row("matmul_decode", shape={**shape, "M": 1}, fraction=0.9),
        row("matmul_decode", shape={**shape, "M": 17}, fraction=0.1, speedup_over_copy=0.1),
        row("matmul_decode", shape={**shape, "M": 4}, fraction=0.95, speedup_over_copy=0.89),
        row("linear", shape={**shape, "M": 2}, fraction=0.99, speedup_over_copy=0.1),
    )
    bound = found["matmul bf16, M <= 16: of the bandwidth bound"]
    assert (bound["figure"], bound["passed"]) == (0.9, True)
    assert [each["shape"] for each in bound["shapes"]] == [f"K=4096 M={m} N=4096" for m in (1, 16, 4, 2)]
    copy = found["matmul bf16, M <= 16: of a copy of as many bytes"]
    assert (copy["figure"], copy["passed"]) == (0.89, False)
    assert [each["shape"] for each in copy["shapes"]] == ["K=4096 M=4 N=4096"]


def test_bandwidth_of_large_sizes_only_and_of_each_kernel():
    shape = {"M": 65536, "N": 4096}
    found = verdicts(
        row("layernorm", shape=shape, bytes=LARGE, percent_of_bandwidth=97.0),
        row("rmsnorm_backward", shape=shape, bytes=2 * LARGE, percent_of_bandwidth=84.0),
        row("rmsnorm", shape={"M": 1, "N": 8}, bytes=LARGE - 1, percent_of_bandwidth=1.0),
        row("softmax", shape=shape, bytes=None, percent_of_bandwidth=None),
    )
    norms, softmax = (found[f"{name}: of the copy's bandwidth, large sizes"] for name in ("norms", "softmax"))
    assert (norms["figure"], norms["passed"], len(norms["shapes"])) == (0.84, False, 2)
    assert softmax["passed"] is None


def test_attention_and_groups():
    found = verdicts(
        row("attention", shape={"S": 4096, "past": 0}, speedup_over_flash=0.61),
        row("attention", shape={"S": 8192}, speedup_over_flash=0.7),
        row("attention", shape={"S": 2048, "past": 0}, speedup_over_flash=0.1),
        row("attention", shape={"S": 4096, "past": 4096}, speedup_over_flash=0.1),
        row("grouped_gemm", shape={"T": 16}, speedup_over_torch=2.0, speedup_over_cublas=0.79),
    )
    attention = found["attention forward, 4k to 16k: of torch SDPA's flash"]
    assert attention["figure"] == 0.61
    assert attention["passed"]
    assert found["grouped GEMM: of the sum of cuBLAS calls"]["passed"] is False


def test_what_is_measured_first():
    assert wanted("matmul", cube(4096))
    assert not wanted("matmul", cube(2048))
    assert wanted("affine_relu_", {"n": 4})
    assert not wanted("attention_backward", {"S": 4096})
