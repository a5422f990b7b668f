"""Charts of figures with their spread: a dot for the mean, a line from the lowest to the highest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from eyas.report.charts import LEFT, RIGHT, WIDTH, legend, nothing, number, shortened, svg_of, ticks, tip_of

_NAME, _ROW, _SPACE = 18, 17, 6
_SHORT = 18  # letters that leave room for marks on their right
_AXIS, _VALUES = 8.0, 48.0  # left of the axis; right of it, where values are written


@dataclass(frozen=True)
class Mark:
    """One figure.

    Attributes:
        value, low, high: on the chart's axis; the three alike where there is no spread.
        shown: the value as it is written beside it.
        tip: what the page shows where it is pointed at.
        style: CSS class.
    """

    value: float
    low: float
    high: float
    shown: str
    tip: str
    style: str


@dataclass(frozen=True)
class Group:
    """Marks below one name, one under the other."""

    name: str
    marks: Sequence[Mark]


def range_chart(groups: Sequence[Group], keys: Sequence[tuple[str, str]], x_label: str, reference: float) -> str:
    """Marks along one horizontal axis; names stand left of their marks where all are short, else above them.

    Args:
        keys: (name, CSS class) of the legend; none where all marks are of one kind.
        reference: a value that is drawn through all groups.
    Returns: an <svg> element.
    """
    parts = []
    key, taken = legend(keys, 4)
    bounds = [bound for group in groups for mark in group.marks for bound in (mark.low, mark.high)]
    if not bounds:
        return svg_of(taken + 80, x_label, [key, nothing(taken + 44)])
    longest = max(len(group.name) for group in groups)
    beside = longest <= _SHORT
    y, left, right = taken + 8, _AXIS + 8.2 * longest if beside else _AXIS, WIDTH - _VALUES
    steps = ticks(min(*bounds, reference), max(*bounds, reference), 5)

    def place(value: float) -> float:
        return left + (value - steps[0]) / (steps[-1] - steps[0]) * (right - left)

    for group in groups:
        parts.append(f'<text class="tick" x="4" y="{y + 13:g}">{escape(shortened(group.name))}</text>')
        if not beside:  # lines don't run through names
            y += _NAME
        ends = f'y1="{y:g}" y2="{y + _ROW * len(group.marks) + (_SPACE if beside else 0):g}"'
        for step in steps:
            parts.append(f'<line class="grid" x1="{place(step):.1f}" x2="{place(step):.1f}" {ends}/>')
        parts.append(f'<line class="mark" x1="{place(reference):.1f}" x2="{place(reference):.1f}" {ends}/>')
        for mark in group.marks:
            parts.append(_mark(mark, place, y + _ROW / 2))
            y += _ROW
        y += _SPACE
    for step in steps:
        at, anchor = place(step), "start" if step == steps[0] else "middle"  # the first one lies within the chart
        parts.append(f'<text class="tick" x="{at:.1f}" y="{y + 13:g}" text-anchor="{anchor}">{number(step)}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{y + 31:g}" text-anchor="end">{escape(x_label)}</text>')
    return svg_of(y + 38, f"{x_label} by {', '.join(group.name for group in groups)}", [key, *parts])


def _mark(mark: Mark, place: Callable[[float], float], y: float) -> str:
    low, high, at = place(mark.low), place(mark.high), place(mark.value)
    spread = ""
    if mark.high > mark.low:
        spread = f'<line class="whisker {mark.style}" x1="{low:.1f}" x2="{high:.1f}" y1="{y:g}" y2="{y:g}"/>'
    return (
        f'{spread}<circle class="dot {mark.style}" cx="{at:.1f}" cy="{y:g}" r="4.5"/>'
        f'<text class="value" x="{WIDTH - 4}" y="{y + 4:g}" text-anchor="end">{escape(mark.shown)}</text>'
        f'<rect class="hover" x="0" y="{y - _ROW / 2:g}" width="{WIDTH}" height="{_ROW}">{tip_of(mark.tip)}</rect>'
    )


@dataclass(frozen=True)
class Curve:
    """One line of figures with their spread: (x, mean, low, high) in rising x."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    style: str

    def at(self, x: float) -> float | None:
        """The mean at x, by a straight line between its neighbours; None outside the points."""
        for (x1, y1, _, _), (x2, y2, _, _) in zip(self.points, self.points[1:], strict=False):
            if x1 <= x <= x2:
                return y1 + (x - x1) / (x2 - x1) * (y2 - y1)
        return None


def curve_chart(
    curves: Sequence[Curve], labels: tuple[str, str], reference: float, found: tuple[float, str] | None
) -> str:
    """Curves over one x axis, which need not begin at 0.

    Args:
        labels: of the x axis, of the y axis.
        reference: a y that is drawn across.
        found: an x that is drawn upright, with the curves' values there, and what it stands for.
    Returns: an <svg> element.
    """
    key, taken = legend([(curve.name, curve.style) for curve in curves])
    top, height, right = taken + 38, 190, WIDTH - RIGHT
    base = top + height
    points = [point for curve in curves for point in curve.points]
    reached = [point[0] for point in points] + ([found[0]] if found else [])
    bounds = [bound for point in points for bound in point[2:]]
    across, up = ticks(min(reached), max(reached), 6), ticks(min(*bounds, reference), max(*bounds, reference), 5)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - across[0]) / (across[-1] - across[0]) * (right - LEFT),
            base - (y - up[0]) / (up[-1] - up[0]) * height,
        )

    parts = [key, f'<text class="tick" x="{LEFT}" y="{taken + 15:g}">{escape(labels[1])}</text>']
    for value in up:
        y = place(0, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in across:
        x = place(value, 0)[0]
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 17:g}" text-anchor="middle">{number(value)}</text>')
    level = place(0, reference)[1]
    parts.append(f'<line class="mark" x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}"/>')
    if found:
        x = place(found[0], 0)[0]
        parts.append(f'<line class="found" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{base:g}"/>')
        side = "start" if x < WIDTH / 2 else "end"
        parts.append(f'<text class="value" x="{x:.1f}" y="{top - 5:g}" text-anchor="{side}">{escape(found[1])}</text>')
    for curve in curves:
        parts.append(_curve(curve, labels, place))
        read = curve.at(found[0]) if found else None
        if found and read is not None:
            x, y = place(found[0], read)
            tip = tip_of(f"{curve.name}, {found[1]}: {read:.2f} on the curve")
            parts.append(f'<circle class="ring {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="6">{tip}</circle>')
    parts.append(f'<text class="tick" x="{right}" y="{base + 33:g}" text-anchor="end">{escape(labels[0])}</text>')
    return svg_of(base + 40, f"{labels[1]} over {labels[0]}", parts)


def _curve(curve: Curve, labels: tuple[str, str], place: Callable[[float, float], tuple[float, float]]) -> str:
    middles = [place(x, mean) for x, mean, _, _ in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in middles)
    parts = [f'<polyline class="line {curve.style}" points="{path}"/>']
    for (x, mean, low, high), (at_x, at_y) in zip(curve.points, middles, strict=True):
        y1, y2 = place(x, low)[1], place(x, high)[1]
        parts.append(
            f'<line class="whisker {curve.style}" x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'
        )
        parts.append(f'<circle class="dot {curve.style}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="4.5"/>')
        tip = tip_of(f"{curve.name}, {labels[0]} {x:g}: {mean:.2f} ({low:.2f} to {high:.2f})")
        parts.append(f'<circle class="hover" cx="{at_x:.1f}" cy="{at_y:.1f}" r="11">{tip}</circle>')
    return "".join(parts)
