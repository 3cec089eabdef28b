"""The message in which a worker publishes its load: to Redis with its lease, and to the Ray replica that supervises it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cluster.telemetry.metrics import worker as metrics
from cluster.telemetry.metrics.declaration import Scrapable

Number = int | float
# Of the time to the first token. An objective that equals one of these is judged exactly, one between two of them by
# linear interpolation.
BOUNDS_SECONDS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0)


def _shown(*as_metrics: Scrapable, default: Number | None = 0) -> Any:
    """Declare a field that is also scraped, as those of the metrics that the worker's role shows."""
    return field(default=default, metadata={"metrics": as_metrics})


@dataclass(frozen=True)
class WorkerStatus:
    """Gauges of now, and counters since the worker's start. None: a field that the worker's role does not have."""

    pid: int = 0
    phase: str = ""
    # The engine
    steps: Number = _shown(metrics.ENGINE_STEPS)
    running: Number = _shown(metrics.REQUESTS_RUNNING)
    waiting: Number = _shown(metrics.REQUESTS_WAITING)
    waiting_for_kv: Number = _shown(metrics.REQUESTS_WAITING_FOR_KV)
    waiting_prefill_tokens: Number = _shown(metrics.PROMPT_TOKENS_WAITING)
    resident_tokens: Number = _shown(metrics.RESIDENT_TOKENS)
    blocks_total: Number = _shown(metrics.KV_BLOCKS)
    blocks_free: Number = _shown(metrics.KV_BLOCKS_FREE)
    blocks_held: Number = 0
    kv_usage_ratio: Number = _shown(metrics.KV_USAGE)
    prompt_tokens_computed: Number = _shown(metrics.PROMPT_TOKENS_COMPUTED)
    prompt_tokens_cached: Number = _shown(metrics.PREFIX_CACHE_HITS)
    prompt_tokens_asked: Number = _shown(metrics.PREFIX_CACHE_QUERIES)
    prefix_hit_ratio: Number = 0
    output_tokens: Number = _shown(metrics.GENERATION_TOKENS)
    draft_steps: Number = _shown(metrics.DRAFT_STEPS)
    draft_tokens: Number = _shown(metrics.DRAFT_TOKENS)
    draft_tokens_accepted: Number = _shown(metrics.DRAFT_TOKENS_ACCEPTED)
    draft_failures: Number = _shown(metrics.DRAFT_FAILURES)
    prefill_chunks: Number = _shown(metrics.PREFILL_CHUNKS)
    preemptions: Number = _shown(metrics.PREEMPTIONS)
    reservations_evicted: Number = _shown(metrics.RESERVATIONS_EVICTED)
    prefill_seconds: Number = _shown(metrics.PREFILL_SECONDS)
    decode_seconds: Number = _shown(metrics.DECODE_SECONDS)
    # Requests that this worker prefills
    attempts: Number = _shown(metrics.ATTEMPTS_IN_PROGRESS)
    queued: Number = 0
    queued_prefill_tokens: Number = 0
    arrived_requests: Number = 0
    arrived_prompt_tokens: Number = 0
    first_tokens: Number = 0
    first_tokens_within: tuple[Number, ...] = (0,) * len(BOUNDS_SECONDS)
    # Hand-offs: begun at a prefill worker, committed at a decode worker
    handoffs: Number = _shown(metrics.HANDOFFS_STARTED, metrics.HANDOFFS_COMMITTED)
    handoffs_live: Number = _shown(metrics.HANDOFFS_SENDING, metrics.HANDOFFS_RECEIVING)
    handoffs_refused: Number = _shown(metrics.HANDOFFS_DENIED, metrics.HANDOFFS_REFUSED)
    parts: Number = _shown(metrics.KV_PARTS_SENT, metrics.KV_PARTS_VERIFIED)
    resends: Number | None = _shown(metrics.KV_PARTS_RESENT, default=None)
    handoffs_aborted: Number | None = _shown(metrics.HANDOFFS_ABORTED, default=None)
    kv_bytes: Number | None = _shown(metrics.KV_RECEIVED_BYTES, default=None)
    digest_failures: Number | None = _shown(metrics.KV_DIGEST_FAILURES, default=None)
    ring_slots: Number | None = _shown(metrics.RING_SLOTS, default=None)
    ring_free: Number | None = _shown(metrics.RING_SLOTS_FREE, default=None)
    ring_quarantined: Number | None = _shown(metrics.RING_SLOTS_QUARANTINED, default=None)
    transfer_rate_bytes_per_second: Number | None = _shown(metrics.TRANSFER_RATE, default=None)
    # Adapters: whether administrators may name some to load here (lora_dir), 1 or 0; those that could not be loaded
    # (cluster/membership/adapter_refusals.py)
    takes_adapters: Number | None = None
    adapters_refused: str | None = None
    # Of a worker on Ray, or with ranks that Ray has placed: its head's address, and how long that has been silent
    ray_head: str | None = None
    ray_head_silent_seconds: Number | None = _shown(metrics.RAY_HEAD_SILENT, default=None)
    # Of a worker under test
    self_checks: int | None = None
    self_check_wrong: str | None = None

    def encode(self) -> dict[str, Number | str]:
        """Return the message as one flat JSON object."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        within = values.pop("first_tokens_within")
        return {**values, **dict(zip(_WITHIN, within, strict=True))}

    @classmethod
    def decode(cls, message: Any) -> WorkerStatus:
        """Parse a message. Fields of later versions are dropped; fields that an earlier version lacks get their defaults.

        Raises TypeError or ValueError that names the field.
        """
        if not isinstance(message, Mapping):
            raise TypeError("a status is an object")
        known = {}
        for name, value in message.items():
            kinds = _KINDS.get(name)
            if kinds is None:
                continue
            if type(value) not in kinds:
                wanted = " or ".join(one.__name__ for one in kinds)
                raise TypeError(f"status.{name}: {repr(value)[:80]} is no {wanted}")
            if kinds is _TEXT:
                value.encode()  # a lone surrogate could not be shown
            elif not -_TOO_LARGE < value < _TOO_LARGE:
                raise ValueError(f"status.{name}: {repr(value)[:80]} is out of range")
            known[name] = value
        within = [known.pop(name, 0) for name in _WITHIN]
        return cls(**known, first_tokens_within=tuple(within))

    def metrics(self, role: str) -> Iterator[tuple[Scrapable, Number]]:
        for name, metric in _METRICS:
            value = getattr(self, name)
            if role in metric.shown_by and value is not None:
                yield metric, value


_TEXT, _NUMBER = (str,), (int, float)
_TOO_LARGE = 2**63  # a JSON document of a router could not hold more; NaN is not below it
_WITHIN = tuple(f"first_tokens_within_{bound:g}s" for bound in BOUNDS_SECONDS)
_OWN = [one for one in fields(WorkerStatus) if one.name != "first_tokens_within"]
_KINDS = {one.name: _TEXT if one.type in ("str", "str | None") else _NUMBER for one in _OWN}
_KINDS |= dict.fromkeys(_WITHIN, _NUMBER)
_METRICS = [(one.name, metric) for one in _OWN for metric in one.metadata.get("metrics", ())]
