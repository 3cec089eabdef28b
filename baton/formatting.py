"""Formats of numbers for people; a dash stands for a missing value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MISSING = "–"
STATE_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "suspect": "yellow",
    "not ready": "yellow",
    "dead": "red",
    "gone": "red",
}


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
