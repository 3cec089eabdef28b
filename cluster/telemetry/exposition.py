"""Metrics as text: OpenMetrics for scrapers that accept it, because only that format carries exemplars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from cluster.telemetry.probes import StartResponse


def encode(registry: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type for a request's `Accept` header."""
    encoder, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        # Every name of Baton's is valid as it is. The library's default would replace the colon in vLLM's names.
        text: bytes = openmetrics.generate_latest(registry, escaping="allow-utf-8")  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return encoder(registry), content_type


class MetricsApp:
    """WSGI application that answers every path with the metrics."""

    def __init__(self, registry: Collector):
        self._registry = registry

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body, content_type = encode(self._registry, environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body]
