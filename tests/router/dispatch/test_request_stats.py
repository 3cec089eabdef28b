"""What is counted and logged of the attempts of a request."""

from __future__ import annotations

import logging

import pytest

from cluster.errors import BlocksExhaustedError, PeerLostError
from router.dispatch.request_stats import RequestStats
from wire import common_pb2


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


def test_cached_tokens_are_those_that_the_first_worker_found() -> None:
    """A retry finds what the attempts before it have cached."""
    stats = RequestStats()
    for report, cached in (
        (common_pb2.WorkReport(), None),  # of a decode worker, or one that was lost before it began
        (common_pb2.WorkReport(cached_tokens=16, computed_prompt_tokens=40), 16),
        (common_pb2.WorkReport(cached_tokens=48, computed_prompt_tokens=8), 16),
    ):
        stats.keep(report, of_prefill=True)
        assert stats.first_cached == cached
    uncached = RequestStats()
    for report in (
        common_pb2.WorkReport(computed_prompt_tokens=56),
        common_pb2.WorkReport(cached_tokens=48, computed_prompt_tokens=8),
    ):
        uncached.keep(report, of_prefill=True)
    assert uncached.first_cached == 0
