"""The report's charts: right places, round ticks, and valid SVG whatever the data."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.report.charts import (
    WIDTH,
    Bars,
    Line,
    Panel,
    Row,
    bar_chart,
    histogram,
    line_chart,
    number,
    row_chart,
    thin,
    ticks,
)

finite = st.floats(-1e9, 1e9).map(lambda value: round(value, 3))


@given(finite, finite)
def test_ticks_are_round_and_enclose(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    marks = ticks(low, high, 5)
    steps = {
        round((after - before) / (marks[1] - marks[0]), 6) for before, after in zip(marks, marks[1:], strict=False)
    }
    slack = 1e-6 * (marks[1] - marks[0])
    assert marks[0] <= low + slack and marks[-1] >= high - slack
    assert steps == {1.0} and 2 <= len(marks) <= 12
    digits = f"{marks[1] - marks[0]:.0e}"[0]
    assert digits in "125"


@given(st.lists(st.tuples(finite, finite), max_size=500), st.integers(1, 50))
def test_thinning_keeps_the_mean_and_the_last_step(points: list[tuple[float, float]], most: int) -> None:
    thinned = thin(points, most)
    assert len(thinned) <= most
    if points:
        assert thinned[-1][0] == points[-1][0]
        assert thin(points, len(points)) == points


def test_line_chart_places_points() -> None:
    svg = ET.fromstring(
        line_chart([Panel("loss", [Line([(0, 2.0), (100, 4.0)], "s1")]), Panel("length", [Line([], "s2")])], "steps")
    )
    (line,) = svg.iter("polyline")
    first, last = ([float(n) for n in pair.split(",")] for pair in line.get("points", "").split())
    assert first[0] < last[0] and first[1] > last[1]  # larger values are higher up, that is at smaller y
    assert [title.text for title in svg.iter("title")] == ["step 0: loss 2", "step 100: loss 4"]
    texts = [text.text for text in svg.iter("text")]
    assert "no measurements yet" in texts and "loss" in texts and "steps" in texts


def test_bar_chart_heights_and_names() -> None:
    svg = ET.fromstring(bar_chart([Bars("replay", [0.5, 0.25], "s1"), Bars("<decode>", [0.4], "s2")], "position"))
    bars = [bar for bar in svg.iter("rect") if len(bar)]
    heights = [float(bar.get("height", "0")) for bar in bars]
    assert heights == pytest.approx([100, 80, 50])  # the scale is 200 units high; both series at position 1, then 2
    assert bars[1][0].text == "<decode>, position 1: 40.0%"
    assert "<decode>" in [text.text for text in svg.iter("text")]


@given(st.lists(st.floats(0, 1), max_size=16), st.lists(st.tuples(st.integers(1, 10**7), finite), max_size=50))
def test_charts_are_valid_svg(shares: list[float], points: list[tuple[int, float]]) -> None:
    ordered = sorted(points)
    for text in (
        bar_chart([Bars("a & b", shares, "s1")], "position"),
        line_chart([Panel('"loss"', [Line(ordered, "s1")]), Panel("length", [Line(ordered[:1], "s2")])], "steps"),
    ):
        svg = ET.fromstring(text)
        assert svg.tag == "svg" and "nan" not in text
        assert all(0 <= float(part.get("x", "0")) <= WIDTH for part in svg.iter("text"))


def test_numbers() -> None:
    assert [number(value) for value in (0, 0.25, 1500, 2e6, 3.5e9)] == ["0", "0.25", "1.5k", "2M", "3.5G"]


@given(st.lists(st.integers(1, 10**6), max_size=200))
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    svg = ET.fromstring(histogram(np.array(values, dtype=np.int64), "tokens", "samples", "s1"))
    counts = [int(title.text.rpartition(": ")[2].replace(",", "")) for title in svg.iter("title") if title.text]
    assert sum(counts) == len(values) and len(counts) <= 80


def test_a_row_s_parts_follow_one_another() -> None:
    rows = [Row("one <b>", 30, 10), Row("two", 0, 20)]
    svg = ET.fromstring(row_chart(rows, ("supervised", "context"), ("s1", "s0"), "tokens", "source"))
    bars = [bar for bar in svg.iter("rect") if bar.get("height") == "12"]
    starts, widths = ([float(bar.get(key, "")) for bar in bars] for key in ("x", "width"))
    assert starts[1] == pytest.approx(starts[0] + widths[0], abs=0.2)
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01) and widths[2] == 0
    assert widths[3] == pytest.approx(2 * widths[1], rel=0.01)
    assert "one <b>: 30 supervised" in [title.text for title in svg.iter("title")]
    assert "no measurements yet" in row_chart([], ("a", "b"), ("s1", "s0"), "tokens", "source")
