"""The adapters that requests may name as their model: those that the registered workers have loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.membership.types import WorkerInfo

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
