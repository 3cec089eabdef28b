"""Classes of requests by priority. Between processes a class is a number: above 0 high, 0 normal, below 0 batch."""

from __future__ import annotations

from typing import Literal

PriorityClass = Literal["batch", "normal", "high"]  # the lowest first
PRIORITIES: dict[str, int] = {"high": 1, "normal": 0, "batch": -1}


def class_of(priority: int) -> PriorityClass:
    return "high" if priority > 0 else "batch" if priority < 0 else "normal"
