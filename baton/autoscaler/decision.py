"""Input and output of the policy: observations of the pools, decisions with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cluster.config.worker import Role
from cluster.membership.status import WorkerStatus


class Reason(StrEnum):
    STEADY = "steady"  # the present size fits
    NO_DATA = "no_data"  # no worker publishes: nothing changes
    PREFILL_LOAD = "prefill_load"  # offered prompt tokens or the queue need more
    DECODE_LOAD = "decode_load"  # output tokens need more
    KV_PRESSURE = "kv_pressure"  # KV blocks need more
    TTFT_MISSED = "ttft_missed"  # first tokens are late although the load fits
    ITL_MISSED = "itl_missed"
    LOW_LOAD = "low_load"  # fewer have sufficed for long enough
    LIMITS = "limits"  # outside min or max
    BUDGET = "budget"  # more is needed, but no GPU is left or the other pool needs it more
    UNSCHEDULABLE = "unschedulable"  # overdue replicas are no longer requested
    WAKE = "wake"  # from zero: a request waits


@dataclass(frozen=True)
class PoolDecision:
    role: Role
    target: int  # replicas to request from the platform
    before: int
    ready: int
    needed: float  # replicas that the present load needs, before limits and budget
    reason: Reason
    terms: dict[str, float] = field(default_factory=dict)  # components of `needed`
    model: str = ""  # whose pool it is; "": of the only one

    @property
    def changed(self) -> bool:
        return self.target != self.before

    def explain(self) -> str:
        """Return one line of key=value pairs."""
        terms = " ".join(f"{name}={value:.4g}" for name, value in self.terms.items())
        model = f"model={self.model} " if self.model else ""
        return (
            f"autoscaling {model}pool={self.role} from={self.before} to={self.target} ready={self.ready} "
            f"needed={self.needed:.2f} reason={self.reason} {terms}"
        ).rstrip()


@dataclass(frozen=True)
class Decision:
    prefill: PoolDecision
    decode: PoolDecision
    gpus_asked: int  # by the model's new targets, with draining replicas
    gpu_budget: int  # of all models

    @property
    def pools(self) -> tuple[PoolDecision, PoolDecision]:
        return (self.prefill, self.decode)

    def pool(self, role: Role) -> PoolDecision:
        return self.prefill if role == "prefill" else self.decode


class WorkerSample(NamedTuple):
    name: str  # one worker process: counters never decrease under the same name
    status: WorkerStatus


@dataclass(frozen=True)
class PoolObservation:
    """`ready` replicas serve, `draining` ones only finish; both hold their GPUs. `target` is the platform's target, from
    which the policy starts: it may have been changed by hand or by an earlier process."""

    target: int
    ready: int
    draining: int = 0
    starting: int = 0  # scheduled replicas that are not ready
    unschedulable: int = 0  # replicas that the platform cannot schedule
    workers: Sequence[WorkerSample] = ()


@dataclass(frozen=True)
class Observation:
    prefill: PoolObservation
    decode: PoolObservation

    def pool(self, role: Role) -> PoolObservation:
        return self.prefill if role == "prefill" else self.decode
