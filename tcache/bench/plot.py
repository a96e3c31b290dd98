"""The roofline as a picture: intensity against rate, both logarithmic, one roof for each dtype, a point for each case.

An SVG that needs nothing else: readable on light and dark pages, and with what a point is as its tooltip.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from tcache._fs import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["roofline_svg", "write_roofline"]

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 84, 700, 64, 540
COLOURS = ("#1f83c9", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8c564b", "#7f3fbf", "#e64b6b", "#4c9a2a")
"""Told apart by most eyes on white and on black; the first ones are Okabe's and Ito's."""

_STYLE = """
svg { background: #ffffff; font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
text { fill: #24292f; font-size: 12px } .title { font-size: 16px; font-weight: 600 } .small { font-size: 11px }
.faint { fill: #57606a } .grid { stroke: #d0d7de; stroke-width: 0.6 } .axis { stroke: #57606a; fill: none }
.roof { stroke: #24292f; stroke-width: 1.8; fill: none } .point { stroke: #ffffff; stroke-width: 0.8 }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117 } text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #30363d }
  .axis { stroke: #9198a1 } .roof { stroke: #e6edf3 } .point { stroke: #0d1117 }
}
"""


class _Axes:
    """Where values lie on the picture.

    Args:
        x, y: lowest and highest exponent of ten of each axis.
    """

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x_range, self.y_range = x, y

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (math.log10(value) - low) / (high - low) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return BOTTOM - (math.log10(value) - low) / (high - low) * (BOTTOM - TOP)

    def ticks(self) -> Iterator[str]:
        """Yield the grid, and the labels of the powers of ten."""
        for low, high, vertical in ((*self.x_range, True), (*self.y_range, False)):
            for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1):
                label = _plain(10.0**power)
                if vertical:
                    at = self.x(10.0**power)
                    yield f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{BOTTOM}"/>'
                    yield _text(at, BOTTOM + 18, label, "middle")
                else:
                    at = self.y(10.0**power)
                    yield f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{RIGHT}" y2="{at:.1f}"/>'
                    yield _text(LEFT - 8, at + 4, label, "end")
        yield f'<rect class="axis" x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _text(x: float, y: float, text: str, anchor: str = "start", cls: str = "", more: str = "") -> str:
    name = f' class="{cls}"' if cls else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}{more}>{escape(text)}</text>'


def _axes(points: list[dict[str, Any]], tflops: dict[str, float], gbps: float) -> _Axes:
    """Choose whole decades that show every point, and the ridges from a decade to their left on."""
    ridges = [value * 1e3 / gbps for value in tflops.values()] or [1.0]
    intensities = [row["intensity"] for row in points]
    rates = [row["tflops"] for row in points]
    left = math.floor(math.log10(min([*intensities, min(ridges) / 10]) / 1.2))
    right = math.ceil(math.log10(max([*intensities, max(ridges) * 3]) * 1.2))
    low = math.floor(math.log10(min([*rates, gbps / 1e3 * 10.0**left]) / 1.2))
    high = math.ceil(math.log10(max([*rates, *tflops.values(), gbps / 1e3]) * 1.5))
    return _Axes((left, right), (low, high))


def _roofs(axes: _Axes, tflops: dict[str, float], gbps: float) -> Iterator[str]:
    """Yield the slope of the memory, and a flat roof for each dtype with its peak written beside its end."""
    start = max(10.0 ** axes.x_range[0], 10.0 ** axes.y_range[0] / (gbps / 1e3))
    end = 10.0 ** axes.x_range[1]
    slope_end = max((value * 1e3 / gbps for value in tflops.values()), default=end)
    slope = f"M{axes.x(start):.1f} {axes.y(start * gbps / 1e3):.1f}"
    slope += f" L{axes.x(slope_end):.1f} {axes.y(slope_end * gbps / 1e3):.1f}"
    yield f'<path class="roof" d="{slope}"><title>copy: {gbps:,.0f} GB/s, read and written</title></path>'
    below = -math.inf
    for name, peak in sorted(tflops.items(), key=lambda item: -item[1]):
        ridge, at = peak * 1e3 / gbps, axes.y(peak)
        title = f"{name} matmul: {peak:.1f} TFLOP/s, ridge at {ridge:.1f} FLOP/B"
        path = f"M{axes.x(ridge):.1f} {at:.1f} H{RIGHT}"
        yield f'<path class="roof" d="{path}"><title>{escape(title)}</title></path>'
        below = max(at + 4, below + 15)  # beside its roof, unless the label of the one above is there
        yield _text(RIGHT + 8, below, f"{name} matmul {peak:.4g} TFLOP/s", cls="small")
    first = min((value * 1e3 / gbps for value in tflops.values()), default=end)
    middle = math.sqrt(start * first)
    x, y = axes.x(middle), axes.y(middle * gbps / 1e3)
    rise = (axes.y(1) - axes.y(10)) / (axes.x(10) - axes.x(1))
    turn = f' transform="rotate({-math.degrees(math.atan(rise)):.1f} {x:.1f} {y:.1f})"'
    yield _text(x, y - 9, f"copy {gbps:,.0f} GB/s", "middle", "small", turn)


def _mark(x: float, y: float, number: int, inside: str = "") -> str:
    """Return a kernel's mark: a colour for each, and another shape when the colours are used up."""
    shape = _SHAPES[number // len(COLOURS) % len(_SHAPES)]
    return (
        f'<path class="point" d="M{x:.1f} {y:.1f}{shape}" fill="{COLOURS[number % len(COLOURS)]}" '
        f'fill-opacity="0.85">{inside}</path>'
    )


_SHAPES = (
    "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",  # circle, square, diamond, triangle
    "m-4 -4h8v8h-8z",
    "m0 -5.6l5.6 5.6l-5.6 5.6l-5.6 -5.6z",
    "m0 -5.4l5.4 9.4h-10.8z",
)


def _points(axes: _Axes, points: list[dict[str, Any]], kernels: list[str]) -> Iterator[str]:
    for row in points:
        shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
        title = (
            f"{row['kernel']} {shape}\n{row['times']['tcache']['median_ms'] * 1e3:.1f} µs, "
            f"{row['tflops']:.4g} TFLOP/s, {row['gbps']:.0f} GB/s, {row['intensity']:.3g} FLOP/B\n"
            f"{100 * row['fraction']:.0f}% of the bound by {row['verdict']} ({row['peak']})"
        )
        number = kernels.index(row["kernel"])
        yield _mark(axes.x(row["intensity"]), axes.y(row["tflops"]), number, f"<title>{escape(title)}</title>")


def _legend(points: list[dict[str, Any]], kernels: list[str]) -> Iterator[str]:
    """Yield a line for each kernel, from the bottom up: the roofs' labels are at the top."""
    step = min(19.0, (BOTTOM - TOP - 170) / max(1, len(kernels)))
    top = BOTTOM - step * (len(kernels) - 1) - 4
    if kernels:
        yield _text(WIDTH - 10, top - 20, "best, of its bound", "end", "small faint")
    for number, kernel in enumerate(kernels):
        rows = [row for row in points if row["kernel"] == kernel]
        best = max(row["fraction"] for row in rows)
        at = top + number * step
        name = kernel if len(kernel) <= 28 else f"{kernel[:27]}…"
        yield _mark(RIGHT + 20, at, number)
        title = f"{kernel}: {len(rows)} cases, the best at {best:.2f} of its bound"
        text = _text(RIGHT + 32, at + 4, name, cls="small").removesuffix("</text>")
        yield f"{text}<title>{escape(title)}</title></text>"
        yield _text(WIDTH - 10, at + 4, f"{best:.2f}", "end", "small faint")


def roofline_svg(document: dict[str, Any]) -> str:
    """Return the picture of a bench.

    Args:
        document: what :meth:`tcache.bench.run.Run.document` returns. Rows without operations, bytes or times are not
            shown, and counted below the picture.
    """
    used, machine = document["peaks"]["used"], document["machine"]
    points = [row for row in document["rows"] if row.get("intensity") and row.get("tflops") and row.get("fraction")]
    peaks = {row["peak"] for row in points} or set(used["tflops"])
    tflops = {name: value for name, value in used["tflops"].items() if name in peaks}
    kernels = list(dict.fromkeys(row["kernel"] for row in points))
    axes = _axes(points, tflops, used["gbps"])
    centre = (LEFT + RIGHT) / 2
    left_out = len(document["rows"]) - len(points)
    note = f"peaks measured in the same run; torch {machine.get('torch')}, Triton {machine.get('triton')}"
    note += f", driver {machine['driver']}" if machine.get("driver") else ""
    note += f"; {left_out} cases without formulas or figures are not shown" if left_out else ""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
    middle = (TOP + BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>Roofline of {escape(str(machine['gpu']))}</title><style>{_STYLE}</style>",
        _text(LEFT, 30, f"Roofline: {machine['gpu']}", cls="title"),
        _text(LEFT, 49, note, cls="small faint"),
        *axes.ticks(),
        _text(centre, HEIGHT - 18, "arithmetic intensity, FLOP per byte", "middle"),
        _text(22, middle, "TFLOP/s", "middle", more=f' transform="rotate(-90 22 {middle:.0f})"'),
        *_roofs(axes, tflops, used["gbps"]),
        *_points(axes, points, kernels),
        *_legend(points, kernels),
        "</svg>",
    ]
    return "\n".join(filter(None, parts)) + "\n"


def write_roofline(path: Path, document: dict[str, Any]) -> None:
    """Write the picture of a bench.

    Raises:
        OutputError: the file cannot be written.
    """
    from tcache.errors import OutputError

    try:
        atomic_write(path, roofline_svg(document).encode())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}", "choose another --plot") from error
