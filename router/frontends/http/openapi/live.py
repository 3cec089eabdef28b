"""The schema of the live view, which router/observe/live/view.py makes."""

from __future__ import annotations

from router.frontends.http.openapi.schema import BOOLEAN, Schema, array, one_of, optional, text
from router.observe.live.history import POINTS, Percentiles, Point

NUMBER: Schema = {"type": "number"}
_PERCENTILES = ("ttft", "itl")


def live_schema() -> Schema:
    """Names only the fields that are always there: further ones depend on the cluster."""
    router = _some(
        id=text(),
        state=one_of(["ready", "not ready", "draining", "gone"]),
        uptime_seconds=NUMBER,
        requests_in_flight=NUMBER,
        requests_per_second=NUMBER,
        output_tokens_per_second=NUMBER,
    )
    worker = _some(
        id=text(),
        role=one_of(["prefill", "decode"]),
        state=one_of(["ready", "draining", "suspect", "dead"]),
        prompt_tokens_per_second=NUMBER,
        output_tokens_per_second=NUMBER,
        handoffs_per_second=NUMBER,
        prefix_hit_ratio=optional(NUMBER),
    )
    flow = _some(**{"from": text(), "to": text(), "bytes_per_second": NUMBER, "handoffs_per_second": NUMBER})
    return _some(
        router=text(),
        redis=_some(ok=BOOLEAN),
        window_seconds=_some(rates=NUMBER, percentiles=NUMBER),
        now=_now(),
        routers=array(router),
        workers=array(worker),
        flows=array(flow),
        history=_history(),
    )


def _now() -> Schema:
    percentiles = _some(**{name: optional(NUMBER) for name in Percentiles._fields})
    figures = {name: percentiles if name in _PERCENTILES else optional(NUMBER) for name in Point._fields}
    return _some(requests_in_flight=NUMBER, **figures)


def _history() -> Schema:
    """A list for every line of a chart, oldest first; null for intervals without data."""
    line = array(optional(NUMBER), maxItems=POINTS)
    rates = [name for name in Point._fields if name not in _PERCENTILES]
    latencies = [f"{name}_{part}" for name in _PERCENTILES for part in Percentiles._fields]
    return _some(interval_seconds=NUMBER, **dict.fromkeys((*latencies, *rates), line))


def _some(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}
