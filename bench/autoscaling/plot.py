"""The simulated day as one SVG: requests, replicas of both pools, and how many requests met the objectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from bench.autoscaling.day import HOUR, HOURS, Requests
from bench.autoscaling.experiment import ITL_SECONDS, TTFT_SECONDS, Run

WIDTH, PANEL, LEFT, RIGHT, GAP = 900, 150, 64, 16, 44
BIN_SECONDS = 600.0
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.t{font-weight:600}.g{stroke:#8884;stroke-width:1}"
    "polyline{fill:none;stroke-width:1.8}.a{stroke:#0969da}.b{stroke:#bf3989}.c{stroke:#1a7f37}.o{stroke:#cf222e}"
    ".ka{fill:#0969da}.kb{fill:#bf3989}"
)
Points = Sequence[tuple[float, float]]  # hours, value


def day_plot(requests: Requests, run: Run) -> str:
    """Three panels over 24 hours."""
    bins = int(HOURS * HOUR / BIN_SECONDS)
    which = np.minimum((requests.arrival // BIN_SECONDS).astype(int), bins - 1)
    total = np.bincount(which, minlength=bins)
    met = np.bincount(which, weights=run.outcome.met(TTFT_SECONDS, ITL_SECONDS), minlength=bins)
    hours = (np.arange(bins) + 0.5) * BIN_SECONDS / HOUR
    load = list(zip(hours, total / BIN_SECONDS * 60, strict=True))
    share = list(zip(hours, 100 * met / np.maximum(1, total), strict=True))
    pools = [
        [(at / HOUR, float(ready[k])) for at, ready in zip(run.seconds, run.ready, strict=True)]
        for k in (0, 1)
    ]
    most = max(value for pool in pools for _, value in pool)
    panels = [
        _panel(0, "requests per minute", (0, 500), [("a", load)]),
        _panel(
            1,
            "replicas that serve",
            (0, 5 * (most // 5 + 1)),
            [("a", _thin(pools[0])), ("b", _thin(pools[1]))],
        ),
        _panel(
            2, "% of requests within both objectives (10 minutes each)", (90, 100), [("c", share)], line=99
        ),
    ]
    key = _key(1, (("ka", "prefill"), ("kb", "decode")))
    height = 3 * (PANEL + GAP) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>A simulated day under the autoscaling policy</title><style>{STYLE}</style>"
        f"{''.join(panels)}{key}</svg>\n"
    )


def _thin(points: Points) -> Points:
    """Keep only the corners of a step function."""
    kept = [points[0]]
    for before, after in itertools.pairwise(points):
        if after[1] != before[1]:
            kept += [(after[0], before[1]), after]
    return [*kept, points[-1]]


def _panel(
    index: int,
    title: str,
    span: tuple[float, float],
    lines: Sequence[tuple[str, Points]],
    line: float | None = None,
) -> str:
    top = 26 + index * (PANEL + GAP)
    low, high = span

    def x(hour: float) -> float:
        return LEFT + hour / HOURS * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + PANEL * (1 - (min(max(value, low), high) - low) / (high - low))

    parts = [f'<text class="t" x="{LEFT}" y="{top - 8}">{title}</text>']
    for value in np.linspace(low, high, 6):
        at = y(float(value))
        parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for hour in range(0, HOURS + 1, 3):
        parts.append(f'<text x="{x(hour):.1f}" y="{top + PANEL + 16}" text-anchor="middle">{hour} h</text>')
    if line is not None:
        parts.append(f'<polyline class="o" points="{x(0):.1f},{y(line):.1f} {x(HOURS):.1f},{y(line):.1f}"/>')
    for css, points in lines:
        corners = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        parts.append(f'<polyline class="{css}" points="{corners}"/>')
    return "".join(parts)


def _key(index: int, names: Sequence[tuple[str, str]]) -> str:
    top = 26 + index * (PANEL + GAP) - 8
    return "".join(
        f'<text class="{css}" x="{LEFT + 160 + 70 * k}" y="{top}">{name}</text>'
        for k, (css, name) in enumerate(names)
    )
