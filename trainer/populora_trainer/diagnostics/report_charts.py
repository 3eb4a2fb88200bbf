"""Charts as SVG text: lines with bands, stacked areas, a matrix, a family tree. Colours are classes of the page's CSS.

Everything that comes from outside is escaped on its way into the SVG.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

COLOURS = 8
DASHES = 4
MAX_POINTS = 300
_WIDTH, _HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 30
_SMOOTH_FROM = 25
_RAW_LINES = 4  # with more than these, the raw lines would be a thicket
_SMOOTH_SHARE = 12  # a moving average spans this part of the steps

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
        name: in the legend.
        points: (step, value) in order of steps.
        colour: number of a colour of the palette.
        dash: number of a dash pattern, 0 for a solid line.
        band: (step, low, high) around the line, e.g. a confidence band.
        marks: draw every point, for sparse series.
    """

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    dash: int = 0
    band: tuple[tuple[float, float, float], ...] = ()
    marks: bool = False


def percent(value: float) -> str:
    """Format a share."""
    return f"{100 * value:.1f}".rstrip("0").rstrip(".") + " %"


def plain(value: float) -> str:
    """Format a number with as many digits as a reader wants."""
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> tuple[Point, ...]:
    """Return at most `most` points: means over equally many neighbours."""
    if len(points) <= most:
        return tuple(points)
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple((_mean(x for x, _ in group), _mean(y for _, y in group)) for group in groups)


