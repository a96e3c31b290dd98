"""The arithmetic of a bench, against values computed by hand; the picture; what is selected."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import asdict

import pytest

from tcache.bench.cases import Measured, Timed
from tcache.bench.peaks import Peaks, peak_of
from tcache.bench.plot import roofline_svg, write_roofline
from tcache.bench.report import row_of
from tcache.bench.roofline import Quantiles, Roof, matmul_flops
from tcache.bench.timing import Plan, Sample, Series, interleave
from tcache.errors import OutputError


def test_percentiles():
    found = Quantiles.of([float(value) for value in range(100, -1, -1)])
    assert (found.median, found.p20, found.p80, found.p95, found.count) == (50.0, 20.0, 80.0, 95.0, 101)
    assert Quantiles.of([1.0, 2.0]) == Quantiles(1.5, 1.2, 1.8, pytest.approx(1.95), 2)
    assert Quantiles.of([3.0]) == Quantiles(3.0, 3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="no samples"):
        Quantiles.of([])


ROOF = Roof(tflops=800.0, gbps=4000.0)


def test_a_launch_bound_by_memory():
    # 4 GB at 4000 GB/s take 1 ms; 0.2 TFLOP at 800 TFLOP/s take 0.25 ms; it took 1.25 ms
    found = ROOF.standing(1.25, 200 * 10**9, 4 * 10**9)
    assert found.verdict == "memory"
    assert found.bound_ms == pytest.approx(1.0)
    assert found.fraction == pytest.approx(0.8)
    assert found.gbps == pytest.approx(3200.0)
    assert found.tflops == pytest.approx(160.0)
    assert found.percent_of_bandwidth == pytest.approx(80.0)
    assert found.percent_of_flops == pytest.approx(20.0)
    assert found.intensity == pytest.approx(50.0)
    assert ROOF.ridge == pytest.approx(200.0)


def test_a_launch_bound_by_compute():
    # 4096^3: 137.4 GFLOP at 800 TFLOP/s take 171.8 us; its 100.7 MB take 25.2 us
    flops = matmul_flops(4096, 4096, 4096)
    assert flops == 137_438_953_472
    found = ROOF.standing(0.2, flops, 3 * 4096 * 4096 * 2)
    assert found.verdict == "compute"
    assert found.bound_ms == pytest.approx(0.171798, rel=1e-5)
    assert found.fraction == pytest.approx(0.85899, rel=1e-4)
    assert found.intensity == pytest.approx(4096 / 3)


def test_where_a_formula_or_a_peak_is_missing():
    nothing = ROOF.standing(1.0, None, None)
    assert set(asdict(nothing).values()) == {None}
    copied = ROOF.standing(1.0, 0, 10**9)  # moves and computes nothing
    assert (copied.verdict, copied.intensity, copied.tflops) == ("memory", 0.0, 0.0)
    only_bytes = ROOF.standing(1.0, None, 10**9)
    assert (only_bytes.verdict, only_bytes.intensity, only_bytes.bound_ms) == ("memory", None, 0.25)
    only_flops = ROOF.standing(1.0, 10**12, None)
    assert (only_flops.verdict, only_flops.bound_ms) == (None, 1.25)
    no_peak = Roof(None, 4000.0)
    assert no_peak.ridge is None
    found = no_peak.standing(1.0, 10**12, 10**9)
    assert (found.verdict, found.percent_of_flops, found.bound_ms) == (None, None, 0.25)


def test_of_nothing_and_in_no_time():
    """A case without elements launches nothing, and may take less than events can tell."""
    for ms in (0.0, 1.5e-3):
        found = ROOF.standing(ms, 0, 0)
        assert (found.verdict, found.bound_ms, found.intensity) == (None, 0.0, None)
        assert not any((found.gbps, found.tflops, found.fraction, found.percent_of_bandwidth, found.percent_of_flops))
    found = ROOF.standing(0.0, 10**9, 10**6)
    assert (found.gbps, found.tflops, found.fraction, found.verdict) == (None, None, None, "compute")
    none, some = Quantiles.of([0.0]), Quantiles.of([1.0])
    measured = Measured("f n=0", "m.yaml:1:1", "f", {"n": 0}, "bfloat16", "bfloat16", 0, 0)
    peaks = Peaks(4000.0, {"bfloat16": 700.0}, {})
    for own, other, speedup in [(none, some, None), (none, none, None), (some, none, 0.0)]:
        measured.times = {"tcache": Timed(own), "torch": Timed(other)}
        row = row_of(measured, peaks)
        assert row["speedup_over_torch"] == speedup
        document = {"machine": {"gpu": "a GPU"}, "peaks": {"used": asdict(peaks)}, "rows": [row]}
        assert "1 cases without formulas or figures are not shown" in roofline_svg(document)


def test_peaks_by_dtype():
    assert [peak_of(name) for name in ("bfloat16", "float32", "float8_e5m2", "int8", "int64", None)] == [
        "bfloat16", "tf32", "float8", "int8", "bfloat16", "bfloat16",
    ]  # fmt: skip
    begin = Peaks(4000.0, {"bfloat16": 700.0, "tf32": 380.0}, {"float8": "no such kernel", "int8": "not now"})
    end = Peaks(4100.0, {"bfloat16": 690.0, "int8": 1400.0}, {"float8": "no such kernel"})
    used = begin.highest(end)
    assert used == Peaks(4100.0, {"bfloat16": 700.0, "tf32": 380.0, "int8": 1400.0}, {"float8": "no such kernel"})
    assert used.roof("float8") == ("bfloat16", Roof(700.0, 4100.0))
    assert used.roof("int8") == ("int8", Roof(1400.0, 4100.0))


class Recorder:
    """A clock that notes the order of calls and answers times of its own."""

    def __init__(self, times, ahead=lambda _: True):
        self.times, self.ahead, self.batches = times, ahead, []

    def __call__(self, calls):
        names = [call() for call in calls]
        self.batches.append(names)
        return [Sample(self.times[name[0]], 0.01, self.ahead(name)) for name in names]


def test_alternatives_take_turns_and_inputs_rotate():
    clock = Recorder({"a": 2.0, "b": 3.0})
    calls = [[lambda kind=kind, number=number: f"{kind}{number}" for number in range(3)] for kind in "ab"]
    found = interleave(calls, clock, Plan(budget_ms=25.0, fewest=2, most=100, batch=4))
    assert clock.batches == [["a0", "b0"], ["a0", "b0", "a1", "b1"], ["a2", "b2", "a0", "b0"], ["a1", "b1"]]
    assert [series.times() for series in found] == [[2.0] * 5, [3.0] * 5]  # 25 ms for rounds of 5 ms


def test_how_many_rounds():
    plan = Plan(budget_ms=600.0, fewest=20, most=200)
    assert [plan.rounds(ms) for ms in (0.0, 0.001, 6.0, 60.0, 500.0, 9e9)] == [200, 200, 100, 20, 10, 3]


def test_samples_that_include_the_host_are_not_counted_unless_most_do():
    good, late = Sample(1.0, 0.1, ahead=True), Sample(9.0, 0.1, ahead=False)
    assert Series([good, good, late]).times() == [1.0, 1.0]
    assert Series([good, late, late]).times() == [1.0, 9.0, 9.0]
    assert (Series([good, late]).ahead, Series([good, late, late]).ahead) == (True, False)


def row(kernel, intensity, fraction, peak="bfloat16", **shape):
    tflops = {"bfloat16": 742.0, "float8": 1300.0}[peak]
    moved, flops = 10**8, int(10**8 * intensity)
    roof = Roof(tflops, 4100.0)
    bound = roof.standing(1.0, flops, moved).bound_ms
    ms = bound / fraction
    return {"kernel": kernel, "shape": shape, "times": {"tcache": {"median_ms": ms}}, "peak": peak,
            **asdict(roof.standing(ms, flops, moved))}  # fmt: skip


def document(*rows):
    used = {"gbps": 4100.0, "tflops": {"bfloat16": 742.0, "float8": 1300.0}, "missing": {}}
    machine = {"gpu": "NVIDIA <H200>", "torch": "2.11.0", "triton": "3.6.0", "driver": "580"}
    return {"machine": machine, "peaks": {"used": used}, "rows": list(rows)}


def test_the_picture():
    rows = [row(f"kernel{n % 14}", 10 ** (n / 20 - 1), 0.9, "float8" if n % 2 else "bfloat16", M=n) for n in range(80)]
    text = roofline_svg(document(*rows, {"kernel": "failed", "error": "no"}))
    root = ET.fromstring(text)
    namespace = {"s": "http://www.w3.org/2000/svg"}
    texts = [node.text for node in root.iterfind(".//s:text", namespace)]
    assert "Roofline: NVIDIA <H200>" in texts
    assert {"arithmetic intensity, FLOP per byte", "TFLOP/s", "copy 4,100 GB/s"} <= set(texts)
    assert {"bfloat16 matmul 742 TFLOP/s", "float8 matmul 1300 TFLOP/s"} <= set(texts)
    assert any("1 cases without formulas" in each for each in texts if each)
    marks = root.findall(".//s:path[@class='point']", namespace)
    assert len(marks) == 80 + 14
    titles = [mark.find("s:title", namespace) for mark in marks]
    assert any(
        "kernel3 M=3" in title.text and "90% of the bound by memory" in title.text
        for title in titles
        if title is not None
    )
    assert "prefers-color-scheme: dark" in text
    places = [tuple(map(float, re.match(r"M([\d.]+) ([\d.]+)", mark.get("d")).groups())) for mark in marks[:80]]
    assert all(84 <= x <= 700 and 64 <= y <= 540 for x, y in places)
    by_intensity = [x for x, _ in places]
    assert by_intensity == sorted(by_intensity)


def test_marks_of_many_kernels_differ():
    rows = [row(f"kernel{n}", 5.0, 0.5) for n in range(30)]
    root = ET.fromstring(roofline_svg(document(*rows)))
    marks = root.findall(".//{http://www.w3.org/2000/svg}path[@class='point']")[:30]
    looks = {(mark.get("fill"), re.sub(r"^M\S+ [\d.]+", "", mark.get("d"))) for mark in marks}
    assert len(looks) == 30


def test_a_picture_of_nothing():
    ET.fromstring(roofline_svg(document()))
    bare = document(row("k", 2.0, 0.5))
    bare["peaks"]["used"]["tflops"] = {}
    ET.fromstring(roofline_svg(bare))


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_roofline(tmp_path / "file" / "r.svg", document())
