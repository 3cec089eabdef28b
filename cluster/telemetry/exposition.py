"""Metrics and probes over HTTP. OpenMetrics for scrapers that accept it, because only that format carries exemplars."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from cluster.errors import ConfigError
from cluster.telemetry.short_http import FAILED, Answer, Connection, Request, ShortHttpServer

log = logging.getLogger(__name__)
BODY_SECONDS = 0.1  # that a body is used for
# Between the beginnings of two renderings, of any page and format: all together take a fifth of the interpreter at most.
RENDERING_SECONDS = 0.05
OPEN_METRICS = "application/openmetrics-text"
# A probe returns the reasons against it; an empty list means yes. It runs on the server's thread, and only reads.
Probe = Callable[[], Sequence[str]]


def encode(registry: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type for a request's `Accept` header."""
    if accepts_open_metrics(accept):
        # Every name of Baton's is valid as it is. The library's default would replace the colon in vLLM's names.
        text: bytes = openmetrics.generate_latest(registry, escaping="allow-utf-8")  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def accepts_open_metrics(accept: str) -> bool:
    """Whether the header accepts OpenMetrics, by the media type alone: its versions would make any number of formats."""
    return any(one.partition(";")[0].strip() == OPEN_METRICS for one in accept.split(","))


class MetricsPage:
    """A registry's metrics as text. A body is used for BODY_SECONDS, because the port needs no key."""

    def __init__(self, registry: Collector, clock: Callable[[], float] = time.monotonic):
        self._registry = registry
        self._clock = clock
        # By whether it is OpenMetrics: when it was rendered, and the answer
        self._answers: dict[bool, tuple[float, Answer]] = {}

    def recent(self, open_metrics: bool) -> Answer | None:
        """The last answer, if it may still be used."""
        at, answer = self._answers.get(open_metrics, (-math.inf, None))
        return answer if self._clock() - at < BODY_SECONDS else None

    def render(self, open_metrics: bool) -> Answer:
        """Called for each format by one thread at a time."""
        text, content_type = encode(self._registry, OPEN_METRICS if open_metrics else "")
        answer = Answer("200 OK", content_type, text)
        self._answers[open_metrics] = self._clock(), answer
        return answer


_PageFormat = tuple[MetricsPage, bool]  # whether it is OpenMetrics


def probe_body(
    name: str, why_not: Sequence[str], facts: Mapping[str, str], warnings: Sequence[str] = ()
) -> bytes:
    """`{"ready": false, "why": ["the model is being loaded"], …}`; `warnings` only where there are any."""
    more = {"warnings": list(warnings)} if warnings else {}
    return json.dumps({name: not why_not, "why": list(why_not), **more, **facts}).encode()


class MetricsServer:
    """Serves `/ready` and `/live`, and metrics at every other path, over plain HTTP on its own threads, until `close`.

    Probes are answered at once. A page is rendered in a format once for all scrapes that wait for it, on a thread of its
    own, so that none that hangs holds up anything else: a router's pages wait for its processes. Rendering holds the
    interpreter lock, so renderings begin RENDERING_SECONDS apart, in the order in which they were asked for.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Collector,
        probes: Mapping[str, Probe],
        facts: Mapping[str, str],
        warnings: Probe = tuple,
        pages: Mapping[str, Collector] | None = None,
    ):
        """`pages`: metrics of further paths, in place of `metrics`. Raises ConfigError if the port is taken."""
        self._metrics = MetricsPage(metrics)
        self._pages = {path: MetricsPage(registry) for path, registry in (pages or {}).items()}
        self._probes = probes
        self._facts = facts
        self._warnings = warnings
        # By page and format, until it is rendered. Weak: one that is closed meanwhile leaves nothing behind.
        self._waiting: dict[_PageFormat, weakref.WeakSet[Connection]] = {}
        self._queue: deque[_PageFormat] = deque()  # those of them whose rendering has not begun
        self._next_at = -math.inf  # when it may
        try:
            self._server = ShortHttpServer(host, port, self._respond)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} on {host}: {error}; name a free one, or 0 for any",
                field="metrics_port",
            ) from error
        self.port = self._server.port

    def close(self) -> None:
        self._server.close()

    def _respond(self, request: Request, connection: Connection) -> None:
        probe = self._probes.get(request.path)
        if probe is not None:
            connection.send(self._probed(request.path, probe()))
            return
        page = self._pages.get(request.path, self._metrics)
        open_metrics = accepts_open_metrics(request.accept)
        recent = page.recent(open_metrics)
        if recent is not None:
            connection.send(recent)
            return
        wanted = page, open_metrics
        if wanted in self._waiting:
            self._waiting[wanted].add(connection)
            return
        self._waiting[wanted] = weakref.WeakSet([connection])
        self._queue.append(wanted)
        if len(self._queue) == 1:
            self._begin_later()

    def _begin_later(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self._next_at), self._begin)

    def _begin(self) -> None:
        """Begin the next rendering for which a scrape still waits."""
        while self._queue:
            wanted = self._queue.popleft()
            if self._waiting[wanted]:
                self._next_at = asyncio.get_running_loop().time() + RENDERING_SECONDS
                self._start_rendering(*wanted)
                break
            del self._waiting[wanted]
        if self._queue:
            self._begin_later()

    def _probed(self, name: str, why_not: Sequence[str]) -> Answer:
        status = "503 Service Unavailable" if why_not else "200 OK"
        return Answer(status, "application/json", probe_body(name, why_not, self._facts, self._warnings()))

    def _start_rendering(self, page: MetricsPage, open_metrics: bool) -> None:
        loop = asyncio.get_running_loop()

        def render() -> None:
            try:
                answer = page.render(open_metrics)
            except Exception:
                log.exception("the metrics were not rendered")
                answer = FAILED
            with contextlib.suppress(RuntimeError):  # the server is closed
                loop.call_soon_threadsafe(self._rendered, page, open_metrics, answer)

        try:
            threading.Thread(target=render, name="metrics-page", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            log.exception("the metrics were not rendered")
            self._rendered(page, open_metrics, FAILED)

    def _rendered(self, page: MetricsPage, open_metrics: bool, answer: Answer) -> None:
        for connection in list(self._waiting.pop((page, open_metrics))):
            connection.send(answer)
