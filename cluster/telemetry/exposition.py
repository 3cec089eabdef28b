"""Metrics as text: OpenMetrics for scrapers that accept it, because only that format carries exemplars."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

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


# A probe returns the reasons against it; an empty list means yes. It runs on the server's threads and only reads.
Probe = Callable[[], Sequence[str]]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


def probe_body(name: str, why_not: Sequence[str], facts: Mapping[str, str]) -> bytes:
    """`{"ready": false, "why": ["the model is being loaded"], …}`"""
    return json.dumps({name: not why_not, "why": list(why_not), **facts}).encode()


class ProbeApp:
    """Answers `/ready` and `/live` with 200 or 503 and passes every other path on."""

    def __init__(self, rest: WsgiApp, probes: Mapping[str, Probe], facts: Mapping[str, str]):
        self._rest = rest
        self._probes = probes
        self._facts = facts

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        name = environ.get("PATH_INFO", "").strip("/")
        probe = self._probes.get(name)
        if probe is None:
            return self._rest(environ, start_response)
        why_not = probe()
        body = probe_body(name, why_not, self._facts)
        status = "503 Service Unavailable" if why_not else "200 OK"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]
