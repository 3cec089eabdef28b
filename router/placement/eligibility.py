"""Which workers a request may be placed on.

Two parts. A worker's standing: its role, whether it drains, its lease, its KV group; a worker of bad standing gets no
request. A request's exclusions: workers that failed it, that this router cannot reach, or that lack its adapter; where
every worker of good standing is excluded, only those without the adapter are, and where none has it, none is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.config.worker import Role
from cluster.membership.facts import group_id
from cluster.membership.types import Lease, WorkerInfo
from cluster.protocol.link import common_version
from router.placement.candidates import Candidates, Heads
from router.placement.kv_groups import KvGroups, kv_group_of
from router.placement.types import KvGroup, Mode, PlacementRequest, Reason

MAX_CANDIDATES_KEPT = 8  # candidate lists, one per KV group and set of excluded workers
MAX_LISTED = 64  # workers of a role that are named one by one; of more the sorted sets' heads are taken
MAX_SAMPLED = 32  # workers of a role that are named where the sets do not help
MAX_PASSED_OVER = 512  # workers that the script passes over in the sets
MAX_UNKNOWN = 256  # of them that this router cannot read
Key = TypeVar("Key")
Kept = TypeVar("Kept")
_Excluded = tuple[frozenset[str], frozenset[str]]  # names; those without the request's adapter
_Wanted = tuple[KvGroup | None, str]  # and the model's name
_LEASES: tuple[Lease, ...] = ("live", "suspect", "dead")  # the best first


class Eligibility:
    """Which workers may be used, and why others may not, by one version of the membership; made once for it.

    Only workers with the best lease state of their model and role are used: if all are suspect or dead, Redis is at fault.
    But if all of a model are dead while another model's renew their leases, Redis is not.
    """

    def __init__(
        self,
        workers: Sequence[WorkerInfo],
        mode: Mode,
        unknown: Mapping[str, Role] | None = None,
        models: Sequence[str] = (),
    ):
        """`unknown`: workers in Redis's sets that the view before lacked. `models`: the names of the router's models, the
        first of which has the workers that name none; without any, every worker serves the one."""
        self._models = tuple(models) if len(models) > 1 else ("",)
        self._only = models[0] if len(models) == 1 else ""  # the name of ""
        self.workers = workers
        self.by_name = {worker.name: worker for worker in workers}
        self.unknown = {name: role for name, role in (unknown or {}).items() if name not in self.by_name}
        self._by_id = {worker.worker_id: worker for worker in workers}
        self.listed = False  # most workers are not in Redis's sets
        self._mode = mode
        ready = [worker for worker in workers if worker.state == "ready" and _has_link(worker)]
        self._best_lease: dict[tuple[str, Role], Lease] = {
            (self.model_of(worker), worker.role): worker.lease
            for lease in reversed(_LEASES)
            for worker in ready
            if worker.lease == lease
        }
        live = {model for (model, _), lease in self._best_lease.items() if lease == "live"}
        for key, lease in self._best_lease.items():
            if lease == "dead" and live and key[0] not in live:
                self._best_lease[key] = "live"  # none of its workers has it, so none is used
        self.prefill = self._of_good_standing("prefill")
        self.decode = self._of_good_standing("decode")
        self._kv_groups = {
            model: KvGroups(
                [one for one in self.prefill if self.model_of(one) == model],
                [one for one in self.decode if self.model_of(one) == model],
                mode,
                model,
            )
            for model in self._models
        }
        self._kept: dict[tuple[_Wanted, _Excluded, bool], Candidates | Heads] = {}
        self._kept_whole: dict[tuple[_Wanted, _Excluded], Candidates] = {}
        self._pools: dict[_Wanted, _Pool] = {}

    def model_of(self, worker: WorkerInfo) -> str:
        """The name of the model that a worker serves; "" for the only one.

        Where a second model is added, its workers may come while routers of the first one only still serve.
        """
        own = worker.served_model
        if len(self._models) > 1:
            return own or self._models[0]
        return own if self._only and own != self._only else ""

    def serves(self, worker: WorkerInfo, model: str) -> bool:
        """Whether a worker is of a model of this router."""
        asked = model if len(self._models) > 1 else ""
        return self.model_of(worker) == (asked or self._models[0])

    def kv_groups(self, model: str) -> KvGroups:
        """The KV groups of a model of this router."""
        return self._kv_groups.get(model) or self._kv_groups[self._models[0]]

    def why_not(self, worker: WorkerInfo, request: PlacementRequest) -> Reason | None:
        """Why the request is not placed on the worker; None: it may be."""
        reason = self._standing(worker, request.kv_group, request.model)
        excluded = request.excluded
        if reason is not None or not excluded:
            return reason
        return excluded.get(worker.worker_id) or excluded.get(worker.name)

    def usable(self, role: Role, request: PlacementRequest) -> list[WorkerInfo]:
        """The eligible workers of a role; where every one is excluded, those that have the request's adapter, which may be
        full only for now; where none has it, all of good standing."""
        workers = self.prefill if role == "prefill" else self.decode
        good = [one for one in workers if self._standing(one, request.kv_group, request.model) is None]
        why = [self.why_not(one, request) for one in good]
        eligible = [one for one, reason in zip(good, why, strict=True) if reason is None]
        having = [one for one, reason in zip(good, why, strict=True) if reason is not Reason.ADAPTER]
        return eligible or having or good

    def candidates(self, request: PlacementRequest) -> Candidates:
        """All of them; kept like those for the script."""
        key = (request.kv_group, request.model), _excluded(request)
        known = self._kept_whole.pop(key, None) or Candidates(*self._all(request))
        _keep(self._kept_whole, key, known)
        return known

    def _all(self, request: PlacementRequest) -> tuple[list[WorkerInfo], list[WorkerInfo]]:
        prefill, decode = self.usable("prefill", request), self.usable("decode", request)
        if self._mode != "never" and prefill and self.why_not(prefill[0], request):
            prefill = []  # every one is excluded: decode workers prefill
        return prefill, decode

    def for_script(self, request: PlacementRequest, *, listed: bool) -> Candidates | Heads:
        """Kept for the next requests, since while a worker is suspect every request excludes it. `listed`: Redis's sets
        name no live worker, so the router names some: others for each request, or the load would stay on these."""
        wanted = (request.kv_group, request.model), _excluded(request), listed or self.listed
        known = self._kept.pop(wanted, None)
        if known is None:
            known = (None if wanted[2] else self._heads(request)) or self._sampled(request)
        if isinstance(known, Heads) or not known.drawn:
            _keep(self._kept, wanted, known)
        return known

    def _heads(self, request: PlacementRequest) -> Heads | None:
        """None: the fleet is small, or the sets do not help."""
        pool = self.pool(request.kv_group, request.model)
        small = max(len(pool.prefill), len(pool.decode)) <= MAX_LISTED
        if small or pool.group is None or pool.shared or set(self._best_lease.values()) != {"live"}:
            return None
        excluded = self._reasons(request)
        wanted = bool(pool.prefill - excluded.keys()) or (bool(pool.prefill) and self._mode == "never")
        prefill = _passed_over(pool.prefill, excluded) if wanted else frozenset()
        decode = _passed_over(pool.decode, excluded)
        if len(prefill) + len(decode) + len(pool.barred_prefill) + len(pool.barred_decode) > MAX_PASSED_OVER:
            return None
        return Heads(
            *(group_id(pool.group.model_id, pool.group.page_size, pool.group.layout), pool.group.model_id),
            prefill=wanted,
            without_prefill=[*prefill, *pool.barred_prefill],
            without_decode=[*decode, *pool.barred_decode],
            seen=(len(pool.prefill), len(pool.decode)),
        )

    def _reasons(self, request: PlacementRequest) -> dict[str, Reason]:
        """Exclusions of workers that are known, by worker_id@epoch; one by worker_id counts before one of this life."""
        excluded = request.excluded.items()
        of_lives = {name: reason for name, reason in excluded if name in self.by_name}
        return of_lives | {self._by_id[name].name: reason for name, reason in excluded if name in self._by_id}

    def _sampled(self, request: PlacementRequest) -> Candidates:
        """All, or of many some at random: the best of 32 are nearly as good as the best of all."""
        whole, pool = self.candidates(request), self.pool(request.kv_group, request.model)
        if max(len(pool.prefill), len(pool.decode)) <= MAX_LISTED:
            # Others may be in the sets, and be used again in a moment: until then the scores must not stay behind.
            return Candidates(whole.prefill, whole.decode, of_many=True) if pool.many else whole
        return Candidates(_some(whole.prefill), _some(whole.decode), of_many=True, drawn=True)

    def pass_over(self, unknown: Mapping[str, Role]) -> None:
        """The script has chosen workers that this view lacks: it chooses them no more. Of too many the first are tried
        again."""
        self.unknown.update(unknown)
        while len(self.unknown) > MAX_UNKNOWN:
            del self.unknown[next(iter(self.unknown))]
        self._kept.clear()
        self._pools.clear()

    def pool(self, kv_group: KvGroup | None, model: str = "") -> _Pool:
        """The workers of a KV group and model by name, whatever a request excludes; kept for the next requests."""
        known = self._pools.get((kv_group, model))
        if known is None:
            known = self._pools[kv_group, model] = self._pool_of(kv_group, model)
        return known

    def _pool_of(self, kv_group: KvGroup | None, model: str) -> _Pool:
        groups = {kv_group_of(worker) for worker in (*self.prefill, *self.decode)}
        group = kv_group or (next(iter(groups)) if len(groups) == 1 else None)
        good: dict[Role, list[str]] = {"prefill": [], "decode": []}
        barred: dict[Role, list[str]] = {"prefill": [], "decode": []}
        for worker in self.workers:
            reason = self._standing(worker, kv_group, model)
            if reason is None:
                good[worker.role].append(worker.name)
            elif reason in (Reason.SUSPECT, Reason.DEAD, Reason.LINK, Reason.DRAINING):
                barred[worker.role].append(worker.name)
        for name, role in self.unknown.items():
            barred[role].append(name)
        return _Pool(
            group,
            any(not self.serves(one, model) and kv_group_of(one) == kv_group for one in self.workers),
            frozenset(good["prefill"]),
            frozenset(good["decode"]),
            barred["prefill"],
            barred["decode"],
        )

    def explain(self, request: PlacementRequest) -> dict[str, Reason]:
        """The reason against each worker that has one, by worker_id."""
        reasons = {worker.worker_id: self.why_not(worker, request) for worker in self.workers}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def missing_role(self) -> Role | None:
        """A role without which no request of any model can be served, and that has no worker of good standing."""
        missing = self.missing_roles()
        return None if len(missing) < len(self._models) else next(iter(missing.values()))

    def missing_roles(self) -> dict[str, Role]:
        """For each model that cannot be served, a role of which it has no worker of good standing."""
        found: dict[str, Role] = {}
        for model in self._models:
            if not any(self.model_of(one) == model for one in self.decode):
                found[model] = "decode"
            elif self._mode == "never" and not any(self.model_of(one) == model for one in self.prefill):
                found[model] = "prefill"
        return found

    def _of_good_standing(self, role: Role) -> list[WorkerInfo]:
        return [one for one in self.workers if one.role == role and self._standing(one) is None]

    def _standing(
        self, worker: WorkerInfo, kv_group: KvGroup | None = None, model: str = ""
    ) -> Reason | None:
        if self._mode == "always" and worker.role == "prefill":
            return Reason.ROLE
        if not _has_link(worker):
            return Reason.LINK
        if worker.state == "draining":
            return Reason.DRAINING
        if worker.lease != self._best_lease[self.model_of(worker), worker.role]:
            return Reason.SUSPECT if worker.lease == "suspect" else Reason.DEAD
        if kv_group is not None and (kv_group_of(worker) != kv_group or not self.serves(worker, model)):
            return Reason.KV_GROUP  # models of one checkpoint have equal groups, and workers of their own
        return None


@dataclass(frozen=True)
class _Pool:
    """The workers of a KV group by name: those of good standing, and others that may be in Redis's sets."""

    group: KvGroup | None  # None: there are several
    shared: bool  # with another model of the same checkpoint: its workers are in the same sets
    prefill: frozenset[str]
    decode: frozenset[str]
    barred_prefill: list[str]
    barred_decode: list[str]

    @property
    def many(self) -> bool:
        """Whether more than MAX_LISTED workers of a role may be in the sets, usable now or not."""
        counts = len(self.prefill) + len(self.barred_prefill), len(self.decode) + len(self.barred_decode)
        return max(counts) > MAX_LISTED


