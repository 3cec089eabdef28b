"""A worker's metrics: read from its status when somebody asks, served on a port of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# status field → (metric, help). vLLM's words where it has one; base units.
GAUGES: dict[str, tuple[str, str]] = {
    "running": ("baton_requests_running", "Sequences in the batch"),
    "waiting": ("baton_requests_waiting", "Sequences waiting for the batch"),
    "waiting_for_kv": ("baton_requests_waiting_for_kv", "Reserved, KV on its way"),
    "waiting_prefill_tokens": ("baton_waiting_prefill_tokens", "Prompt tokens not computed yet"),
    "resident_tokens": ("baton_resident_tokens", "Tokens whose KV running sequences hold"),
    "blocks_total": ("baton_kv_blocks_total_count", "KV blocks of the pool"),
    "blocks_free": ("baton_kv_blocks_free", "KV blocks free or only cached"),
    "kv_usage_ratio": ("baton_kv_cache_usage_ratio", "Share of KV blocks in use"),
    "handoffs_live": ("baton_handoffs_in_progress", "Hand-offs reserved or on their way"),
    "ring_free": ("baton_ring_slots_free", "Landing slots free"),
    "ring_quarantined": ("baton_ring_slots_quarantined", "Landing slots in doubt"),
    "transfer_rate_bytes_per_second": ("baton_transfer_rate_bytes_per_second", "Measured KV rate"),
}
COUNTERS: dict[str, tuple[str, str]] = {
    "steps": ("baton_engine_steps", "Steps of the engine"),
    "prompt_tokens_computed": ("baton_prompt_tokens_computed", "Prompt tokens computed here"),
    "prompt_tokens_cached": ("baton_prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "output_tokens": ("baton_generation_tokens", "Tokens sampled here"),
    "prefill_chunks": ("baton_prefill_chunks", "Chunks of prompts that took several steps"),
    "preemptions": ("baton_preemptions", "Sequences pushed out of the batch"),
    "prefill_seconds": ("baton_prefill_seconds", "Seconds in steps with prefill"),
    "decode_seconds": ("baton_decode_seconds", "Seconds in steps of decode only"),
    "handoffs": ("baton_handoffs", "Hand-offs begun (prefill) or committed (decode)"),
    "handoffs_aborted": ("baton_handoffs_aborted", "Hand-offs aborted"),
    "handoffs_refused": ("baton_handoffs_refused", "Reservations refused"),
    "kv_bytes": ("baton_kv_received_bytes", "KV bytes received"),
    "parts": ("baton_kv_parts", "Parts sent or verified"),
    "resends": ("baton_kv_parts_resent", "Parts sent again"),
    "digest_failures": ("baton_kv_digest_failures", "Parts that arrived corrupted"),
}


class StatusCollector(Collector):
    def __init__(self, status: Callable[[], Mapping[str, Any]], labels: Mapping[str, str]):
        self._status = status
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for field, (name, help_text) in GAUGES.items():
            if field in status:
                gauge = GaugeMetricFamily(name, help_text, labels=self._names)
                gauge.add_metric(self._values, float(status[field]))
                yield gauge
        for field, (name, help_text) in COUNTERS.items():
            if field in status:
                counter = CounterMetricFamily(name, help_text, labels=self._names)
                counter.add_metric(self._values, float(status[field]))
                yield counter


class Exporter:
    """Serves `/metrics` until `close`."""

    def __init__(self, host: str, port: int, status: Callable[[], Mapping[str, Any]], **labels: str):
        registry = CollectorRegistry()
        registry.register(StatusCollector(status, labels))
        self._server, self._thread = start_http_server(port, host, registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