def smooth(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """Return the centred moving average over `window` points, over those of them that exist at the ends."""
    half = window // 2
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    found = []
    for index, (x, _) in enumerate(points):
        start, end = max(0, index - half), min(len(points), index + half + 1)
        found.append((x, (sums[end] - sums[start]) / (end - start)))
    return tuple(found)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that cover [low, high], about `count` of them."""
    span = high - low or 1.0
    rough = span / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


class _Frame:
    """The axes of a chart: maps values to the drawing and draws the grid."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], show: Format, least_span: float = 0.0) -> None:
        low, high = min(ys), max(ys)
        if high - low < least_span:
            middle = (low + high) / 2
            low, high = middle - least_span / 2, middle + least_span / 2
        size = max(abs(low), abs(high))
        if high - low < 1e-9 * max(1.0, size):
            low, high = low - max(0.1 * size, 0.1), high + max(0.1 * size, 0.1)
        if low < 0 <= min(ys):  # what is never negative gets no negative axis
            low, high = 0.0, high - low
        self.y_ticks = ticks(low, high)
        self.low, self.high = self.y_ticks[0], self.y_ticks[-1]
        self.first, self.last = min(xs), max(xs)
        if self.first == self.last:
            self.first, self.last = self.first - 1, self.last + 1
        self.show = show

    def x(self, value: float) -> float:
        return _LEFT + (value - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.low) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        parts = []
        for tick in self.y_ticks:
            y = f"{self.y(tick):.1f}"
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(_text(_LEFT - 6, self.y(tick), self.show(tick), "end"))
        for tick in ticks(self.first, self.last, 6):
            if self.first <= tick <= self.last and tick == int(tick):
                x = f"{self.x(tick):.1f}"
                parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 12}" text-anchor="middle">{int(tick):,}</text>')
        parts.append(f'<text class="tick axis" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 1}" text-anchor="end">step</text>')
        return "".join(parts)

    def path(self, points: Iterable[Point]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def line_chart(series: Sequence[Series], *, show: Format = plain, least_span: float = 0.0) -> Markup:
    """Draw lines over steps; long ones as a faint raw line under its moving average. Empty without any point.

    Args:
        series: what to draw, the first one at the bottom.
        show: formats values on the axis and under the pointer.
        least_span: the value axis spans at least this much, so that noise does not look like a trend.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return Markup("")
    values = [y for one in drawn for _, y in one.points] + [y for one in drawn for _, *ys in one.band for y in ys]
    frame = _Frame([x for one in drawn for x, _ in one.points], values, show, least_span)
    parts, hover = [], []
    for one in drawn:
        style = f"c{one.colour % COLOURS} d{one.dash % DASHES}"
        if len(one.band) > 1:
            low = thin([(x, low) for x, low, _ in one.band])
            high = thin([(x, high) for x, _, high in one.band])
            parts.append(f'<path class="band {style}" d="{frame.path(low)}L{frame.path(reversed(high))[1:]}Z"/>')
        elif one.band and one.marks:
            ((x, below, above),) = one.band
            parts.append(f'<path class="line {style}" d="{frame.path([(x, below), (x, above)])}"/>')
        points = thin(one.points)
        if len(one.points) >= _SMOOTH_FROM and not one.marks:
            if len(drawn) <= _RAW_LINES:
                parts.append(f'<path class="raw {style}" d="{frame.path(points)}"/>')
            points = thin(smooth(one.points, max(3, len(one.points) // _SMOOTH_SHARE)))
        if len(points) > 1:
            parts.append(f'<path class="line {style}" d="{frame.path(points)}"/>')
        if one.marks or len(points) == 1:
            parts += [
                f'<circle class="mark {style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>' for x, y in points
            ]
        hover.append(
            {
                "n": one.name,
                "c": one.colour % COLOURS,
                "p": [[round(x, 1), round(frame.x(x), 1), round(frame.y(y), 1), show(y)] for x, y in points],
            }
        )
    return _svg(frame.axes() + "".join(parts), hover)


def stacked_chart(series: Sequence[Series], *, show: Format = plain) -> Markup:
    """Draw series as areas on top of each other; all have the same steps. Empty without any point."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return Markup("")
    layers = [thin(one.points) for one in drawn]
    totals = [sum(y for _, y in column) for column in zip(*layers, strict=True)]
    frame = _Frame([x for x, _ in layers[0]], [0.0, *totals], show)
    floor = [(x, 0.0) for x, _ in layers[0]]
    parts, hover = [], []
    for one, layer in zip(drawn, layers, strict=True):
        top = [(x, below + y) for (x, below), (_, y) in zip(floor, layer, strict=True)]
        style = f"c{one.colour % COLOURS}"
        if len(top) > 1:
            parts.append(f'<path class="area {style}" d="{frame.path(top)}L{frame.path(reversed(floor))[1:]}Z"/>')
        else:
            ((x, low),), ((_, high),) = floor, top
            parts.append(
                f'<rect class="area {style}" x="{frame.x(x) - 20:.1f}" width="40" y="{frame.y(high):.1f}" '
                f'height="{frame.y(low) - frame.y(high):.1f}"/>'
            )
        hover.append(
            {
                "n": one.name,
                "c": one.colour % COLOURS,
                "p": [
                    [round(x, 1), round(frame.x(x), 1), round(frame.y(above), 1), show(y)]
                    for (x, above), (_, y) in zip(top, layer, strict=True)
                ],
            }
        )
        floor = top
    return _svg(frame.axes() + "".join(parts), hover)


def matrix_chart(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: dict[tuple[str, str], tuple[float, int]],
    row_label: str,
    column_label: str,
) -> Markup:
    """Draw a table of shares; the stronger the colour, the higher the share. Empty without any cell.

    Args:
        rows, columns: names in order.
        cells: (row, column) to (mean in [0, 1], number of observations).
        row_label, column_label: what rows and columns are.
    """
    if not cells:
        return Markup("")
    cell_width = max(34.0, min(92.0, (_WIDTH - 70) / len(columns)))
    cell_height = max(24.0, min(48.0, (_HEIGHT - 40) / len(rows)))
    left, top = 64, 34
    width, height = left + cell_width * len(columns) + 8, top + cell_height * len(rows) + 8
    parts = [
        f'<text class="tick axis" x="{left}" y="12">{escape(column_label)} →</text>',
        f'<text class="tick axis" x="4" y="{top - 8}">{escape(row_label)} ↓</text>',
    ]
    for index, name in enumerate(columns):
        x = left + (index + 0.5) * cell_width
        parts.append(f'<text class="tick" x="{x:.1f}" y="{top - 8}" text-anchor="middle">{escape(name)}</text>')
    for row_index, row in enumerate(rows):
        y = top + row_index * cell_height
        parts.append(_text(left - 8, y + cell_height / 2, row, "end"))
        for index, column in enumerate(columns):
            x = left + index * cell_width
            box = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{cell_width - 2:.1f}" height="{cell_height - 2:.1f}" rx="4"'
            if (row, column) not in cells:
                parts.append(
                    f'<rect class="cell empty" {box}><title>{escape(row)} never met {escape(column)}</title></rect>'
                )
                continue
            rate, count = cells[row, column]
            label = f"{row} on problems of {column}: {percent(rate)} of {count} problems"
            parts.append(
                f'<rect class="cell" {box} style="fill-opacity:{0.06 + 0.7 * rate:.3f}">'
                f"<title>{escape(label)}</title></rect>"
                f'<text class="value" x="{x + cell_width / 2:.1f}" y="{y + cell_height / 2:.1f}" dy=".34em" '
                f'text-anchor="middle">{100 * rate:.0f}</text>'
            )
    return Markup(
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class Life:
    """A member's bar in the family tree.

    Attributes:
        name: of the member.
        row: its line of succession.
        born, died: the first steps with and without it; died is the last step drawn for who lives.
        parents: names of members in the tree.
        operator: shown at the beginning of the bar; empty for founders.
        colour: number of a colour of the palette.
        detail: shown under the pointer.
    """

    name: str
    row: str
    born: float
    died: float
    parents: tuple[str, ...] = ()
    operator: str = ""
    colour: int = 0
    detail: str = ""


def lineage_chart(lives: Sequence[Life], rows: Sequence[str]) -> Markup:
    """Draw bars over steps, one row a line of succession, with a curve from every parent to its child."""
    if not lives:
        return Markup("")
    row_height, left, right = 34.0, 42, 16
    width = 1300.0
    height = row_height * len(rows) + 34
    first, last = min(life.born for life in lives), max(life.died for life in lives)
    last = last if last > first else first + 1
    level = {row: 8 + (index + 0.5) * row_height for index, row in enumerate(rows)}
    by_name = {life.name: life for life in lives}

    def at(step: float) -> float:
        return left + (step - first) / (last - first) * (width - left - right)

    parts = []
    for tick in ticks(first, last, 10):
        if first <= tick <= last and tick == int(tick):
            line = f"{at(tick):.1f}"
            parts.append(f'<line class="grid" x1="{line}" x2="{line}" y1="6" y2="{height - 24:.0f}"/>')
            parts.append(_text(at(tick), height - 12, f"{int(tick):,}", "middle"))
    for row, y in level.items():
        parts.append(_text(left - 8, y, row, "end"))
    for life in lives:
        for parent in life.parents:
            if parent in by_name and level.get(by_name[parent].row) is not None:
                x, y, above = at(life.born), level[life.row], level[by_name[parent].row]
                bend = x - min(26.0, (width - left) / 20)
                parts.append(
                    f'<path class="kin c{life.colour % COLOURS}" d="M{bend:.1f},{above:.1f}'
                    f'C{x:.1f},{above:.1f} {bend:.1f},{y:.1f} {x:.1f},{y:.1f}"/>'
                )
    crowded = sum(1 for life in lives if life.operator) > 120
    for life in lives:
        y, start, style = level[life.row], at(life.born), f"c{life.colour % COLOURS}"
        length = max(2.0, at(life.died) - start - 2)
        bar = f'<rect class="life {style}" x="{start:.1f}" y="{y - 5:.1f}" width="{length:.1f}" height="10" rx="5"/>'
        dot = f'<circle class="birth {style}" cx="{start:.1f}" cy="{y:.1f}" r="5"/>' if life.operator else ""
        parts.append(f"<g><title>{escape(life.detail or life.name)}</title>{bar}{dot}</g>")
        if life.operator and not crowded:
            parts.append(f'<text class="operator" x="{start + 1:.1f}" y="{y - 9:.1f}">{escape(life.operator)}</text>')
    return Markup(f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(parts)}</svg>')


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" dy=".32em" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(content: str, hover: object) -> Markup:
    data = escape(json.dumps(hover, separators=(",", ":")))
    return Markup(
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'data-top="{_TOP}" data-bottom="{_HEIGHT - _BOTTOM}" '
        f'data-series="{data}">{content}<g class="pointer"></g></svg>'
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)
