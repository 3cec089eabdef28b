"""A worker's registration as routers read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cluster.config.worker import Role
from cluster.kubernetes.pod import Pod
from cluster.membership.status import WorkerStatus
from cluster.membership.topology import Location
from cluster.protocol.link import LINK_VERSION, MIN_LINK_VERSION
from cluster.protocol.times import LEASE_DEAD_SECONDS, LEASE_SUSPECT_SECONDS

Lease = Literal["live", "suspect", "dead"]
# What a drained worker does: its process ends, or stays without a worker (in a pod that ends anyway, where Ray would
# only start the replica again).
Then = Literal["exit", "stay"]


@dataclass(frozen=True)
class WorkerInfo:
    worker_id: str
    epoch: int
    slot: int
    role: Role
    model_id: str
    address: str  # host:port of its gRPC server
    metrics_address: str
    layout: bytes  # serialised KvLayout
    place: str  # its NVLink clique or its machine
    host: str  # name of its host or pod
    max_model_len: int
    blocks_total: int
    page_size: int = 16
    location: Location = Location()
    pod: Pod = Pod()
    link_address: str = ""  # host:port at which it accepts the links of routers
    link_min_version: int = MIN_LINK_VERSION  # of the link's messages that it supports
    link_max_version: int = LINK_VERSION
    served_model: str = ""  # the name under which routers of several models serve it; "" = their first
    process: str = ""  # the same for all epochs of its process
    adapters: tuple[tuple[str, str], ...] = ()  # (name, digest) of each that it has loaded
    state: Literal["ready", "draining"] = "ready"
    lease: Lease = "live"
    status: WorkerStatus = WorkerStatus()

    @property
    def name(self) -> str:
        """The name of one epoch of the worker: load is keyed by it."""
        return f"{self.worker_id}@{self.epoch:016x}"


def grouped_by_adapters(workers: Iterable[WorkerInfo]) -> Iterable[list[WorkerInfo]]:
    """Group workers by their adapters. Equal tuples are compared by identity, because registrations share them: a hundred
    adapters of a thousand workers would be compared a hundred thousand times."""
    groups: dict[int, list[WorkerInfo]] = {}
    for worker in workers:
        groups.setdefault(id(worker.adapters), []).append(worker)
    return groups.values()


def lease_of(age_seconds: float) -> Lease:
    """Return the state of a lease by the time since its last renewal."""
    if age_seconds < LEASE_SUSPECT_SECONDS:
        return "live"
    return "suspect" if age_seconds < LEASE_DEAD_SECONDS else "dead"
