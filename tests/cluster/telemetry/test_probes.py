"""Probes as a kubelet sees them: status and reasons, beside the metrics on the same port."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from cluster.errors import ConfigError
from cluster.telemetry.exposition import MetricsServer
from cluster.telemetry.metrics.worker import REQUESTS_RUNNING
from cluster.telemetry.registry import Registry
from cluster.telemetry.scrape import ScrapeCollector


class Worker:
    why: list[str]

    def __init__(self) -> None:
        self.why = ["the model is being loaded"]

    def probe(self) -> list[str]:
        return self.why


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def exporter(worker: Worker) -> Iterator[MetricsServer]:
    labels = {"worker": "d-1", "role": "decode"}
    registry = Registry(labels)
    registry.add([ScrapeCollector([REQUESTS_RUNNING.read(lambda: 3)])])
    server = MetricsServer("127.0.0.1", 0, registry, {"ready": worker.probe}, labels)
    yield server
    server.close()


def ask(exporter: MetricsServer, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_failed_probe_gives_its_reason(exporter: MetricsServer, worker: Worker) -> None:
    status, body = ask(exporter, "/ready")
    assert status == 503
    assert json.loads(body) == {
        "ready": False,
        "why": ["the model is being loaded"],
        "worker": "d-1",
        "role": "decode",
    }
    worker.why = []
    status, body = ask(exporter, "/ready")
    assert status == 200 and json.loads(body)["ready"] is True


def test_metrics_are_on_the_same_port(exporter: MetricsServer) -> None:
    status, body = ask(exporter, "/metrics")
    assert status == 200
    assert b'baton_requests_running{role="decode",worker="d-1"} 3.0' in body


def test_a_port_that_is_taken_is_named(exporter: MetricsServer) -> None:
    with pytest.raises(ConfigError) as caught:
        MetricsServer("127.0.0.1", exporter.port, Registry(), {}, {})
    assert caught.value.field == "metrics_port"
