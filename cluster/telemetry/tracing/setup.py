"""Configuration of traces.

Off unless a collector is named by `otlp_endpoint` or by OpenTelemetry's own variables, which the SDK reads itself
(OTEL_EXPORTER_OTLP_*, OTEL_BSP_*, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER). When off, OpenTelemetry is not
imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster.config.shared import TelemetryFields

if TYPE_CHECKING:
    from cluster.telemetry.tracing.spans import Tracing

log = logging.getLogger(__name__)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_tracing(
    config: TelemetryFields, service: str, instance: str, environment: Mapping[str, str] = os.environ
) -> Tracing | None:
    """Return the tracing of `service` (baton-router, baton-prefill, baton-decode), or None if traces are off."""
    if not _wanted(config, environment):
        return None
    from cluster.telemetry.tracing.spans import Tracing

    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning("traces are sent as http/protobuf, not as %s: name the collector's HTTP port", protocol)
    return Tracing.to_collector(config, service, instance)


def _wanted(config: TelemetryFields, environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if config.otlp_endpoint:
        return True
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in _ENDPOINTS)
