"""What the policy answers, and why, in words that a log line and a metric can carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.config.worker import Role


class Reason(StrEnum):
    STEADY = "steady"  # what is there fits
    NO_DATA = "no_data"  # no worker publishes: nothing is touched
    PREFILL_LOAD = "prefill_load"  # offered prompt tokens, or the queue, ask for more
    DECODE_LOAD = "decode_load"  # output tokens ask for more
    KV_PRESSURE = "kv_pressure"  # KV blocks ask for more
    TTFT_MISSED = "ttft_missed"  # first tokens come late whatever the load says
    ITL_MISSED = "itl_missed"
    LOW_LOAD = "low_load"  # fewer would do, for long enough
    LIMITS = "limits"  # outside min or max
    BUDGET = "budget"  # more is needed and no GPU is left, or the other pool needs this one more
    UNSCHEDULABLE = "unschedulable"  # replicas did not come and are given back
    WAKE = "wake"  # from zero: somebody waits


@dataclass(frozen=True)
class PoolDecision:
    role: Role
    target: int  # replicas to ask the platform for
    before: int
    ready: int
    needed: float  # replicas that today's load asks for, before limits and budget
    reason: Reason
    terms: dict[str, float] = field(default_factory=dict)  # what `needed` was made of

    @property
    def changed(self) -> bool:
        return self.target != self.before

    def explain(self) -> str:
        """One line, key=value."""
        terms = " ".join(f"{name}={value:.4g}" for name, value in self.terms.items())
        return (
            f"autoscaling pool={self.role} from={self.before} to={self.target} ready={self.ready} "
            f"needed={self.needed:.2f} reason={self.reason} {terms}"
        ).rstrip()


@dataclass(frozen=True)
class Decision:
    prefill: PoolDecision
    decode: PoolDecision
    gpus_asked: int  # by the new targets, with what still drains
    gpu_budget: int

    @property
    def pools(self) -> tuple[PoolDecision, PoolDecision]:
        return (self.prefill, self.decode)

    def pool(self, role: Role) -> PoolDecision:
        return self.prefill if role == "prefill" else self.decode
