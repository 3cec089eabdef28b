"""What the policy sees of a pool: what its workers published, and what the platform says of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.config.worker import Role
from cluster.membership.status import WorkerStatus


class WorkerSample(NamedTuple):
    name: str  # one life of one worker: a counter never goes back under the same name
    status: WorkerStatus


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
