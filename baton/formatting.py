"""Tables and formats of numbers for people; a dash stands for a missing value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

MISSING = "–"
# But tabs and ends of lines. What is not printable by Unicode, such as the space of Japanese, controls nothing.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
STATE_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "suspect": "yellow",
    "not ready": "yellow",
    "dead": "red",
    "gone": "red",
}


def table(left: Iterable[str], right: Iterable[str] = (), *, head: str = "bold", gap: int = 2) -> Table:
    """Make a table without lines; columns in `right` hold numbers."""
    made = Table(box=None, header_style=head, padding=(0, gap, 0, 0), pad_edge=False)
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def text(of: Mapping[str, Any], name: str) -> str:
    """A field as text, its control characters replaced: a router passes workers' texts on as they are."""
    value = of.get(name)
    if value in (None, ""):
        return MISSING
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))


def answer_text(answer: str) -> str:
    """A model's text for a terminal, as far as it controls none: an escape sequence may set the clipboard, and the model
    may have read it in a document."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", answer)


def cell(of: Mapping[str, Any], name: str) -> Text:
    """A field for a table, which would read markup from a plain string: names and IPv6 addresses have brackets as well."""
    return Text(text(of, name))


def state_text(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def shown(of: Mapping[str, Any], name: str, write: Callable[[float], str]) -> str:
    value = of.get(name)
    return write(value) if isinstance(value, int | float) and not isinstance(value, bool) else MISSING


def count(value: float) -> str:
    return f"{value:,.0f}"


def share(value: float) -> str:
    return f"{value:.0%}"


def rate(value: float) -> str:
    """Format a rate with three digits, more only for larger numbers."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bar(value: float, cells: int) -> str:
    filled = round(max(0.0, min(1.0, value)) * cells)
    return f"{'█' * filled}{'░' * (cells - filled)}"


def gauge(value: float) -> str:
    return f"{bar(value, 5)} {value:4.0%}"


def size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def size_rate(value: float) -> str:
    return f"{size(value)}/s"


def seconds(value: float) -> str:
    """Format a latency in seconds."""
    if value >= 1.0:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def duration(value: float) -> str:
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
