"""What the policy sees of a pool: what its workers published, and what the platform says of its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config.worker import Role
from cluster.telemetry.arrivals import BOUNDS_SECONDS


@dataclass(frozen=True)
class WorkerSample:
    """One worker's gauges of now and counters since its start."""

    name: str  # one life of one worker: a counter never goes back under the same name
    queued_tokens: float = 0.0  # gauge: prompt tokens that wait or are being computed
    running: float = 0.0  # gauge: sequences in the batch
    waiting: float = 0.0  # gauge: sequences that wait for the batch or for their KV
    kv_usage: float = 0.0  # gauge: share of KV blocks held
    arrived_requests: float = 0.0
    arrived_tokens: float = 0.0
    computed_tokens: float = 0.0
    prefill_seconds: float = 0.0
    output_tokens: float = 0.0
    steps: float = 0.0
    step_seconds: float = 0.0  # seconds in steps of any kind
    first_tokens: tuple[float, ...] = ()  # requests whose first token came within each of BOUNDS_SECONDS
    first_tokens_total: float = 0.0


@dataclass(frozen=True)
class PoolObservation:
    """`ready` replicas serve, `draining` ones only finish; both hold their GPUs. `target` is what the platform has
    been told, and the policy goes on from it: it may have been changed by hand, or by an earlier life of ours."""

    target: int
    ready: int
    draining: int = 0
    starting: int = 0  # replicas of which the platform says that they have their place, and are not there yet
    unschedulable: int = 0  # replicas of which the platform says that they fit nowhere
    workers: Sequence[WorkerSample] = ()


@dataclass(frozen=True)
class Observation:
    prefill: PoolObservation
    decode: PoolObservation

    def pool(self, role: Role) -> PoolObservation:
        return self.prefill if role == "prefill" else self.decode


_WITHIN = tuple(f"first_tokens_within_{bound:g}s" for bound in BOUNDS_SECONDS)


def sample(name: str, status: Mapping[str, Any]) -> WorkerSample:
    """From what a worker publishes. A field that it does not know counts as 0."""
    get = status.get
    prefill_seconds = float(get("prefill_seconds", 0.0))
    return WorkerSample(
        name=name,
        queued_tokens=float(get("queued_prefill_tokens", 0.0)),
        running=float(get("running", 0.0)),
        waiting=float(get("waiting", 0.0)) + float(get("waiting_for_kv", 0.0)),
        kv_usage=float(get("kv_usage_ratio", 0.0)),
        arrived_requests=float(get("arrived_requests", 0.0)),
        arrived_tokens=float(get("arrived_prompt_tokens", 0.0)),
        computed_tokens=float(get("prompt_tokens_computed", 0.0)),
        prefill_seconds=prefill_seconds,
        output_tokens=float(get("output_tokens", 0.0)),
        steps=float(get("steps", 0.0)),
        step_seconds=prefill_seconds + float(get("decode_seconds", 0.0)),
        first_tokens=tuple([float(get(field, 0.0)) for field in _WITHIN]) if "first_tokens" in status else (),
        first_tokens_total=float(get("first_tokens", 0.0)),
    )
