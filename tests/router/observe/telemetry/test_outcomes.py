"""How a request is counted, by its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import CancelledError, UnavailableError
from cluster.telemetry.metrics import router
from router.dispatch.request_stats import RequestStats
from router.observe.requests import RouterMetrics
from router.request.completion import Outcome
from wire import inference_pb2


def dispatcher(**how: Any) -> Any:
    """As much of a RequestDispatcher as is counted."""
    ended = {"failure": "", "complete": False, **how}
    outcome = Outcome(inference_pb2.Usage(), inference_pb2.Timings())
    told: list[str] = []
    return SimpleNamespace(
        tenant="t",
        model="m",
        trace_id="",
        first_token_seconds=None,
        outcome=outcome,
        stats=RequestStats(),
        finish_trace=told.append,
        told=told,
        **ended,
    )


@pytest.mark.parametrize(
    ("ended", "outcome", "result"),
    [
        ({"complete": True}, "ok", "ok"),
        ({}, "cancelled", "cancelled"),
        # Over HTTP a stream's status has been sent by then, and its end raises nothing.
        ({"failure": "UnavailableError"}, "UnavailableError", "failed"),
        ({"failure": "DeadlineError", "complete": True}, "DeadlineError", "failed"),
    ],
)
def test_streams_are_counted_by_their_end(ended: dict[str, Any], outcome: str, result: str) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    one = dispatcher(**ended)
    with metrics.request(one):
        pass
    assert metrics.requests.labels("m", outcome)._value.get() == 1
    counted = metrics.tenants.of("t").requests
    assert {name: count for name, count in counted.items() if count} == {result: 1}
    labels = {"tenant": "t", "result": result}
    assert metrics.registry.get_sample_value("baton_tenant_requests_total", labels) == 1, "it is scraped"
    assert one.told == [outcome]
    assert metrics.tenants.of("t").in_flight == 0


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), CancelledError("the client disconnected")], ids=type
)
def test_a_client_that_has_its_last_token_and_goes_has_cancelled_nothing(error: BaseException) -> None:
    """Over gRPC its call is cancelled; over HTTP an error says so, which counted as a failure and raised an alert."""
    metrics = RouterMetrics(CollectorRegistry())
    for complete in (True, False):
        with pytest.raises(type(error)), metrics.request(dispatcher(complete=complete)):
            raise error
    counted = metrics.tenants.of("t").requests
    assert {name: count for name, count in counted.items() if count} == {"ok": 1, "cancelled": 1}


def test_errors_before_the_first_byte_are_counted_too() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    one = dispatcher()
    with pytest.raises(UnavailableError), metrics.request(one):
        raise UnavailableError("no worker is there")
    assert metrics.requests.labels("m", "UnavailableError")._value.get() == 1
    assert one.told == ["UnavailableError"]


def test_each_stage_has_its_own_seconds() -> None:
    metrics, one = RouterMetrics(CollectorRegistry(), ["m"]), dispatcher(complete=True)
    fields = [field.name for field in inference_pb2.Timings.DESCRIPTOR.fields]
    seconds: dict[str, Any] = {
        name: float(number) for number, name in enumerate(fields, 1) if name.endswith("_seconds")
    }
    one.outcome = Outcome(inference_pb2.Usage(), inference_pb2.Timings(**seconds))
    with metrics.request(one):
        pass
    del seconds["total_seconds"]
    assert seconds == {
        f"{sample.labels['stage']}_seconds": sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == f"{router.STAGES.name}_sum"
    }
