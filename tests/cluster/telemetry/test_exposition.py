"""Concurrent scrapes share one rendering, because the port of metrics needs no key."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.telemetry import exposition
from cluster.telemetry.exposition import BODY_SECONDS, MetricsPage, MetricsServer, accepts_open_metrics
from tests.harness.waiting import wait_for


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


def scrape(page: MetricsPage, accept: str = "") -> str:
    open_metrics = accepts_open_metrics(accept)
    answer = page.recent(open_metrics) or page.render(open_metrics)
    assert answer.content_type.startswith(accept.partition(";")[0] or "text/plain")
    return answer.body.decode()


def test_a_body_is_reused_for_a_moment() -> None:
    now = 5.0
    registry = Counting()
    page = MetricsPage(registry, lambda: now)
    assert [scrape(page) for _ in range(3)] == 3 * [scrape(page)] and "times 1.0" in scrape(page)
    now += BODY_SECONDS - 0.01
    assert "times 1.0" in scrape(page)
    now += 0.02
    assert "times 2.0" in scrape(page)


def test_each_format_has_a_body_of_its_own() -> None:
    page = MetricsPage(Counting(), lambda: 0.0)
    for _ in range(2):
        assert "times 1.0" in scrape(page)
        assert scrape(page, "application/openmetrics-text").endswith("# EOF\n")


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_the_versions_that_scrapers_name_are_no_formats(kind: str) -> None:
    """A body was rendered and kept for each: a client made gigabytes of them. Words as versions were errors."""
    registry = Counting()
    page = MetricsPage(registry, lambda: 0.0)
    for version in ("1.0.0", "1.0.1", "1.0.2", "0.0.4", "one", ""):
        for more in ("", ";escaping=dots", ";q=0.5"):
            assert "times 1.0" in scrape(page, f"{kind}; version={version}{more}")
    assert registry.times == 1 and len(page._answers) == 1


def test_32_scrapers_at_once_cost_one_rendering() -> None:
    registry = Counting()
    registry.go_on.clear()
    server = MetricsServer("127.0.0.1", 0, registry, {}, {})
    with ThreadPoolExecutor(32) as scrapers:
        scrapes = [
            scrapers.submit(httpx.get, f"http://127.0.0.1:{server.port}/metrics", timeout=20)
            for _ in range(32)
        ]
        wait_for(lambda: sum(map(len, server._waiting.values())) == 32, 20, "all of them wait")
        registry.go_on.set()
        assert all("times 1.0" in one.result(20).text for one in scrapes)
    server.close()
    assert (registry.times, registry.together) == (1, 1)


def test_renderings_of_all_pages_and_formats_begin_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs holds up no other."""
    monkeypatch.setattr(exposition, "RENDERING_SECONDS", 0.02)
    next_begins: list[float] = []  # of each rendering: when the next one may begin
    hanging = Counting()
    hanging.go_on.clear()
    server = MetricsServer("127.0.0.1", 0, hanging, {}, {}, pages={"second": Counting()})
    start = server._start_rendering

    def note(page: MetricsPage, open_metrics: bool) -> None:
        next_begins.append(server._next_at)
        start(page, open_metrics)

    monkeypatch.setattr(server, "_start_rendering", note)
    kinds = ("text/plain", "application/openmetrics-text")
    with ThreadPoolExecutor(4) as scrapers:
        for path in ("metrics", "second"):
            scrapes = [
                scrapers.submit(
                    httpx.get, f"http://127.0.0.1:{server.port}/{path}", headers={"accept": kind}, timeout=20
                )
                for kind in kinds
            ]
        assert all(one.result(20).status_code == 200 for one in scrapes), "those of the second page"
        hanging.go_on.set()
    server.close()
    assert len(next_begins) == 4
    assert all(later - earlier > 0.0199 for earlier, later in itertools.pairwise(next_begins))


def test_a_scrape_that_is_given_up_before_its_turn_costs_no_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposition, "RENDERING_SECONDS", 0.02)
    first, second, third = Counting(), Counting(), Counting()
    server = MetricsServer("127.0.0.1", 0, first, {}, {}, pages={"second": second, "third": third})
    begin_later = server._begin_later

    def close_those_of_second() -> None:
        for (page, _), waiting in server._waiting.items():
            if page is server._pages["second"]:
                for connection in list(waiting):
                    connection.close()
        begin_later()

    with ThreadPoolExecutor(1) as scrapers:
        monkeypatch.setattr(server, "_begin_later", close_those_of_second)
        given_up = scrapers.submit(httpx.get, f"http://127.0.0.1:{server.port}/second", timeout=20)
        assert isinstance(given_up.exception(20), httpx.RemoteProtocolError)
        assert httpx.get(f"http://127.0.0.1:{server.port}/third", timeout=20).status_code == 200
    server.close()
    assert (second.times, third.times) == (0, 1) and not server._waiting
