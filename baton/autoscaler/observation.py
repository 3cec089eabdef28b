"""What the policy sees of a pool: what its workers published, and what the platform says of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config.worker import Role
from cluster.membership.status import WorkerStatus


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


def sample(name: str, status: WorkerStatus) -> WorkerSample:
    """From what a worker publishes."""
    return WorkerSample(
        name=name,
        queued_tokens=status.queued_prefill_tokens,
        running=status.running,
        waiting=status.waiting + status.waiting_for_kv,
        kv_usage=status.kv_usage_ratio,
        arrived_requests=status.arrived_requests,
        arrived_tokens=status.arrived_prompt_tokens,
        computed_tokens=status.prompt_tokens_computed,
        prefill_seconds=status.prefill_seconds,
        output_tokens=status.output_tokens,
        steps=status.steps,
        step_seconds=status.prefill_seconds + status.decode_seconds,
        first_tokens=status.first_tokens_within,
        first_tokens_total=status.first_tokens,
    )
