"""Spans created from recorded times; while a request runs, only its spans at the router are open.

Times are monotonic seconds, as everywhere in Baton, and are converted to the wall clock, which OpenTelemetry expects,
when a span is created.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.config.shared import TelemetryFields

Attributes = Mapping[str, str | int | float | bool]
FLUSH_SECONDS = 3.0
_W3C = TraceContextTextMapPropagator()


@dataclass(frozen=True)
class Event:
    """A point in time within a span."""

    name: str
    at: float
    attributes: Attributes | None = None


class OpenSpan:
    """A span that can have children before it ends."""

    def __init__(self, span: Span):
        self._span = span
        self.context = set_span_in_context(span, Context())

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    @property
    def headers(self) -> dict[str, str]:
        """Return traceparent, and tracestate if there is one."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self.context)
        return carrier

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def failed(self, reason: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, reason))

    def end(self, at: float | None = None) -> None:
        self._span.end(_wall(time.monotonic() if at is None else at))


class Tracing:
    """Creates and exports the spans of one process. `close` sends the rest."""

    def __init__(self, exporter: SpanExporter, resource: Resource, sampler: Sampler | None):
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton")

    @classmethod
    def to_collector(cls, config: TelemetryFields, service: str, instance: str) -> Tracing:
        base = config.otlp_endpoint.rstrip("/")
        exporter = OTLPSpanExporter(endpoint=f"{base}/v1/traces" if base else None)
        own = Resource.create({"service.name": service, "service.instance.id": instance})
        ratio = config.trace_sample_ratio
        sampler = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        return cls(exporter, own.merge(OTELResourceDetector().detect()), sampler)

    @staticmethod
    def remote_parent(trace_parent: str, trace_state: str) -> Context | None:
        """Return the context of another process's span, or None if it is not sampled or malformed."""
        context = _W3C.extract({"traceparent": trace_parent, "tracestate": trace_state}, Context())
        return context if get_current_span(context).get_span_context().trace_flags.sampled else None

    def root(self, name: str, headers: Mapping[str, str], began: float) -> OpenSpan | None:
        """Open a request's span under the client's context, if well-formed; None if the request is not sampled."""
        span = self._tracer.start_span(
            name, _W3C.extract(headers, Context()), SpanKind.SERVER, start_time=_wall(began)
        )
        return OpenSpan(span) if span.is_recording() else None

    def open(self, parent: Context, name: str, began: float, attributes: Attributes) -> OpenSpan:
        return OpenSpan(self._start(parent, name, began, attributes))

    def record(
        self,
        parent: Context,
        name: str,
        began: float,
        ended: float,
        attributes: Attributes | None = None,
        events: Sequence[Event] = (),
    ) -> Context:
        """Create a span with known times and return its context for child spans."""
        span = self._start(parent, name, began, attributes or {})
        for event in events:
            span.add_event(event.name, event.attributes, _wall(event.at))
        span.end(_wall(max(began, ended)))
        return set_span_in_context(span, Context())

    def _start(self, parent: Context, name: str, began: float, attributes: Attributes) -> Span:
        return self._tracer.start_span(name, parent, attributes=attributes, start_time=_wall(began))

    def close(self) -> None:
        """Send the remaining spans, for FLUSH_SECONDS at most. The SDK would wait ten seconds for each batch where the
        collector is silent, and its own time limits change nothing."""
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(FLUSH_SECONDS)


def _wall(monotonic_seconds: float) -> int:
    """Convert monotonic seconds to nanoseconds since the epoch."""
    return time.time_ns() - round((time.monotonic() - monotonic_seconds) * 1e9)
