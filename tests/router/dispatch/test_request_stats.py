"""The log line of a request's attempts."""

from __future__ import annotations

import logging

import pytest

from cluster.errors import BlocksExhaustedError, PeerLostError
from router.dispatch.request_stats import RequestStats


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_of_many_refusals_by_full_workers_a_few_are_logged_with_their_number(
    logged: pytest.LogCaptureFixture,
) -> None:
    stats = RequestStats()
    for _ in range(134):
        stats.retry(BlocksExhaustedError("7 KV blocks are needed, 3 are free"), "r")
    assert stats.retries["BlocksExhaustedError"] == 134
    assert len(logged.messages) == 8
    assert logged.messages[0].startswith("attempt failed: 7 KV blocks are needed, 3 are free")
    assert logged.messages[-1].endswith("(BlocksExhaustedError, number 128 of this request)")
    assert logged.records[0].__dict__["request_id"] == "r"


def test_every_loss_of_a_worker_is_logged(logged: pytest.LogCaptureFixture) -> None:
    stats = RequestStats()
    for _ in range(5):
        stats.retry(PeerLostError("no message received for 5.0 s"), "r")
    assert len(logged.messages) == 5
