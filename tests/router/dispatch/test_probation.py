"""Who could not be reached is left alone, for longer and longer, and comes back at the first answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from router.dispatch.probation import FIRST_SECONDS, MOST_SECONDS, Probation


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def left(probation: Probation, clock: Clock) -> float:
    """Seconds until "d" may be tried."""
    out = probation._out.get("d")
    return max(0.0, out.until - clock.now) if out is not None else 0.0


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    probation = Probation(clock)
    pauses = []
    for _ in range(7):
        probation.failed("d")
        pauses.append(left(probation, clock))
        clock.now += pauses[-1]
        assert probation.names() == frozenset(), "it may be tried"
    assert pauses == [FIRST_SECONDS * factor for factor in (1, 2, 4, 8, 16)] + [MOST_SECONDS] * 2


def test_what_was_under_way_with_the_first_failure_counts_once() -> None:
    clock = Clock()
    probation = Probation(clock)
    for _ in range(5):
        probation.failed("d")
        clock.now += FIRST_SECONDS / 10
    assert left(probation, clock) == pytest.approx(FIRST_SECONDS / 2)


def test_an_answer_ends_it_and_the_next_failure_is_a_first_one() -> None:
    clock = Clock()
    probation = Probation(clock)
    probation.failed("d")
    clock.now += FIRST_SECONDS
    probation.failed("d")
    probation.answered("d")
    assert left(probation, clock) == 0
    probation.failed("d")
    assert left(probation, clock) == FIRST_SECONDS


def test_only_who_failed_before_fails_again() -> None:
    clock = Clock()
    probation = Probation(clock)
    probation.failed_again("d")
    assert probation.names() == frozenset()
    probation.failed("d")
    clock.now += FIRST_SECONDS
    probation.failed_again("d")
    assert probation.names() == {"d"} and left(probation, clock) == 2 * FIRST_SECONDS


def test_old_failures_are_forgotten() -> None:
    clock = Clock()
    probation = Probation(clock)
    for name in range(100):
        probation.failed(str(name))
    clock.now += FIRST_SECONDS + MOST_SECONDS
    probation.failed("d")
    assert set(probation._out) == {"d"}
    assert left(probation, clock) == FIRST_SECONDS
