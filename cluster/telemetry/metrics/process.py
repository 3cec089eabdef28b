"""Metrics with the same meaning in routers and workers."""

from __future__ import annotations

from cluster.telemetry.histogram import CALL_SECONDS
from cluster.telemetry.metrics.declaration import Distribution, Gauge, Process

_BOTH: tuple[Process, ...] = ("router", "prefill", "decode")

BUILD_INFO = Gauge(_BOTH, "baton_build_info", "", "Always 1; the version is a label", "version")
CERTIFICATE_EXPIRES = Gauge(
    _BOTH,
    "baton_certificate_expires_seconds",
    "seconds",
    "Time until the certificate or authority in use, by its setting, expires; +Inf without TLS",
    "certificate",
    together="min",
)
EVENT_LOOP_LAG = Distribution(
    _BOTH, "baton_event_loop_lag_seconds", "seconds", "How late the event loop runs its timers", CALL_SECONDS
)
