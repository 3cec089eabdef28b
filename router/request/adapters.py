"""The adapters that requests may name as their model: those that the registered workers have loaded, and those that no
worker has now, of which requests are answered as of a model without workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cluster.config.worker import Role
from cluster.membership.types import WorkerInfo, grouped_by_adapters
from cluster.membership.wanted_adapters import Wanted

Adapters = Callable[[], Mapping[str, str]]  # digests by name; "": no worker has it now
_NONE: Mapping[str, Wanted] = {}


class KnownNames(dict[str, str]):
    """Digests by name. `kept`: names that the model's workers have, or had and may have again: they lead to no other."""

    def __init__(self, found: Iterable[tuple[str, str]], kept: Collection[str] = ()):
        super().__init__(found)
        self.kept = frozenset(kept)


class NoWorkers(KnownNames):
    """While no worker at all is registered: other names than these may be those of adapters, too."""


def no_adapters() -> Mapping[str, str]:
    return {}


class ModelAdapters:
    """The adapters of one model, found once per version of the membership and of the wanted adapters.

    No worker has a wanted one while all of its workers restart, or before they have read its files; nor any that its
    workers had, while the model has no workers. Its name stays the model's meanwhile.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerInfo]],
        of_model: Callable[[WorkerInfo], bool] = lambda _: True,
        wanted: Callable[[], Mapping[str, Wanted]] = lambda: _NONE,
        is_for: Callable[[Wanted], bool] = lambda _: True,
    ):
        """`of_model`: whether a worker serves the model; `is_for`: whether its workers are to load what is `wanted`."""
        self._workers, self._of_model = workers, of_model
        self._wanted, self._is_for = wanted, is_for
        self._seen: tuple[Sequence[WorkerInfo], Mapping[str, Wanted]] | None = None
        self._loaded: Mapping[str, str] = {}  # when the model had workers last
        self._by_calls: set[str] = set()  # of these, those that were wanted
        self._kept: set[str] = set()  # names, as KnownNames has them
        self._found: Mapping[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        workers, wanted = self._workers(), self._wanted()
        if self._seen is None or workers is not self._seen[0] or wanted is not self._seen[1]:
            self._seen, self._found = (workers, wanted), self._find(workers, wanted)
        return self._found

    def _find(self, workers: Sequence[WorkerInfo], wanted: Mapping[str, Wanted]) -> Mapping[str, str]:
        ready = [one for one in workers if one.state == "ready"]
        own = [one for one in ready if self._of_model(one)]
        alive = [one for one in own if one.lease != "dead"]  # the others stay registered for minutes
        found = dict.fromkeys((name for name, one in wanted.items() if self._is_for(one)), "")
        self._by_calls |= found.keys()
        if own:
            self._loaded = digests(alive or own)
            self._by_calls &= found.keys() | self._loaded.keys()
            unloaded = set[str]() if alive else self._by_calls - found.keys()  # dead ones still name these
            found |= {name: digest for name, digest in self._loaded.items() if name not in unloaded}
        else:  # but what was unloaded meanwhile
            found |= dict.fromkeys((name for name in self._loaded if name not in self._by_calls), "")
        self._kept = (self._kept | (self._loaded.keys() if own else set())) & found.keys()
        return (KnownNames if ready else NoWorkers)(sorted(found.items()), self._kept)


def digests(workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
    """The digests of adapters by their names, sorted. Where workers have different adapters under one name, as while their
    settings are rolled out, that of both roles goes before that of one, one of decode workers, which may prefill, before
    one of prefill workers alone, and then that of the most workers; live workers count before all."""
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
    def weight(self) -> tuple[int, bool, int, int]:
        return len(self.live_roles), "decode" in self.live_roles, self.live, self.all

    def with_(self, other: _Having) -> _Having:
        return _Having(self.live_roles | other.live_roles, self.live + other.live, self.all + other.all)
