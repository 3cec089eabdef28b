"""Which workers a request may be placed on.

Two parts. A worker's standing: its role, whether it drains, its lease, its KV group; a worker of bad standing gets no
request. A request's exclusions: workers that failed it or that this router cannot reach; where every worker of good
standing is excluded, the exclusions do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.worker import Role
from cluster.membership.types import Lease, WorkerInfo
from cluster.protocol.link import common_version
from router.placement.candidates import Candidates
from router.placement.kv_groups import KvGroups, kv_group_of
from router.placement.types import KvGroup, Mode, PlacementRequest, Reason

MAX_CANDIDATES_KEPT = 8  # candidate lists, one per KV group and set of excluded workers
_LEASES: tuple[Lease, ...] = ("live", "suspect", "dead")  # the best first


class Eligibility:
    """What follows for placement from one version of the membership; made once for it.

    Only workers with the best lease state of their role are used: if all are suspect or dead, Redis is at fault.
    """

    def __init__(self, workers: Sequence[WorkerInfo], mode: Mode):
        self.workers = workers
        self._mode = mode
        ready = [worker for worker in workers if worker.state == "ready" and _has_link(worker)]
        self._best_lease: dict[Role, Lease] = {
            worker.role: worker.lease
            for lease in reversed(_LEASES)
            for worker in ready
            if worker.lease == lease
        }
        self.prefill = self._of_good_standing("prefill")
        self.decode = self._of_good_standing("decode")
        self.kv_groups = KvGroups(self.prefill, self.decode, mode)
        self._kept: dict[tuple[KvGroup | None, frozenset[str]], Candidates] = {}

    def why_not(self, worker: WorkerInfo, request: PlacementRequest) -> Reason | None:
        """Why the request is not placed on the worker; None: it may be."""
        reason = self._standing(worker, request.kv_group)
        excluded = request.excluded
        if reason is not None or not excluded:
            return reason
        return excluded.get(worker.worker_id) or excluded.get(worker.name)

    def usable(self, role: Role, request: PlacementRequest) -> list[WorkerInfo]:
        """The eligible workers of a role; where every one is excluded, all of good standing."""
        workers = self.prefill if role == "prefill" else self.decode
        eligible = [worker for worker in workers if self.why_not(worker, request) is None]
        return eligible or [one for one in workers if self._standing(one, request.kv_group) is None]

    def candidates(self, request: PlacementRequest) -> Candidates:
        """For the script; kept for the next requests, since while a worker is suspect every request excludes it."""
        wanted = request.kv_group, frozenset(request.excluded)
        known = self._kept.pop(wanted, None) or self._candidates(request)
        self._kept[wanted] = known  # moves it to the end: the least recently used is dropped first
        if len(self._kept) > MAX_CANDIDATES_KEPT:
            del self._kept[next(iter(self._kept))]
        return known

    def _candidates(self, request: PlacementRequest) -> Candidates:
        prefill, decode = self.usable("prefill", request), self.usable("decode", request)
        if self._mode != "never" and prefill and self.why_not(prefill[0], request):
            prefill = []  # every one is excluded: decode workers prefill
        return Candidates(prefill, decode, self._mode)

    def explain(self, request: PlacementRequest) -> dict[str, Reason]:
        """The reason against each worker that has one, by worker_id."""
        reasons = {worker.worker_id: self.why_not(worker, request) for worker in self.workers}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def missing_role(self) -> Role | None:
        """A role without which no request can be served, and that has no worker of good standing."""
        if not self.decode:
            return "decode"
        return "prefill" if not self.prefill and self._mode == "never" else None

    def _of_good_standing(self, role: Role) -> list[WorkerInfo]:
        return [one for one in self.workers if one.role == role and self._standing(one) is None]

    def _standing(self, worker: WorkerInfo, kv_group: KvGroup | None = None) -> Reason | None:
        if self._mode == "always" and worker.role == "prefill":
            return Reason.ROLE
        if not _has_link(worker):
            return Reason.LINK
        if worker.state == "draining":
            return Reason.DRAINING
        if worker.lease != self._best_lease[worker.role]:
            return Reason.SUSPECT if worker.lease == "suspect" else Reason.DEAD
        if kv_group is not None and kv_group_of(worker) != kv_group:
            return Reason.KV_GROUP
        return None


def _has_link(worker: WorkerInfo) -> bool:
    return bool(common_version(worker.link_min_version, worker.link_max_version))
