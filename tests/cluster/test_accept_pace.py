"""The processor time that accepting takes at most."""

from __future__ import annotations

from cluster.accept_pace import ACCEPTS_PER_TURN, MAX_PAUSE_SECONDS, AcceptPace


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_pause_is_as_long_as_the_thread_has_computed() -> None:
    clock = Clock()
    pace = AcceptPace(clock)
    computed = paused = 0.0
    for number in range(1, 10 * ACCEPTS_PER_TURN + 1):
        clock.now += 0.001
        computed += 0.001
        pause = pace.pause_seconds()
        assert (pause is None) == bool(number % ACCEPTS_PER_TURN)
        paused += pause or 0.0
    assert abs(paused - computed) < 1e-9


def test_what_is_computed_in_a_pause_counts_in_the_next() -> None:
    clock = Clock()
    pace = AcceptPace(clock)
    pauses = []
    for _ in range(2 * ACCEPTS_PER_TURN):
        pause = pace.pause_seconds()
        if pause is not None:
            pauses.append(pause)
            clock.now += 0.02
    assert pauses[0] == 0.0 and abs(pauses[1] - 0.02) < 1e-9


def test_a_pause_has_an_end() -> None:
    clock = Clock()
    pace = AcceptPace(clock)
    clock.now += 60.0
    assert [pace.pause_seconds() for _ in range(ACCEPTS_PER_TURN)][-1] == MAX_PAUSE_SECONDS
