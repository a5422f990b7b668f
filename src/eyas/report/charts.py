"""The report's charts as inline SVG: no script, no font, no file beside the page.

Colours are CSS classes (`s0` to `s6`, `grid`, `tick`) that the page defines for light and dark. Every point and bar has
a <title>: the page shows it where the pointer is, screen readers read it. 400 units wide, so that text stays legible on
a phone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

WIDTH = 400
LEFT, RIGHT, _TOP = 46, 12, 22
_PANEL, _GAP, _BOTTOM = 110, 38, 38

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        points: (x, y) in rising x.
        style: CSS class.
        name: where a panel holds several.
    """

    points: Points
    style: str
    name: str = ""


@dataclass(frozen=True)
class Panel:
    """One measure over the shared x axis; `title`, with its unit, stands above it."""

    title: str
    lines: Sequence[Line]

    @property
    def points(self) -> list[tuple[float, float]]:
        return [point for line in self.lines for point in line.points]


def line_chart(panels: Sequence[Panel], x_label: str) -> str:
    """Panels one above the other over one x axis: measures of different units are not laid over each other.

    Panels without points say so. Returns: an <svg> element.
    """
    reach = max((x for panel in panels for x, _ in panel.points), default=0)
    parts, top = [], _TOP
    for panel in panels:
        parts.append(_panel(panel, top, reach))
        top += _PANEL + _GAP
    base = top - _GAP
    for value in [mark for mark in ticks(0, reach, 5) if mark <= reach] if reach else []:
        x = LEFT + value / reach * (WIDTH - LEFT - RIGHT)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 15}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{base + 32}" text-anchor="end">{escape(x_label)}</text>')
    label = ", ".join(panel.title for panel in panels) + f" over {x_label}"
    return svg_of(base + _BOTTOM, label, parts)


def _panel(panel: Panel, top: float, reach: float) -> str:
    base, right = top + _PANEL, WIDTH - RIGHT
    parts = [f'<text class="label" x="{LEFT}" y="{top - 8}">{escape(panel.title)}</text>']
    if not panel.points:
        return "".join([*parts, nothing(top + 58)])
    x_key = LEFT + 14 + 6.3 * len(panel.title)
    for line in (line for line in panel.lines if line.name):
        parts.append(f'<rect class="bar {line.style}" x="{x_key:.1f}" y="{top - 17}" width="10" height="10"/>')
        parts.append(f'<text class="tick" x="{x_key + 14:.1f}" y="{top - 8}">{escape(line.name)}</text>')
        x_key += 28 + 6 * len(line.name)
    marks = ticks(min(y for _, y in panel.points), max(y for _, y in panel.points), 4)
    low, high = marks[0], marks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / (reach or 1) * (right - LEFT), base - (y - low) / (high - low) * _PANEL

    for value in marks:
        y = place(0, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for line in panel.lines:
        places = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line {line.style}" points="{path}"/>')
        style, radius = (f"dot {line.style}", 3) if len(places) <= 30 else ("hover", 6)
        name = f"{line.name}, " if line.name else ""
        for (x, y), (at_x, at_y) in zip(line.points, places, strict=True):
            tip = tip_of(f"{name}step {number(x)}: {panel.title} {y:.4g}")
            parts.append(f'<circle class="{style}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="{radius}">{tip}</circle>')
    return "".join(parts)


@dataclass(frozen=True)
class Bars:
    """One series of shares in [0, 1], a bar for each position, and its CSS class."""

    name: str
    values: Sequence[float]
    style: str


def bar_chart(series: Sequence[Bars], x_label: str) -> str:
    """Grouped bars of shares, each with its value above it, and a legend. Returns: an <svg> element."""
    key, taken = legend([(bars.name, bars.style) for bars in series])
    height, top = 200, taken + 14
    base, right = top + height, WIDTH - RIGHT
    groups = max((len(bars.values) for bars in series), default=0)
    parts = [key]
    for value in (0, 0.25, 0.5, 0.75, 1):
        y = base - value * height
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.0%}</text>')
    slot = (right - LEFT) / max(groups, 1)
    width = min(34.0, slot * 0.8 / max(len(series), 1))
    for group in range(groups):
        middle = LEFT + (group + 0.5) * slot
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{base + 15}" text-anchor="middle">{group + 1}</text>')
        present = [bars for bars in series if group < len(bars.values)]
        for place, bars in enumerate(present):
            share = bars.values[group]
            x, y = middle + (place - len(present) / 2) * width, base - share * height
            tip = tip_of(f"{bars.name}, position {group + 1}: {share:.1%}")
            box = f'x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{share * height:.1f}"'
            parts.append(f'<rect class="bar {bars.style}" {box}>{tip}</rect>')
            if width >= 16:
                at = f'x="{x + width / 2:.1f}" y="{y - 4:.1f}"'
                parts.append(f'<text class="value" {at} text-anchor="middle">{share * 100:.0f}</text>')
    if not groups:
        parts.append(nothing(top + height / 2 + 20))
    parts.append(f'<text class="tick" x="{right}" y="{base + 32}" text-anchor="end">{escape(x_label)}</text>')
    return svg_of(base + _BOTTOM, ", ".join(bars.name for bars in series) + f" by {x_label}", parts)


