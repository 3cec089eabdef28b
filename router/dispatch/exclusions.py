"""The workers that a request excludes, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.membership.types import WorkerInfo, grouped_by_adapters
from router.dispatch.attempt_events import Ended
from router.placement.types import Reason


def exclusions(
    silent: Iterable[str],
    attempts: Mapping[str, Reason],
    engines: Iterable[str],
    without_adapter: Iterable[str] = (),
) -> dict[str, Reason]:
    """`silent`: workers from which this router receives nothing. `attempts`: reasons of the request's own attempts, by
    worker. `engines`: in which the request failed. `without_adapter`: that have not loaded the request's."""
    return {
        **dict.fromkeys(without_adapter, Reason.ADAPTER),
        **dict.fromkeys(silent, Reason.SILENT),
        **attempts,
        **dict.fromkeys(engines, Reason.ENGINE),
    }


class WithoutAdapter:
    """Workers that have not loaded an adapter. An exclusion, because where all are excluded one is asked even so: a
    registration may be older than what its worker has loaded. Looked for once per version of the membership."""

    def __init__(self, workers: Callable[[], Sequence[WorkerInfo]]):
        self._workers = workers
        self._seen: Sequence[WorkerInfo] = ()
        self._found: dict[tuple[str, str], Sequence[str]] = {}

    def __call__(self, model_id: str, digest: str) -> Sequence[str]:
        """Worker ids of those of the model."""
        if (workers := self._workers()) is not self._seen:
            self._seen, self._found = workers, {}
        if (found := self._found.get((model_id, digest))) is None:
            found = self._found[model_id, digest] = [
                worker.worker_id
                for alike in grouped_by_adapters(one for one in workers if one.model_id == model_id)
                if digest not in (own for _, own in alike[0].adapters)
                for worker in alike
            ]
        return found


def ended_by(event: Ended) -> Reason:
    """Why a worker is excluded whose attempt has ended early: the stream broke, or the worker drains."""
    return Reason.LOST if event.end is None else Reason.DRAINED
