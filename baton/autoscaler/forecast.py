"""What will be asked when a replica that is asked for now can work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.autoscaler.flows import Flow, Flows

SHORT_SHARE = 0.2  # of the usual time: a minute of five
MAX_GROWTH = 0.5  # a trend is not believed to add more than this share


@dataclass(frozen=True)
class Forecast:
    now: float  # a second, over the last minutes
    high: float  # a second: the highest of now, the last minute, and the trend carried on


def forecast(
    flows: Flows, quantity: Callable[[Flow], float], ahead_seconds: float, mean_seconds: float
) -> Forecast:
    """Carries the change from one mean over `mean_seconds` to the next on by `ahead_seconds` and half of such a time,
    which is how far a mean lies back. A falling trend is not carried on: growing late costs more than shrinking late."""
    recent, before = flows.over(mean_seconds), flows.over(mean_seconds, skip=mean_seconds)
    minute = flows.over(SHORT_SHARE * mean_seconds)
    now = recent.per_second(quantity(recent))
    high = max(now, minute.per_second(quantity(minute)))
    if before.seconds >= mean_seconds * 0.9:
        slope = (now - before.per_second(quantity(before))) / mean_seconds
        grown = now + slope * (ahead_seconds + mean_seconds / 2)
        high = max(high, min(grown, now * (1 + MAX_GROWTH)))
    return Forecast(now, high)
