"""The adapters that requests may name as their model: those that the registered workers have loaded."""

from __future__ import annotations

from collections import Counter
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
    """By name, sorted. Where workers have different adapters under one name, that of the most workers, as while their
    settings are rolled out."""
    counts: dict[str, Counter[str]] = {}
    for worker in workers:
        for name, digest in worker.adapters if worker.state == "ready" else ():
            counts.setdefault(name, Counter())[digest] += 1
    return {
        name: max(counted, key=lambda digest: (counted[digest], digest))
        for name, counted in sorted(counts.items())
    }
