"""Traces are off unless a collector is named, and off they cost nothing: not even an import.

OpenTelemetry's API may be there all the same: the Redis client imports it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from cluster.config.shared import TelemetryFields
from cluster.telemetry.tracing.setup import open_tracing
from cluster.telemetry.tracing.spans import FLUSH_SECONDS, Tracing


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "TRUE"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_a_collector_nothing_is_traced(environment: dict[str, str]) -> None:
    assert open_tracing(TelemetryFields(), "baton-router", "r1", environment) is None


def test_off_imports_neither_sdk_nor_exporter() -> None:
    script = (
        "import sys, router.server\n"
        "from cluster.config.shared import TelemetryFields\n"
        "from cluster.telemetry.tracing.setup import open_tracing\n"
        "assert open_tracing(TelemetryFields(), 'baton-router', 'r1', {}) is None\n"
        "parts = ('opentelemetry.sdk.trace', 'opentelemetry.exporter')\n"
        "print(sorted(name for name in sys.modules if name.startswith(parts)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def _tracing(ratio: float | None = None) -> Tracing:
    config = TelemetryFields(otlp_endpoint="http://127.0.0.1:9", trace_sample_ratio=ratio)
    tracing = open_tracing(config, "baton-router", "r1", {})
    assert tracing is not None
    return tracing


PARENT = f"00-{'a' * 32}-{'b' * 16}"


@pytest.mark.parametrize(
    ("ratio", "headers", "sampled"),
    [
        (None, {}, True),
        (0.0, {}, False),
        (1.0, {}, True),
        (0.0, {"traceparent": f"{PARENT}-01"}, True),
        (1.0, {"traceparent": f"{PARENT}-00"}, False),
        (0.0, {"traceparent": "00-nonsense-01"}, False),
    ],
)
def test_a_client_decides_for_its_request_and_the_ratio_for_all_others(
    ratio: float | None, headers: dict[str, str], sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracing = _tracing(ratio)
    root = tracing.root("baton.request", headers, 0.0)
    assert (root is not None) == sampled
    if root is not None and headers:
        assert root.trace_id == "a" * 32


def test_workers_take_only_what_is_sampled() -> None:
    assert Tracing.remote_parent(f"{PARENT}-01", "shop=7") is not None
    assert Tracing.remote_parent(f"{PARENT}-00", "") is None
    assert Tracing.remote_parent("nonsense1", "") is None


def test_a_silent_collector_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and answers nothing; the SDK waits for each batch, by default for ten seconds."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = TelemetryFields(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracing = open_tracing(config, "baton-router", "r", {})
        assert tracing is not None
        for _ in range(1100):  # more than two batches
            span = tracing.root("request", {}, time.monotonic())
            assert span is not None
            span.end()
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < FLUSH_SECONDS + 3.0
