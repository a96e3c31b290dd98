"""What this machine can do, measured: a large copy, and a large matmul of each dtype that is asked for."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcache.bench.precision import float32_products
from tcache.bench.roofline import Quantiles, Roof, matmul_flops
from tcache.bench.timing import Plan, interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tcache.bench.timing import Clock

__all__ = ["Peaks", "measure", "peak_of"]

COPY_BYTES = 1 << 30
SIZE = 8192
SMALL_SIZE = 4096
FALLBACK = "bfloat16"

_PEAKS = {
    "bfloat16": "bfloat16", "float16": "float16", "float32": "tf32", "float64": "float64", "int8": "int8",
    "float8_e4m3fn": "float8", "float8_e5m2": "float8", "float8_e4m3fnuz": "float8", "float8_e5m2fnuz": "float8",
}  # fmt: skip


def peak_of(dtype: str | None) -> str:
    """Return the name of the matmul peak that a dtype is measured against.

    float32 is measured against TF32, in which ``tl.dot`` multiplies it by default, and both kinds of float8 against
    one. A dtype without a matmul of its own is measured against bfloat16.
    """
    return _PEAKS.get(dtype or "", FALLBACK)


@dataclass(frozen=True)
class Peaks:
    """Peaks as measured once.

    Attributes:
        gbps: of the copy, in 10**9 bytes per second, read and written.
        tflops: peak's name -> 10**12 operations per second.
        missing: peak's name -> why it could not be measured.
    """

    gbps: float
    tflops: dict[str, float]
    missing: dict[str, str]

    def roof(self, peak: str) -> tuple[str, Roof]:
        """Return the roof for a peak, and the name of the peak that it is in truth: bfloat16 where it is missing."""
        name = peak if peak in self.tflops else FALLBACK
        return name, Roof(self.tflops.get(name), self.gbps)

    def highest(self, other: Peaks) -> Peaks:
        """Return the higher of two measurements of each peak."""
        both = {**self.tflops, **other.tflops}
        tflops = {name: max(one.tflops.get(name, 0.0) for one in (self, other)) for name in both}
        missing = {name: why for name, why in {**self.missing, **other.missing}.items() if name not in tflops}
        return Peaks(max(self.gbps, other.gbps), tflops, missing)


def measure(names: Sequence[str], clock: Clock, plan: Plan, device: str = "cuda", shrink: int = 1) -> Peaks:
    """Measure the copy and the matmuls of the peaks named; medians count.

    Args:
        names: peaks, see :func:`peak_of`; bfloat16 is always measured.
        clock: times the calls.
        plan: how much to measure.
        device: on which device.
        shrink: divides the sizes, which are meant for a GPU.
    """
    gbps = _copy(COPY_BYTES // shrink, clock, plan, device)
    tflops, missing = {}, {}
    for name in dict.fromkeys([FALLBACK, *names]):
        size = (SMALL_SIZE if name == "float64" else SIZE) // shrink
        try:
            with float32_products(tf32=True) if name == "tf32" else contextlib.nullcontext():
                ms = _median(_matmul(name, size, device), clock, plan)
        except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
            missing[name] = next(iter(str(error).splitlines()), type(error).__name__)
            continue
        tflops[name] = matmul_flops(size, size, size) / (ms * 1e-3) / 1e12
    return Peaks(gbps, tflops, missing)


def _copy(size: int, clock: Clock, plan: Plan, device: str) -> float:
    """Return 10**9 bytes per second, read and written, of a copy of ``size`` bytes.

    Of the driver's copy and of a kernel that negates each element, which moves the same bytes, the faster counts.
    """
    import torch

    source, target = (torch.randn(size // 4, device=device) for _ in range(2))
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    ms = min(_median(way, clock, plan) for way in ways)
    return 2 * 4 * (size // 4) / (ms * 1e-3) / 1e9


def _median(call: Callable[[], Any], clock: Clock, plan: Plan) -> float:
    interleave([[call]], clock, plan, rounds=3)  # warm: clocks rise, cuBLAS chooses
    [series] = interleave([[call]], clock, plan)
    return Quantiles.of(series.times()).median


def _matmul(name: str, size: int, device: str) -> Callable[[], Any]:
    """Return a call of torch's matmul of a peak, over random values; the right operand is stored by columns."""
    import torch

    if name == "int8":
        a, b = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if name == "float8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    kind = torch.float32 if name == "tf32" else getattr(torch, name)
    a, b = a.to(kind), b.to(kind)
    return lambda: a @ b.t()
