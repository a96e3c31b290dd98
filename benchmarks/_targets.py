"""What the kernel library must reach on an H200, and how rows of `tcache bench` are held against it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LARGE", "TARGETS", "Target", "judge", "wanted"]

LARGE = 256 << 20
"""Bytes moved from which on a size is large: several times the L2 cache, so that bandwidth is the memory's."""


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        name: what is asked.
        kernels: patterns of the wrappers' names; of those that run one shape the best counts.
        shape: which cases count, by the case's values.
        figure: a row's figure; None where it has none.
        least: what every shape must reach.
        row: which rows count, by what was measured.
    """

    name: str
    kernels: tuple[str, ...]
    shape: Callable[[dict[str, Any]], bool]
    figure: Callable[[dict[str, Any]], float | None]
    least: float
    row: Callable[[dict[str, Any]], bool] = lambda _: True


def _cube(size: int) -> Callable[[dict[str, Any]], bool]:
    return lambda shape: [shape.get(name) for name in "MNK"] == [size] * 3


def _decode(shape: dict[str, Any]) -> bool:
    return 1 <= shape.get("M", 0) <= 16 and "N" in shape and "K" in shape


def _over(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda row: row.get(f"speedup_over_{name}")


def _bandwidth(row: dict[str, Any]) -> float | None:
    percent = row.get("percent_of_bandwidth")
    return None if percent is None else percent / 100


def _any(_: dict[str, Any]) -> bool:
    return True


def _large(row: dict[str, Any]) -> bool:
    return (row.get("bytes") or 0) >= LARGE


def _half(row: dict[str, Any]) -> bool:
    return row.get("dtype") == "bfloat16"


def _streaming(name: str, *kernels: str) -> Target:
    return Target(f"{name}: of the copy's bandwidth, large sizes", kernels, _any, _bandwidth, 0.85, _large)


MATMULS = ("matmul", "matmul_persistent", "linear")
TARGETS = (
    Target("matmul bf16 4096^3: of cuBLAS", MATMULS, _cube(4096), _over("torch"), 0.85, _half),
    Target("matmul bf16 8192^3: of cuBLAS", MATMULS, _cube(8192), _over("torch"), 0.85, _half),
    Target(
        "matmul bf16, M <= 16: of the bandwidth bound", (*MATMULS, "matmul_decode"),
        _decode,
        lambda row: row.get("fraction"), 0.9, _half,
    ),
    Target("matmul bf16, M <= 16: of a copy of as many bytes", ("matmul_decode",), _decode, _over("copy"), 0.9, _half),
    _streaming("softmax", "softmax"),
    _streaming("norms", "layernorm*", "rmsnorm*"),
    _streaming("elementwise", "axpy*", "affine_relu*", "silu_gate"),
    _streaming("quantise", "quantize*", "dequantize"),
    Target(
        "attention forward, 4k to 16k: of torch SDPA's flash", ("attention", "attention_forward"),
        lambda shape: 4096 <= shape.get("S", 0) <= 16384 and not shape.get("past"), _over("flash"), 0.6,
    ),
    Target("grouped GEMM: of the sum of cuBLAS calls", ("grouped_gemm",), _any, _over("cublas"), 0.8),
)  # fmt: skip


def _meant(target: Target, kernel: str, shape: dict[str, Any]) -> bool:
    return any(fnmatch.fnmatchcase(kernel, pattern) for pattern in target.kernels) and target.shape(shape)


def wanted(kernel: str, shape: dict[str, Any]) -> bool:
    """Return whether a case may count for a target: those are measured first."""
    return any(_meant(target, kernel, shape) for target in TARGETS)


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hold rows against the targets.

    Returns:
        For each target: ``figure``, that of its worst shape, of which the best kernel counts; ``passed``, None where
        nothing was measured; ``shapes``, all figures.
    """
    found = []
    for target in TARGETS:
        best: dict[str, dict[str, Any]] = {}
        for row in rows:
            shape = row["shape"]
            figure = target.figure(row) if row["error"] is None else None
            if figure is None or not _meant(target, row["kernel"], shape) or not target.row(row):
                continue
            named = {name: value for name, value in shape.items() if name != "tma"}  # a way, not a size
            family = row["kernel"] if target.row is _large else ""  # kernels that do other things have no best
            key = f"{family} {' '.join(f'{name}={value}' for name, value in sorted(named.items()))}".strip()
            if key not in best or figure > best[key]["figure"]:
                best[key] = {"shape": key, "kernel": row["kernel"], "figure": round(figure, 4)}
        shapes = sorted(best.values(), key=lambda each: each["figure"])
        figure = shapes[0]["figure"] if shapes else None
        found.append(
            {"target": target.name, "least": target.least, "figure": figure,
             "passed": None if figure is None else figure >= target.least, "shapes": shapes}
        )  # fmt: skip
    return found
