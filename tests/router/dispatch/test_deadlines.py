"""The times that requests may wait, and refusals before deadlines."""

from __future__ import annotations

import time

import pytest

from cluster.config.router import RouterConfig
from router.dispatch.deadlines import RequestDeadlines
from router.request.completion import Completion
from wire import common_pb2

CONFIG = RouterConfig(model="/m", admission_seconds=30.0, ttft_target_seconds_batch=120.0)


def deadlines(priority: int = 0, deadline: float = 600.0) -> RequestDeadlines:
    completion = Completion(
        "r", "m", [1], common_pb2.SamplingParams(), priority=priority, deadline_seconds=deadline
    )
    return RequestDeadlines(CONFIG, completion, time.monotonic())


@pytest.mark.parametrize(("priority", "seconds"), [(7, 10.0), (0, 30.0), (-1, 120.0)])
def test_each_class_has_its_target(priority, seconds):
    assert deadlines(priority).target_seconds == seconds


def test_a_refusal_comes_before_the_clients_deadline():
    assert deadlines().admission_seconds == 30.0
    assert deadlines(deadline=10.0).admission_seconds == 9.0
    assert deadlines(-1).admission_seconds == 120.0


def test_a_late_attempt_gets_a_second_unless_the_deadline_is_nearer():
    now = time.monotonic()
    assert deadlines().worker_seconds(now - 1) == 1.0
    assert deadlines(deadline=1.0).worker_seconds(now - 1) == pytest.approx(0.9, abs=0.05)
    assert deadlines().worker_seconds(now + 5) == pytest.approx(5.0, abs=0.5)
