"""A name that could not be reached is excluded, for longer and longer, until its first answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from router.link.backoff import FIRST_SECONDS, MAX_SECONDS, Backoff


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def left(backoff: Backoff[str], clock: Clock) -> float:
    """Seconds until "d" may be tried."""
    out = backoff._exclusions.get("d")
    return max(0.0, out.until - clock.now) if out is not None else 0.0


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    backoff: Backoff[str] = Backoff(clock)
    pauses = []
    for _ in range(7):
        backoff.failed("d")
        pauses.append(left(backoff, clock))
        clock.now += pauses[-1]
        assert backoff.names() == frozenset(), "it may be tried"
    assert pauses == [FIRST_SECONDS * factor for factor in (1, 2, 4, 8, 16)] + [MAX_SECONDS] * 2


def test_calls_under_way_with_the_first_failure_count_once() -> None:
    clock = Clock()
    backoff: Backoff[str] = Backoff(clock)
    for _ in range(5):
        backoff.failed("d")
        clock.now += FIRST_SECONDS / 10
    assert left(backoff, clock) == pytest.approx(FIRST_SECONDS / 2)


def test_an_answer_ends_it_and_the_next_failure_is_a_first_one() -> None:
    clock = Clock()
    backoff: Backoff[str] = Backoff(clock)
    backoff.failed("d")
    clock.now += FIRST_SECONDS
    backoff.failed("d")
    backoff.answered("d")
    assert left(backoff, clock) == 0
    backoff.failed("d")
    assert left(backoff, clock) == FIRST_SECONDS


def test_only_a_name_that_failed_before_fails_again() -> None:
    clock = Clock()
    backoff: Backoff[str] = Backoff(clock)
    backoff.failed_again("d")
    assert backoff.names() == frozenset()
    backoff.failed("d")
    clock.now += FIRST_SECONDS
    backoff.failed_again("d")
    assert backoff.names() == {"d"} and left(backoff, clock) == 2 * FIRST_SECONDS


def test_old_failures_are_forgotten() -> None:
    clock = Clock()
    backoff: Backoff[str] = Backoff(clock)
    for name in range(100):
        backoff.failed(str(name))
    clock.now += FIRST_SECONDS + MAX_SECONDS
    backoff.failed("d")
    assert set(backoff._exclusions) == {"d"}
    assert left(backoff, clock) == FIRST_SECONDS
