"""One frame of `baton top`, for the terminal's width and height."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from baton.formatting import count, rate, seconds, share, shown, size_rate
from baton.top.feed import FeedSnapshot
from baton.top.tables import Detail, routers_table, workers_table

WIDE_COLUMNS = 108
TIGHT_COLUMNS = 72  # below it, bars make room for names
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_CELLS = 60
_BESIDE_SPARK = {"latency": 50, "traffic": 38}  # columns that the other cells and the frame take
_ROWS_BESIDE_WORKERS_WIDE = 16
_ROWS_BESIDE_WORKERS_NARROW = 22
_TRAFFIC = (
    ("requests/s", "requests_per_second", rate),
    ("output tokens/s", "output_tokens_per_second", rate),
    ("prompt tokens/s", "prompt_tokens_per_second", rate),
    ("KV handed over", "kv_bytes_per_second", size_rate),
)


def frame(
    look: FeedSnapshot, *, width: int, height: int | None = None, lost_seconds: float = 0.0
) -> RenderableType:
    """`height` bounds the number of workers shown; None shows all. What is missing in the view shows as a dash."""
    wide = width >= WIDE_COLUMNS
    headline = _headline(look, lost_seconds)
    if look.view is None:
        return Group(headline)
    parts = Group(*_parts(look.view, width, _room(look.view, wide, height)))
    return Group(headline, Styled(parts, Style(dim=True)) if look.problem else parts)


def _room(view: Mapping[str, Any], wide: bool, height: int | None) -> int | None:
    if height is None:
        return None
    beside = _ROWS_BESIDE_WORKERS_WIDE if wide else _ROWS_BESIDE_WORKERS_NARROW
    return max(3, height - beside - len(view.get("routers") or ()))


def _headline(look: FeedSnapshot, lost_seconds: float) -> RenderableType:
    line = Text()
    line.append("baton", style="bold")
    line.append(f"  {look.address}", style="dim")
    if look.problem:
        line.append(f"  {look.problem}", style="red")
        line.append(f"; trying again for {lost_seconds:.0f} s", style="red")
    elif look.view is None:
        line.append("  connecting", style="dim")
    else:
        now, redis = look.view.get("now") or {}, look.view.get("redis") or {}
        line.append(f"  {shown(now, 'requests_in_flight', count)} in flight")
        line.append(f"  {shown(now, 'cached_ratio', share)} of prompts cached")
        line.append(*(("  Redis ok", "green") if redis.get("ok") else ("  Redis gone", "red")))
    return line


def _parts(view: Mapping[str, Any], width: int, room: int | None) -> Sequence[RenderableType]:
    wide = width >= WIDE_COLUMNS
    beside = width // 2 if wide else width
    latency = _panel("latency, last minute", _latencies(view, beside))
    traffic = _panel("traffic, last 10 s", _traffic(view, beside))
    above: RenderableType = Group(latency, traffic)
    if wide:
        above = Table.grid(expand=True, padding=0)
        above.add_column(ratio=1)
        above.add_column(ratio=1)
        above.add_row(latency, traffic)
    workers = view.get("workers") or []
    inside: RenderableType = Text("no worker is registered", style="yellow")
    if workers:
        detail: Detail = "wide" if wide else "tight" if width < TIGHT_COLUMNS else "narrow"
        inside = workers_table(workers, view.get("flows") or (), detail, room)
    return [above, _panel("workers", inside), _panel("routers", routers_table(view.get("routers") or ()))]


def _panel(title: str, inside: RenderableType) -> Panel:
    return Panel(
        inside, title=Text(title, style="dim"), title_align="left", box=box.ROUNDED, border_style="dim"
    )


def _latencies(view: Mapping[str, Any], width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True, min_width=7)
    table.add_column(no_wrap=True, style="cyan")
    heads = ("p50", "p90", "p99", "p99, last 5 min" if width >= 70 else "")
    table.add_row("", *(Text(name, style="dim") for name in heads))
    now, history = view.get("now") or {}, view.get("history") or {}
    for name, key in (("first token", "ttft"), ("between tokens", "itl")):
        of = now.get(key) or {}
        cells = [shown(of, percentile, seconds) for percentile in ("p50", "p90", "p99")]
        table.add_row(name, *cells, _spark(history, f"{key}_p99", width - _BESIDE_SPARK["latency"]))
    failed, refused = (shown(now, f"{what}_per_second", rate) for what in ("failed", "refused"))
    style = "bold red" if now.get("failed_per_second") else "dim"
    table.add_row(
        Text("failed, refused", style="dim"), Text(f"{failed}/s", style=style), Text(f"{refused}/s")
    )
    return table


def _traffic(view: Mapping[str, Any], width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=11)
    table.add_column(no_wrap=True, style="cyan")
    now, history = view.get("now") or {}, view.get("history") or {}
    for name, key, write in _TRAFFIC:
        line = _spark(history, key, width - _BESIDE_SPARK["traffic"])
        table.add_row(name, shown(now, key, write), line)
    if not (reason := now.get("no_handoff")):
        return table
    return Group(table, Text(f"no hand-offs: {reason}", style="yellow"))


def _spark(history: Mapping[str, Any], key: str, cells: int) -> str:
    return sparkline(history.get(key) or (), min(_SPARK_CELLS, cells))


def sparkline(values: Sequence[float | None], cells: int) -> str:
    """Draw `values`, oldest first, in at most `cells` columns; None leaves a gap. Zero is the lowest block."""
    heights = [_mean(part) for part in _columns(values, cells)]
    top = max((value for value in heights if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else _block(value / top) for value in heights)


def _columns(values: Sequence[float | None], cells: int) -> list[Sequence[float | None]]:
    """Group neighbouring values into columns."""
    if cells < 1:
        return []
    if len(values) <= cells:
        return [[value] for value in values]
    edges = [index * len(values) // cells for index in range(cells + 1)]
    return [values[low:high] for low, high in itertools.pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _block(height: float) -> str:
    """`height`: 0 … 1."""
    return _BLOCKS[min(len(_BLOCKS) - 1, int(height * len(_BLOCKS)))]
