"""Concurrent scrapes share one rendering, because the port of metrics needs no key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.telemetry.exposition import BODY_SECONDS, MetricsApp


class Counting(Collector):
    """Counts how often it is rendered, and how often at the same time."""

    def __init__(self) -> None:
        self.times = self.now = self.together = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.times += 1
        self.now += 1
        self.together = max(self.together, self.now)
        assert self.go_on.wait(20)
        self.now -= 1
        yield GaugeMetricFamily("times", "help", self.times)


def scrape(app: MetricsApp, accept: str = "") -> str:
    told: list[Any] = []
    (body,) = app({"HTTP_ACCEPT": accept}, lambda *given: told.append(given))
    headers = dict(told[0][1])
    assert int(headers["Content-Length"]) == len(body)
    assert headers["Content-Type"].startswith(accept.partition(";")[0] or "text/plain")
    return body.decode()


def test_a_body_is_reused_for_a_moment() -> None:
    now = 5.0
    registry = Counting()
    app = MetricsApp(registry, lambda: now)
    assert [scrape(app) for _ in range(3)] == 3 * [scrape(app)] and "times 1.0" in scrape(app)
    now += BODY_SECONDS - 0.01
    assert "times 1.0" in scrape(app)
    now += 0.02
    assert "times 2.0" in scrape(app)


def test_each_format_has_a_body_of_its_own() -> None:
    app = MetricsApp(Counting(), lambda: 0.0)
    for _ in range(2):
        assert "times 1.0" in scrape(app)
        assert scrape(app, "application/openmetrics-text").endswith("# EOF\n")


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_the_versions_that_scrapers_name_are_no_formats(kind: str) -> None:
    """A body was rendered and kept for each: a client made gigabytes of them. Words as versions were errors."""
    registry = Counting()
    app = MetricsApp(registry, lambda: 0.0)
    for version in ("1.0.0", "1.0.1", "1.0.2", "0.0.4", "one", ""):
        for more in ("", ";escaping=dots", ";q=0.5"):
            assert "times 1.0" in scrape(app, f"{kind}; version={version}{more}")
    assert registry.times == 1 and len(app._bodies) == 1


def test_32_scrapers_at_once_cost_one_rendering() -> None:
    registry = Counting()
    app = MetricsApp(registry, lambda: 0.0)
    registry.go_on.clear()
    scrapers = [threading.Thread(target=scrape, args=(app,)) for _ in range(32)]
    for one in scrapers:
        one.start()
    registry.go_on.set()
    for one in scrapers:
        one.join(20)
    assert (registry.times, registry.together) == (1, 1)
