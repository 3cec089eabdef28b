"""The adapters that requests may name as their model: those that the registered workers have loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cluster.config.worker import Role
from cluster.membership.types import WorkerInfo, grouped_by_adapters

Adapters = Callable[[], Mapping[str, str]]  # digests by name


def no_adapters() -> Mapping[str, str]:
    return {}


class LoadedAdapters:
    """Of one model; made once per version of the membership."""

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerInfo]],
        of_model: Callable[[WorkerInfo], bool] = lambda _: True,
    ):
        """`of_model`: whether a worker serves the model."""
        self._workers = workers
        self._of_model = of_model
        self._seen: Sequence[WorkerInfo] = ()
        self._found: Mapping[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        workers = self._workers()
        if workers is not self._seen:
            self._seen, self._found = workers, digests([one for one in workers if self._of_model(one)])
        return self._found


def digests(workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
    """By name, sorted. Where workers have different adapters under one name, as while their settings are rolled out, that
    of both roles goes before that of one, and then that of the most workers; live workers count before all."""
    having: dict[str, dict[str, _Having]] = {}
    for alike in grouped_by_adapters(worker for worker in workers if worker.state == "ready"):
        live = [worker for worker in alike if worker.lease == "live"]
        group = _Having(frozenset(worker.role for worker in live), len(live), len(alike))
        for name, digest in alike[0].adapters:
            of_name = having.setdefault(name, {})
            of_name[digest] = of_name[digest].with_(group) if digest in of_name else group
    return {
        name: max(of_name, key=lambda digest: (*of_name[digest].weight, digest))
        for name, of_name in sorted(having.items())
    }


class _Having(NamedTuple):
    """Workers that have an adapter."""

    live_roles: frozenset[Role]
    live: int
    all: int

    @property
    def weight(self) -> tuple[int, int, int]:
        return len(self.live_roles), self.live, self.all

    def with_(self, other: _Having) -> _Having:
        return _Having(self.live_roles | other.live_roles, self.live + other.live, self.all + other.all)
