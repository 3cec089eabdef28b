"""How often the landing thread polls while parts are expected: often after an arrival, then at growing intervals."""

from __future__ import annotations

from kv_transfer.receiver_rank import FAST_POLL_SECONDS, PATIENCE, SLOW_POLL_SECONDS, pause_of


def looks(seconds: float) -> int:
    """Number of polls in `seconds` without an arrival."""
    now, count = 0.0, 0
    while now < seconds:
        now += pause_of(now)
        count += 1
    return count


def test_looks_become_rarer_while_nothing_arrives():
    assert looks(0.02) <= 80, "a look every 50 µs would make 400"
    assert looks(1.0) <= 600
    assert looks(0.0005) >= 8


def test_a_part_is_seen_soon_after_it_arrived():
    for milliseconds in range(1, 32):
        waited = milliseconds / 1000
        assert pause_of(waited) <= max(FAST_POLL_SECONDS, waited / PATIENCE)
    assert pause_of(60.0) == SLOW_POLL_SECONDS
