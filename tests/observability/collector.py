"""A collector of traces: takes OTLP over HTTP as a real one does, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: float  # seconds since the epoch
    end: float
    attributes: dict[str, Any]
    events: list[str]
    trace_state: str
    failed: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)  # as they came
    lock: threading.Lock = field(default_factory=threading.Lock)

    def traces(self) -> dict[str, list[Span]]:
        by_id: dict[str, list[Span]] = defaultdict(list)
        with self.lock:
            for span in self.spans:
                by_id[span.trace_id].append(span)
        return by_id

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.lock:
            self.bodies.append(body)
            for resource in request.resource_spans:
                service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(service, span) for span in scope.spans]


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes={a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
        events=[event.name for event in span.events],
        trace_state=span.trace_state,
        failed=span.status.code == 2,
    )


@contextmanager
def run_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)
