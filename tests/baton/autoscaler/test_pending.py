"""Replicas that were requested and are slow to start: which of them are late, and which are given back."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.autoscaler import pending
from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import PoolObservation
from baton.autoscaler.report import Explained
from baton.autoscaler.state import PolicyState, PoolState

LIMITS = PoolLimits(max_replicas=8, startup_seconds=60.0)
CONFIG = AutoscalingConfig(prefill=LIMITS, decode=LIMITS, unschedulable_seconds=300.0)
STEP = 10.0


class Pool:
    """A pool of one replica that is asked for more at second 0."""

    def __init__(self, target: int) -> None:
        self.state, self.now = PoolState(target=1, ready=1), 0.0
        self.target = target

    def see(self, ready: int, *, starting: int = 0, unschedulable: int = 0) -> tuple[int, int | None]:
        """Replicas that are late, and what is left of the target once some are given back."""
        seen = PoolObservation(self.target, ready, starting=starting, unschedulable=unschedulable)
        late = pending.watch(LIMITS, self.state, seen, self.now)
        left = pending.give_back(CONFIG, LIMITS, self.state, seen, self.now)
        self.now += STEP
        return late, left

    def see_until(self, seconds: float, ready: int, **more: int) -> set[tuple[int, int | None]]:
        seen = set()
        while self.now <= seconds:
            seen.add(self.see(ready, **more))
        return seen


def test_replicas_that_load_a_large_model_are_neither_late_nor_given_back() -> None:
    pool = Pool(3)
    assert pool.see_until(1800.0, 1, starting=2) == {(0, None)}
    assert pool.see(3) == (0, None)


def test_of_those_that_did_not_come_only_the_ones_that_start_are_kept() -> None:
    pool = Pool(4)
    assert pool.see_until(60.0, 1, starting=2) == {(0, None)}
    assert pool.see_until(360.0, 1, starting=2) == {(1, None)}
    assert pool.see(1, starting=2) == (1, 3)


def test_one_that_fits_nowhere_is_given_back_early_and_one_that_loads_beside_it_stays() -> None:
    pool = Pool(3)
    assert pool.see_until(60.0, 1, starting=1, unschedulable=1) == {(0, None)}
    assert pool.see(1, starting=1, unschedulable=1) == (1, 2)


def test_a_starting_replica_counts_for_a_bounded_time() -> None:
    pool = Pool(2)
    assert pool.see_until(pending.MAX_STARTING_SECONDS, 1, starting=1) == {(0, None)}
    assert pool.see(1, starting=1) == (1, 1)


counts = st.integers(0, 4)


@given(rounds=st.lists(st.tuples(counts, counts, counts), max_size=120))
def test_no_sequence_gives_back_a_serving_or_starting_replica(
    rounds: list[tuple[int, int, int]],
) -> None:
    pool = Pool(4)
    for ready, starting, unschedulable in rounds:
        late, left = pool.see(ready, starting=starting, unschedulable=unschedulable)
        assert 0 <= late <= max(0, 4 - ready - starting)
        assert left is None or max(1, min(4, ready + starting)) <= left < 4


def test_without_a_platforms_word_a_start_that_was_seen_is_waited_for_again() -> None:
    """Ray Serve does not report what its replicas do."""
    pool = Pool(2)
    assert pool.see_until(200.0, 1) == {(0, None), (1, None)}
    pool.see(2)  # after 210 s
    asked = pool.now
    pool.target = 3
    pool.see(2)
    assert pool.see_until(asked + 210.0, 2) == {(0, None)}
    assert pool.see_until(asked + 510.0, 2) == {(1, None)}
    assert pool.see(2) == (1, 2)


def test_a_worker_that_was_away_for_long_teaches_little() -> None:
    pool = Pool(2)
    pool.state.start_seconds = 86400.0
    assert pool.see_until(pending.MAX_LEARNED * 60.0, 1) == {(0, None)}
    assert pool.see(1) == (1, None)


def test_waiting_for_a_place_is_no_start() -> None:
    pool = Pool(2)
    for _ in range(5):
        pool.see(1, unschedulable=1)
    pool.see(2)
    assert pool.state.start_seconds == 0.0


def test_starts_that_take_longer_than_configured_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    explained, state = Explained(logging.getLogger("baton.test")), PolicyState()
    state.decode.start_seconds = 50.0
    explained.warn(CONFIG, state)
    assert not caplog.messages
    state.decode.start_seconds = 95.0
    for _ in range(3):
        explained.warn(CONFIG, state)
    (said,) = caplog.messages
    assert "pool=decode" in said and "took 95 s" in said and "startup_seconds is 60" in said
