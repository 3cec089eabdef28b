"""Four panels over time, one file: memory, descriptors, Redis, blocks held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from loadgen.svg import HEIGHT, WIDTH, Series, line_plot
from tests.chaos.samples import Sample

_COLOURS = ("#2a6fbb", "#d1661c", "#2e8b57", "#8b3fa0", "#b8860b", "#c0392b", "#16808a", "#555555")
_TITLE, _LEGEND, _GAP = 26, 40, 18
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#444}.title{font-size:13px;font-weight:600;fill:#111}"
    ".grid{stroke:#e4e4e4}.axis{stroke:#999}.line{fill:none;stroke-width:1.5}"
)
Value = Callable[[Sample], dict[str, float]]


def soak_plot(samples: Sequence[Sample]) -> str:
    panels: list[tuple[str, Value, Callable[[float], str]]] = [
        ("resident memory, MiB", lambda s: {n: b / 2**20 for n, b in s.rss_bytes.items()}, _number),
        ("open descriptors", lambda s: dict(s.fds), _number),
        ("Redis memory, MiB", lambda s: {"used": s.redis_bytes / 2**20} if s.redis_bytes else {}, _number),
        ("KV blocks held, under load and at rest", lambda s: dict(s.blocks_held), _number),
    ]
    height = HEIGHT + _TITLE + _LEGEND
    drawn = []
    for index, (title, value, form) in enumerate(panels):
        x, y = (index % 2) * (WIDTH + _GAP), (index // 2) * (height + _GAP)
        drawn.append(f'<g transform="translate({x + 8},{y + 8})">{_panel(samples, title, value, form)}</g>')
    width, tall = 2 * WIDTH + _GAP + 16, 2 * height + _GAP + 16
    colours = "".join(f".s{i}{{stroke:{colour}}}" for i, colour in enumerate(_COLOURS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" width="{width}" height="{tall}">'
        f'<style>{_STYLE}{colours}</style><rect width="{width}" height="{tall}" fill="#fff"/>'
        f"{''.join(drawn)}</svg>\n"
    )


def _panel(samples: Sequence[Sample], title: str, value: Value, form: Callable[[float], str]) -> str:
    names = list(dict.fromkeys(name for sample in samples for name in value(sample)))
    groups = [
        Series(
            name,
            f"s{index % len(_COLOURS)}",
            [(sample.seconds / 60, held[name]) for sample in samples if name in (held := value(sample))],
        )
        for index, name in enumerate(names)
    ]
    plot = line_plot(groups, lambda minutes: f"{minutes:g} min", form) if groups else "<svg></svg>"
    place = f'<svg y="{_TITLE}" width="{WIDTH}" height="{HEIGHT}" '
    legend = []
    for index, name in enumerate(names):
        x, y = (index % 4) * (WIDTH // 4), _TITLE + HEIGHT + 14 + (index // 4) * 16
        colour = _COLOURS[index % len(_COLOURS)]
        legend.append(f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{colour}"/>')
        legend.append(f'<text x="{x + 13}" y="{y}">{escape(name)}</text>')
    heading = f'<text class="title" x="0" y="16">{escape(title)}</text>'
    return heading + plot.replace("<svg ", place, 1) + "".join(legend)


def _number(value: float) -> str:
    return f"{value:,.0f}"
