"""The plots of a report as SVG text. Colours are CSS classes, which the page defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 34
LOG_RATIO = 50.0  # a wider range than this is shown on a logarithmic axis

Format = Callable[[float], str]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or cloud of points. `css` is the class of its colour (s0, s1 …)."""

    name: str
    css: str
    points: Sequence[Point]
    notes: Sequence[str] = ()  # tooltips, one per point


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * self._share(value)

    def _share(self, value: float) -> float:
        if self.logarithmic:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.logarithmic else _even_ticks(self.low, self.high)


def value_axis(values: Sequence[float], start: float, end: float, *, from_zero: bool = False) -> Axis:
    """An axis over `values`; logarithmic where they span orders of magnitude, unless it starts at zero."""
    high = max(values, default=1.0) or 1.0
    positive = [value for value in values if value > 0]
    low = min(positive, default=high)
    if not from_zero and high / low > LOG_RATIO:
        return Axis(low, high, start, end, logarithmic=True)
    if from_zero or low < high / 2:
        return Axis(0.0, high, start, end)
    return Axis(0.9 * low, 1.05 * high, start, end)


def cdf_plot(groups: Sequence[Series], format_x: Format) -> str:
    """Share of values at or below x. Each series' points are (value, anything); p50, p90, p99 are marked."""
    values = [value for group in groups for value, _ in group.points]
    x = value_axis(values, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, format_x, lambda share: f"{share:.0%}")]
    for group in groups:
        ordered = sorted(value for value, _ in group.points)
        parts.append(_path(_steps(ordered), x, y, group.css))
        for mark in (0.5, 0.9, 0.99):
            value = ordered[min(len(ordered) - 1, math.ceil(mark * len(ordered)) - 1)]
            note = f"{group.name} p{mark * 100:.0f}: {format_x(value)}".strip()
            parts.append(_dot(x(value), y(mark), group.css, 3.5, note))
    return _svg(parts)


def scatter_plot(groups: Sequence[Series], format_x: Format, format_y: Format) -> str:
    """One dot per point."""
    points = [point for group in groups for point in group.points]
    x = value_axis([at for at, _ in points], LEFT, WIDTH - RIGHT, from_zero=True)
    y = value_axis([value for _, value in points], HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, format_x, format_y)]
    for group in groups:
        for (at, value), note in zip(group.points, group.notes or [""] * len(group.points), strict=True):
            parts.append(_dot(x(at), y(value), group.css, 2.5, note))
    return _svg(parts)


def line_plot(groups: Sequence[Series], format_x: Format, format_y: Format) -> str:
    """Values over time, from zero."""
    points = [point for group in groups for point in group.points]
    x = value_axis([at for at, _ in points], LEFT, WIDTH - RIGHT, from_zero=True)
    y = value_axis([value * 1.08 for _, value in points], HEIGHT - BOTTOM, TOP, from_zero=True)
    parts = [_frame(x, y, format_x, format_y)]
    parts.extend(_path(group.points, x, y, group.css) for group in groups)
    return _svg(parts)


def stacked_bar(shares: Sequence[tuple[str, str, float]], format_value: Format) -> str:
    """One bar of (name, css, value) pieces that add up."""
    total = sum(value for _, _, value in shares) or 1.0
    width, height, at = WIDTH * 2 + 24, 34, 0.0
    parts = []
    for name, css, value in shares:
        span = width * value / total
        note = f"<title>{escape(name)}: {format_value(value)}</title>"
        inner = max(0.0, span - 2)  # a gap of background between neighbours
        box = f'x="{at:.1f}" y="0" width="{inner:.1f}" height="{height}"'
        parts.append(f'<rect class="{css}" {box} rx="3">{note}</rect>')
        at += span
    return (
        f'<svg viewBox="0 0 {width} {height}" class="bar" preserveAspectRatio="none" role="img">'
        f"{''.join(parts)}</svg>"
    )


def _frame(x: Axis, y: Axis, format_x: Format, format_y: Format) -> str:
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{format_y(value)}</text>'
        )
    bottom = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for value in x.ticks():
        at = x(value)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 19}" text-anchor="middle">{format_x(value)}</text>'
        )
    return "".join(parts)


def _steps(ordered: Sequence[float]) -> list[Point]:
    """At most a few hundred corners: more would not be visible."""
    stride = max(1, len(ordered) // 400)
    kept = [*range(0, len(ordered) - 1, stride), len(ordered) - 1]
    return [(ordered[0], 0.0), *((ordered[index], (index + 1) / len(ordered)) for index in kept)]


def _path(points: Sequence[Point], x: Axis, y: Axis, css: str) -> str:
    corners = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    return f'<polyline class="line {css}" points="{corners}"/>'


def _dot(at_x: float, at_y: float, css: str, radius: float, note: str) -> str:
    title = f"<title>{escape(note)}</title>" if note else ""
    return f'<circle class="dot {css}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="{radius}">{title}</circle>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _even_ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 in each decade; the decades alone where those are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]
