"""The output of a section."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number. `bound` is its target, if it has one: "≥ 0.6", "≤ 0.002"."""

    name: str
    value: float
    unit: str = ""
    bound: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bound is met; None without a bound."""
        if not self.bound:
            return None
        sign, limit = self.bound.split(" ", 1)
        return self.value >= float(limit) if sign == "≥" else self.value <= float(limit)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Section:
    """A section's figures; `details` holds whole reports."""

    name: str
    title: str
    figures: Sequence[Figure]
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "values": {figure.name: figure.value for figure in self.figures},
            "figures": [figure.to_json() for figure in self.figures],
            "details": self.details,
        }


def repeat(measure: Callable[[], float], times: int) -> list[float]:
    """Sorted results of `times` runs, after one warm-up run."""
    measure()
    return sorted(measure() for _ in range(times))


def median_of(measure: Callable[[], float], times: int = 7) -> float:
    return statistics.median(repeat(measure, times))
