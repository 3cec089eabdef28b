"""The policy's input for a pool: status of its workers, and replicas according to the platform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.config.worker import Role
from cluster.membership.status import WorkerStatus


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
