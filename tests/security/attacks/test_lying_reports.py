"""Workers that serve and report false numbers of it: a router learns nothing from these, and no later request, metric or
view suffers."""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.dispatch.work_reports import WorkReports
from tests.harness.router import run_router, stub_workers, wait_ready
from tests.security.attacks.lying_stubs import LIES, MOST
from wire import common_pb2

BODY = {"model": "tiny", "prompt": "abc " * 40, "max_tokens": 5}
HONEST = common_pb2.WorkReport(
    prefill_queue_seconds=0.5,
    prefill_seconds=1.0,
    handoff_exposed_seconds=0.1,
    prompt_compute_seconds=1.0,
    cached_tokens=16,
    computed_prompt_tokens=84,
    kv_bytes_shipped=84 << 20,
    transport="nixl",
    worker_id="p",
)


def checked(report: common_pb2.WorkReport) -> common_pb2.WorkReport:
    return WorkReports().checked(report, "p", seconds=2.0, tokens=100)


def test_a_report_that_can_be_true_is_kept() -> None:
    assert checked(HONEST) is HONEST


@pytest.mark.parametrize("lie", LIES, ids="-".join)
def test_a_report_that_cannot_be_true_is_left_out_whole(lie: dict[str, Any]) -> None:
    report = common_pb2.WorkReport()
    report.CopyFrom(HONEST)
    report.MergeFrom(common_pb2.WorkReport(**lie))
    assert checked(report) == common_pb2.WorkReport(), lie


def test_no_number_of_a_report_may_be_anything() -> None:
    """Also of the fields that later versions add."""
    for one in common_pb2.WorkReport.DESCRIPTOR.fields:
        if one.cpp_type == one.CPPTYPE_STRING:
            value: Any = "x" * 100_000
        else:
            value = math.nan if one.cpp_type == one.CPPTYPE_DOUBLE else MOST
        report = common_pb2.WorkReport(**{one.name: value})
        assert checked(report) == common_pb2.WorkReport(), one.name


def test_a_worker_that_always_lies_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    reports, lie = WorkReports(), common_pb2.WorkReport(prefill_seconds=math.inf)
    for _ in range(1000):
        reports.checked(lie, "p", seconds=1.0, tokens=1)
    assert reports.dropped == 1000 and len(caplog.messages) == 10


@pytest.mark.long
def test_false_reports_change_no_later_request(router_model: Path, redis_server: Any, tmp_path: Path) -> None:
    """One with an infinite time of a hand-off made every later request of the router fail."""
    namespace = f"test-{secrets.token_hex(4)}"
    config = {"model": str(router_model), "served_model_name": "tiny"}
    config |= {"redis_url": redis_server.url, "namespace": namespace}
    stubs = stub_workers(redis_server.url, namespace, "tests.security.attacks.lying_stubs")
    with stubs, run_router(tmp_path, config) as router, httpx.Client(base_url=router.http) as client:
        wait_ready(router.http)
        for _ in range(2 * len(LIES)):
            answer = client.post("/v1/completions", json=BODY, timeout=30)
            assert answer.status_code == 200, answer.text
        for path in ("/v1/cluster", "/v1/cluster/live"):
            assert client.get(path).status_code == 200
        samples = [line for line in client.get("/metrics").text.splitlines() if line and line[0] != "#"]
        # Without TLS no certificate expires.
        samples = [line for line in samples if not line.startswith("baton_certificate_expires_seconds")]
        assert samples and not [
            line for line in samples if line.split()[-1].lower().strip("+-") in ("inf", "nan")
        ]
