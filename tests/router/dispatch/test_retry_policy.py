"""When a request is retried, and when it is given up."""

from __future__ import annotations

import pytest

from cluster.errors import (
    BlocksExhaustedError,
    DeadlineError,
    OverloadedError,
    PeerLostError,
    UnavailableError,
)
from cluster.protocol.times import RETRY_PAUSE_SECONDS
from router.dispatch.retry_policy import RetryPolicy

LOST = PeerLostError("gone")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_workers_that_are_not_there_cost_time_only():
    clock = Clock()
    retry_policy = RetryPolicy(3, 30.0, clock)
    tries = 0

    def try_on():
        nonlocal tries
        while True:
            clock.now += retry_policy.pause_seconds(LOST, 0.0, progress=False, costly=False)
            tries += 1

    with pytest.raises(UnavailableError) as caught:
        try_on()
    assert 30.0 - RETRY_PAUSE_SECONDS <= clock.now <= 30.0
    assert tries < 80
    assert caught.value.retry_after_seconds > 0


def test_a_request_that_workers_die_of_is_given_up():
    retry_policy = RetryPolicy(3, 30.0, Clock())
    for _ in range(2):
        retry_policy.pause_seconds(LOST, 0.0, progress=False, costly=True)
    with pytest.raises(UnavailableError, match="3 attempts"):
        retry_policy.pause_seconds(LOST, 0.0, progress=False, costly=True)


def test_a_token_restarts_both_limits():
    clock = Clock()
    retry_policy = RetryPolicy(2, 30.0, clock)
    for _ in range(20):
        clock.now += 29.0
        retry_policy.pause_seconds(LOST, 0.0, progress=True, costly=True)
        retry_policy.pause_seconds(LOST, 0.0, progress=False, costly=True)


def test_the_first_retry_is_immediate_and_a_hint_is_kept():
    retry_policy = RetryPolicy(8, 30.0, Clock())
    assert retry_policy.pause_seconds(LOST, 0.0, progress=False, costly=False) == 0.0
    assert retry_policy.pause_seconds(LOST, 0.25, progress=False, costly=False) == 0.25
    full = BlocksExhaustedError("full", retry_after_seconds=60.0)
    with pytest.raises(OverloadedError) as caught:
        retry_policy.pause_seconds(full, 60.0, progress=False, costly=True)
    assert caught.value.retry_after_seconds == 60.0


@pytest.mark.parametrize("reason", [DeadlineError("queued"), OverloadedError("full")])
def test_workers_that_are_behind_are_no_time_out(reason):
    clock = Clock()
    retry_policy = RetryPolicy(8, 1.0, clock)
    clock.now = 1.0
    with pytest.raises(OverloadedError) as caught:
        retry_policy.pause_seconds(reason, 0.1, progress=False, costly=False)
    assert caught.value.retry_after_seconds == 1.0


def test_a_client_reads_in_a_sentence_that_kv_blocks_were_short():
    retry_policy = RetryPolicy(8, 0.0, Clock())
    with pytest.raises(
        OverloadedError, match="in time: no decode worker had enough free KV blocks"
    ) as caught:
        retry_policy.pause_seconds(BlocksExhaustedError("inside"), 0.1, progress=False, costly=False)
    assert "inside" not in str(caught.value)