def legend(entries: Sequence[tuple[str, str]], left: float = LEFT) -> tuple[str, float]:
    """Names with their colours, in as many lines as they need.

    Args:
        entries: (name, CSS class).
    Returns: SVG elements, and the height that they take, units; 0 without entries.
    """
    parts, x, y = [], left, 6.0
    for name, style in entries:
        width = 32 + 7.4 * len(name)  # of a phone's larger letters
        if x > left and x + width > WIDTH:
            x, y = left, y + 18
        parts.append(f'<rect class="bar {style}" x="{x:.1f}" y="{y:g}" width="10" height="10"/>')
        parts.append(f'<text class="label" x="{x + 15:.1f}" y="{y + 9:g}">{escape(name)}</text>')
        x += width
    return "".join(parts), y + 14 if entries else 0


def svg_of(height: float, label: str, parts: Sequence[str]) -> str:
    """An <svg> of WIDTH units; `label` is what screen readers say of it."""
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def nothing(y: float) -> str:
    """What stands where there are no measurements."""
    middle = (LEFT + WIDTH - RIGHT) / 2
    return f'<text class="tick" x="{middle}" y="{y:g}" text-anchor="middle">no measurements yet</text>'


def shortened(name: str, most: int = 40) -> str:
    """A name that fits beside its figures."""
    return name if len(name) <= most else f"{name[: most - 2]}…"


def tip_of(text: str) -> str:
    """What the page shows where a mark is pointed at or tapped."""
    return f"<title>{escape(text)}</title>"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten apart) that enclose [low, high]; at least two."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def thin(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` points: means of equal runs of neighbours, at the last x of each."""
    size = math.ceil(len(points) / most) if points else 1
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]


def number(value: float) -> str:
    """1500 -> "1.5k"; 0.25 -> "0.25"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def histogram(values: npt.NDArray[np.int64], x_label: str, y_label: str, style: str, bins: int = 24) -> str:
    """How many values (0 or more) lie in each of about `bins` equal ranges from 0 on. Returns: an <svg> element."""
    height, top = 200, 34
    base, right = top + height, WIDTH - RIGHT
    parts = [f'<text class="label" x="{LEFT}" y="15">{escape(y_label)}</text>']
    if not len(values):
        return svg_of(base + _BOTTOM, f"{y_label} by {x_label}", [*parts, nothing(top + height / 2)])
    edges = ticks(0, float(values.max()), bins)
    step, reach = edges[1], edges[-1]
    places = np.minimum(values / step, len(edges) - 2).astype(np.intp)
    counts = np.bincount(places, minlength=len(edges) - 1).tolist()
    marks = ticks(0, max(counts), 4)
    for mark in marks:
        y = base - mark / marks[-1] * height
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(mark)}</text>')
    slot = (right - LEFT) / len(counts)
    for place, count in enumerate(counts):
        tall = count / marks[-1] * height
        tip = tip_of(f"{number(place * step)} to {number((place + 1) * step)} {x_label}: {count:,}")
        box = f'x="{LEFT + place * slot + 0.5:.1f}" y="{base - tall:.1f}" width="{slot - 1:.1f}" height="{tall:.1f}"'
        parts.append(f'<rect class="bar {style}" {box}>{tip}</rect>')
    for mark in [mark for mark in ticks(0, reach, 5) if mark <= reach]:
        x = LEFT + mark / reach * (right - LEFT)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 15}" text-anchor="middle">{number(mark)}</text>')
    parts.append(f'<text class="tick" x="{right}" y="{base + 32}" text-anchor="end">{escape(x_label)}</text>')
    return svg_of(base + _BOTTOM, f"{y_label} by {x_label}", parts)


@dataclass(frozen=True)
class Row:
    """One bar of two parts, such as supervised and other tokens of a source."""

    name: str
    first: float
    second: float


def row_chart(rows: Sequence[Row], names: tuple[str, str], styles: tuple[str, str], x_label: str, of_each: str) -> str:
    """Horizontal bars, one for each `of_each`, of two parts, its name above it, and a legend. Returns: an <svg>."""
    key, taken = legend(list(zip(names, styles, strict=True)), 4)
    top, step, right = taken + 10, 34, WIDTH - RIGHT
    parts = [key]
    reach = max((row.first + row.second for row in rows), default=0) or 1
    for place, row in enumerate(rows):
        y, x = top + place * step, 4.0
        total = row.first + row.second
        parts.append(f'<text class="tick" x="4" y="{y + 11}">{escape(shortened(row.name))}</text>')
        parts.append(f'<text class="value" x="{right}" y="{y + 11}" text-anchor="end">{total:,.0f}</text>')
        for value, name, style in zip((row.first, row.second), names, styles, strict=True):
            width = value / reach * (right - 4)
            tip = tip_of(f"{row.name}: {value:,.0f} {name}")
            parts.append(
                f'<rect class="bar {style}" x="{x:.1f}" y="{y + 15}" width="{width:.1f}" height="12">{tip}</rect>'
            )
            x += width
    height = top + max(len(rows), 1) * step + 18
    if not rows:
        parts.append(nothing(height / 2))
    parts.append(f'<text class="tick" x="{right}" y="{height - 4}" text-anchor="end">{escape(x_label)}</text>')
    return svg_of(height, f"{names[0]} and {names[1]} by {of_each}", parts)
