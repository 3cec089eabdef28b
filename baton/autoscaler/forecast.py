"""Forecast of the load at the time when a replica requested now is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.autoscaler.flows import Flow, Flows

SHORT_SHARE = 0.2  # share of the usual window: one minute of five
MAX_GROWTH = 0.5  # largest share that a trend may add


@dataclass(frozen=True)
class Forecast:
    now: float  # per second, over the last minutes
    high: float  # per second: the highest of now, the last minute, and the extrapolated trend


def forecast(
    flows: Flows, quantity: Callable[[Flow], float], ahead_seconds: float, mean_seconds: float
) -> Forecast:
    """Extrapolate the change between two means over `mean_seconds` by `ahead_seconds` plus half of `mean_seconds`, the age
    of a mean. A falling trend is not extrapolated: growing late costs more than shrinking late."""
    recent, before = flows.over(mean_seconds), flows.over(mean_seconds, skip=mean_seconds)
    minute = flows.over(SHORT_SHARE * mean_seconds)
    now = recent.per_second(quantity(recent))
    high = max(now, minute.per_second(quantity(minute)))
    if before.seconds >= mean_seconds * 0.9:
        slope = (now - before.per_second(quantity(before))) / mean_seconds
        grown = now + slope * (ahead_seconds + mean_seconds / 2)
        high = max(high, min(grown, now * (1 + MAX_GROWTH)))
    return Forecast(now, high)
