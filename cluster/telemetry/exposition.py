"""Metrics as text: OpenMetrics for scrapers that accept it, because only that format carries exemplars."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from cluster.telemetry.probes import StartResponse

BODY_SECONDS = 0.1  # ten renderings per second cost a tenth of the interpreter at most


def encode(registry: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type for a request's `Accept` header."""
    encoder, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        # Every name of Baton's is valid as it is. The library's default would replace the colon in vLLM's names.
        text: bytes = openmetrics.generate_latest(registry, escaping="allow-utf-8")  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return encoder(registry), content_type


class MetricsApp:
    """WSGI application that answers every path with the metrics, at most BODY_SECONDS old.

    The port needs no key, and rendering holds the interpreter lock: scrapes share a body, and one is rendered at a time.
    """

    def __init__(self, registry: Collector, clock: Callable[[], float] = time.monotonic):
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._bodies: dict[
            str, tuple[float, bytes]
        ] = {}  # by content type: when it was rendered, and the text

    def _encode(self, accept: str) -> tuple[bytes, str]:
        content_type = choose_encoder(accept)[1]
        with self._lock:
            at, body = self._bodies.get(content_type, (-math.inf, b""))
            if self._clock() - at >= BODY_SECONDS:
                body = encode(self._registry, accept)[0]
                self._bodies[content_type] = self._clock(), body
        return body, content_type

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body, content_type = self._encode(environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body]
