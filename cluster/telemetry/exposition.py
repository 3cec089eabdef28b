"""Metrics as text: OpenMetrics for scrapers that accept it, because only that format carries exemplars."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from cluster.telemetry.probes import StartResponse

BODY_SECONDS = 0.1  # ten renderings per second and format cost a fifth of the interpreter at most
OPEN_METRICS = "application/openmetrics-text"


def encode(registry: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type for a request's `Accept` header."""
    if _accepts_open_metrics(accept):
        # Every name of Baton's is valid as it is. The library's default would replace the colon in vLLM's names.
        text: bytes = openmetrics.generate_latest(registry, escaping="allow-utf-8")  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _accepts_open_metrics(accept: str) -> bool:
    """By the media type alone: with the versions that clients name there would be any number of formats."""
    return any(one.partition(";")[0].strip() == OPEN_METRICS for one in accept.split(","))


class MetricsApp:
    """WSGI application that answers every path with the metrics, at most BODY_SECONDS old.

    The port needs no key, and rendering holds the interpreter lock: scrapes share a body, and one is rendered at a time.
    """

    def __init__(self, registry: Collector, clock: Callable[[], float] = time.monotonic):
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        # By whether it is OpenMetrics: when it was rendered, the text, and its content type
        self._bodies: dict[bool, tuple[float, bytes, str]] = {}

    def _encode(self, accept: str) -> tuple[bytes, str]:
        which = _accepts_open_metrics(accept)
        with self._lock:
            at, body, content_type = self._bodies.get(which, (-math.inf, b"", ""))
            if self._clock() - at >= BODY_SECONDS:
                body, content_type = encode(self._registry, accept)
                self._bodies[which] = self._clock(), body, content_type
        return body, content_type

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body, content_type = self._encode(environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body]
