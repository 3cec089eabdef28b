"""The workers that a request excludes, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cluster.membership.types import WorkerInfo
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


def without_adapter(workers: Sequence[WorkerInfo], digest: str) -> list[str]:
    """Workers that have not loaded the adapter. An exclusion, because where all are excluded one is asked even so: a
    registration may be older than what its worker has loaded."""
    return [worker.worker_id for worker in workers if not worker.has_adapter(digest)]


def ended_by(event: Ended) -> Reason:
    """Why a worker is excluded whose attempt has ended early: the stream broke, or the worker drains."""
    return Reason.LOST if event.end is None else Reason.DRAINED
