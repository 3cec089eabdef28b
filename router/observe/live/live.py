"""The live view: every two seconds this router publishes its counts, reads the others', and writes a slot."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import prometheus_client

from cluster.periodic import Periodic
from router.dispatch.services import Services
from router.observe.live.exchange import Exchange, RouterCounts
from router.observe.live.history import TICK_SECONDS, History
from router.observe.live.report import Counts, Requests, RouterReport
from router.observe.live.view import live_view
from router.observe.live.worker_rates import RatesOfWorkers
from router.observe.requests import RouterMetrics
from router.observe.tenants import result_of

CLOSE_SECONDS = 2.0


class Live:
    """`view` at any time; it is updated between `start` and `close`."""

    def __init__(
        self,
        services: Services,
        metrics: RouterMetrics,
        own_report: Callable[[Counts], RouterReport],
        clock: Callable[[], float] = time.monotonic,
    ):
        config = services.config
        self._services = services
        self._metrics = metrics
        self._own_report = own_report
        self._clock = clock
        self._exchange = Exchange(config.redis_url, config.namespace, config.router_id)
        self._routers: dict[str, RouterCounts] = {}
        self._rates = RatesOfWorkers()
        self._history = History()
        self._ticking = Periodic("updating the live view", TICK_SECONDS, self.tick)

    def start(self) -> None:
        self._ticking.start()

    async def close(self) -> None:
        """Other routers see at once that this one has gone."""
        await self._ticking.close(CLOSE_SECONDS)
        await self._exchange.leave()

    def view(self) -> dict[str, Any]:
        members = self._services.members
        members.show_status()
        own = RouterCounts(self._report(), 0.0)
        routers = {**self._routers, self._services.config.router_id: own}
        return live_view(
            self._services.config.router_id,
            members.redis_ok,
            routers,
            members.all,
            self._rates,
            self._history,
            self._services.no_handoff(),
        )

    async def tick(self) -> None:
        recorder, members = self._services.recorder, self._services.members
        if members.redis_ok:
            recorder.keep_only({worker.worker_id for worker in members.all})
        recorder.delete_idle()
        self._routers = await self._exchange.swap(self._report())
        now = self._clock()
        self._history.tick(now, {name: counts.report for name, counts in self._routers.items()})
        self._rates.tick(now, members.all)

    def _report(self) -> RouterReport:
        metrics, recorder = self._metrics, self._services.recorder
        counts = Counts(
            _requests(metrics.requests),
            _value(metrics.prompt_tokens),
            _value(metrics.cached_tokens),
            recorder.output_tokens,
            recorder.ttft.copy(),
            recorder.itl.copy(),
            dict(recorder.flows),
        )
        return self._own_report(counts)


def _requests(counter: prometheus_client.Counter) -> Requests:
    found: Counter[str] = Counter()
    for labels, value in _samples(counter):
        found[result_of(labels["outcome"])] += value
    return Requests(**found)


def _value(counter: prometheus_client.Counter) -> int:
    return sum(value for _, value in _samples(counter))


def _samples(counter: prometheus_client.Counter) -> list[tuple[dict[str, str], int]]:
    return [
        (sample.labels, int(sample.value))
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    ]
