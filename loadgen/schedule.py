"""When sessions are due, in seconds since the run began. Made before the run, from the seed alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice, takewhile

from loadgen.config import Arrival, LoadConfig


def offsets(arrival: Arrival, rate: float, random_source: random.Random) -> Iterator[float]:
    """Endless. `constant` is evenly spaced, `poisson` has exponential gaps; both start with a gap."""
    now = 0.0
    while True:
        now += 1.0 / rate if arrival == "constant" else random_source.expovariate(rate)
        yield now


def session_schedule(config: LoadConfig) -> list[float]:
    """The open loop's: sessions start at `rate` / turns, so that requests come at `rate` in the long run."""
    assert config.rate is not None
    source = random.Random(f"schedule {config.seed}")
    times = offsets(config.arrival, config.rate / config.session_turns, source)
    if config.requests is not None:
        return list(islice(times, math.ceil(config.requests / config.session_turns)))
    seconds = config.seconds or 0.0
    return list(takewhile(lambda at: at < seconds, times))
