"""The adapters that requests may name as their model: those that the registered workers have loaded, and those that no
worker has now, of which requests are answered as of a model without workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.membership.types import WorkerInfo
from cluster.membership.wanted_adapters import Wanted

Adapters = Callable[[], Mapping[str, str]]  # digests by name; "": no worker has it now
_NONE: Mapping[str, Wanted] = {}


class NoWorkers(dict[str, str]):
    """While no worker at all is registered: other names than these may be those of adapters, too."""


def no_adapters() -> Mapping[str, str]:
    return {}


class LoadedAdapters:
    """Of one model; made once per version of the membership and of the wanted adapters.

    No worker has a wanted one while all of its workers restart, or before they have read its files; nor any that its
    workers had, while the model has no workers.
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
        self._found: Mapping[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        workers, wanted = self._workers(), self._wanted()
        if self._seen is None or workers is not self._seen[0] or wanted is not self._seen[1]:
            self._seen, self._found = (workers, wanted), self._find(workers, wanted)
        return self._found

    def _find(self, workers: Sequence[WorkerInfo], wanted: Mapping[str, Wanted]) -> Mapping[str, str]:
        ready = [one for one in workers if one.state == "ready"]
        own = [one for one in ready if self._of_model(one)]
        found = dict.fromkeys((name for name, one in wanted.items() if self._is_for(one)), "")
        if own:
            self._loaded = digests(own)
            found |= self._loaded
        else:
            found |= dict.fromkeys(self._loaded, "")
        return dict(sorted(found.items())) if ready else NoWorkers(sorted(found.items()))


def digests(workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
    """By name, sorted. Where workers have different adapters under one name, as while their settings are rolled out, that
    of both roles goes before that of one, and then that of the most workers; live workers count before all."""
    having: dict[str, dict[str, list[WorkerInfo]]] = {}
    for worker in workers:
        for name, digest in worker.adapters if worker.state == "ready" else ():
            having.setdefault(name, {}).setdefault(digest, []).append(worker)
    return {
        name: max(of_name, key=lambda digest: (*_weight(of_name[digest]), digest))
        for name, of_name in sorted(having.items())
    }


def _weight(workers: Sequence[WorkerInfo]) -> tuple[int, int, int]:
    live = [worker for worker in workers if worker.lease == "live"]
    return len({worker.role for worker in live}), len(live), len(workers)
