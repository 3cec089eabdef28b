"""How often pending writes are polled."""

from __future__ import annotations

import math

from kv_transfer.rank_thread import MAX_SECONDS, MIN_SECONDS, PAUSE_DIVISOR, PollPace


def looks(pace: PollPace, begin: float, seconds: float) -> int:
    """Number of polls in `seconds` without progress; a poll itself takes no time."""
    now, count = begin, 0
    while now < begin + seconds:
        now += pace.pause(now)
        count += 1
    return count


def test_a_write_that_never_ends_costs_a_look_now_and_then():
    """Many polls at first, then one per MAX_SECONDS."""
    quick = PAUSE_DIVISOR * (1 + math.log(MAX_SECONDS / MIN_SECONDS))
    assert looks(PollPace(0.0), 0.0, 60.0) < quick + 60.0 / MAX_SECONDS
    steady = PollPace(0.0)
    assert looks(steady, 3600.0, 60.0) <= 60.0 / MAX_SECONDS + 2


def test_the_end_of_a_write_is_seen_in_a_share_of_the_time_it_took():
    pace = PollPace(0.0)
    for took in (0.0001, 0.001, 0.01, 0.1, 1.0):
        assert pace.pause(took) <= max(MIN_SECONDS, took / PAUSE_DIVISOR)


def test_it_is_quick_again_once_something_happened():
    pace = PollPace(0.0)
    assert pace.pause(100.0) == MAX_SECONDS
    pace.progressed(100.0)
    assert pace.pause(100.001) == MIN_SECONDS