def _excluded(request: PlacementRequest) -> _Excluded:
    """A request's exclusions as a key: all names, and those without the adapter; other reasons make no difference."""
    lacking = (name for name, reason in request.excluded.items() if reason is Reason.ADAPTER)
    return frozenset(request.excluded), frozenset(lacking)


def _passed_over(good: frozenset[str], excluded: Mapping[str, Reason]) -> frozenset[str]:
    """Workers of a pool that the script passes over, as in Eligibility.usable: all that are excluded; where these are all,
    those without the adapter; where these are all, none."""
    found = good & excluded.keys()
    if len(found) == len(good):
        found = frozenset(name for name in good if excluded[name] is Reason.ADAPTER)
    return found if len(found) < len(good) else frozenset()


def _keep(kept: dict[Key, Kept], key: Key, value: Kept) -> None:
    """Add a value at the end: the least recently used is dropped first."""
    kept[key] = value
    if len(kept) > MAX_CANDIDATES_KEPT:
        del kept[next(iter(kept))]


def _some(workers: list[WorkerInfo]) -> list[WorkerInfo]:
    return workers if len(workers) <= MAX_SAMPLED else random.sample(workers, MAX_SAMPLED)


def _has_link(worker: WorkerInfo) -> bool:
    return bool(common_version(worker.link_min_version, worker.link_max_version))
