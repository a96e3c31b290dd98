"""Draw the committed results: ``docs/figures/first_launch.svg`` and ``docs/figures/launch.svg``. Needs matplotlib.

pip install -e '.[bench]'
python benchmarks/plots.py
"""

from __future__ import annotations

import json

import matplotlib as mpl
from _machine import RESULTS, ROOT

mpl.use("svg")
from matplotlib import pyplot as plt

FIGURES = ROOT / "docs" / "figures"
OURS, OTHERS, FLOOR = "#1f6f54", "#9aa5b1", "#d9dee3"
LABELS = {
    "stock, no cache": "triton.autotune, no cache",
    "stock, warm compile cache": "triton.autotune, warm compile cache",
    "stock, warm, stored tuning": "triton.autotune, stored tuning",
    "jit, config by hand": "triton.jit, config by hand",
    "persistent autotuner": "persistent autotuner",
    "stock jit, bundle": "triton.jit, tcache bundle",
    "bundle, frozen": "tcache, bundle",
    "bundle, preloaded": "tcache, bundle, preloaded",
}
KINDS = {
    "jit": "jit[grid]", "stock": "triton.autotune", "persistent": "persistent autotuner", "tcache": "tcache.autotune",
    "compiled": "CompiledKernel[grid]", "launcher": "C launcher alone",
}  # fmt: skip


def colour(name: str) -> str:
    if name in ("compiled", "launcher"):
        return FLOOR
    return OURS if "bundle" in name or name == "tcache" else OTHERS


def first_launch(data: dict) -> plt.Figure:
    rows = {LABELS[name]: row for name, row in data["first_launch"].items()}
    colours = [colour(name) for name in data["first_launch"]]
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    medians = [row["median_ms"] for row in rows.values()]
    axes.barh(list(rows), medians, color=colours)
    for position, (value, row) in enumerate(zip(medians, rows.values(), strict=True)):
        text = f" {value:,.0f} ms" if value >= 100 else f" {value:.1f} ms"
        axes.text(value, position, f"{text}  ({row['processes']})", va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(1, 120_000)
    axes.invert_yaxis()
    axes.set_xlabel("first launch in a fresh process, ms, median (number of processes); log scale")
    axes.set_title(f"{data['kernel']}; {data['machine']['gpu']}, Triton {data['machine']['triton']}", fontsize=10)
    return figure


def launch(data: dict) -> plt.Figure:
    groups = data["arguments"]
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.8 / len(KINDS)
    hatches = {"persistent": "//", "stock": "..", "launcher": "//"}
    for number, (kind, label) in enumerate(KINDS.items()):
        values = [row["us"][kind] for row in groups.values()]
        places = [group + (number - (len(KINDS) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(
            places, values, width, label=label, color=colour(kind), hatch=hatches.get(kind), edgecolor="white"
        )  # fmt: skip
        for place, value in zip(places, values, strict=True):
            axes.text(place, value, f"{value:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(groups)), [f"{count} arguments" for count in groups])
    axes.set_ylabel("host time of a launch seen before, µs")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"{data['machine']['gpu']}, Triton {data['machine']['triton']}", fontsize=10)
    return figure


def main() -> None:
    mpl.rcParams.update(
        {"svg.hashsalt": "tcache", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    )
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, draw in (("first_launch", first_launch), ("launch", launch)):
        figure = draw(json.loads((RESULTS / f"{name}.json").read_text()))
        path = FIGURES / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        # matplotlib leaves spaces at line ends
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
