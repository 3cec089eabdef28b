"""The workers that a request excludes, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.errors import DrainingError, OverloadedError
from cluster.membership.types import WorkerInfo, grouped_by_adapters
from router.dispatch.attempt_events import Ended
from router.placement.kv_groups import kv_group_of
from router.placement.types import KvGroup, Reason


def exclusions(
    silent: Iterable[str],
    attempts: Mapping[str, Reason],
    engines: Iterable[str],
    without_adapter: Iterable[str] = (),
) -> dict[str, Reason]:
    """`silent`: workers from which this router receives nothing. `attempts`: reasons of the request's own attempts, by
    worker. `engines`: in which the request failed. `without_adapter`: that have not loaded the request's; that reason
    counts before others, because no wait removes it."""
    return {
        **dict.fromkeys(silent, Reason.SILENT),
        **attempts,
        **dict.fromkeys(engines, Reason.ENGINE),
        **dict.fromkeys(without_adapter, Reason.ADAPTER),
    }


class WithoutAdapter:
    """Workers that are not registered with an adapter. Looked for once per version of the membership.

    An unloaded adapter stays in slots of workers that are no longer registered with it, so a request that began before may
    still run there. Where no decode worker is registered with the adapter none of them is excluded here, and where no
    worker is, no prefill worker either: one that lacks it refuses the attempt, and is excluded by that.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerInfo]]):
        self._workers = workers
        self._seen: Sequence[WorkerInfo] = ()
        self._found: dict[tuple[str, str], Sequence[str]] = {}
        self._groups: dict[str, frozenset[KvGroup]] = {}  # by digest

    def __call__(self, model_id: str, digest: str) -> Sequence[str]:
        """Ids of the model's workers that are excluded for a request for the adapter with this digest."""
        self._follow()
        if (found := self._found.get((model_id, digest))) is None:
            found = self._found[model_id, digest] = self._find(self._seen, model_id, digest)
        return found

    def kv_groups(self, digest: str) -> frozenset[KvGroup]:
        """KV groups without a ready decode worker that is registered with it; none where no decode worker is."""
        self._follow()
        if (found := self._groups.get(digest)) is None:
            having, lacking = set[KvGroup](), set[KvGroup]()
            ready = [one for one in self._seen if one.role == "decode" and one.state == "ready"]
            for alike in grouped_by_adapters(ready):
                (having if _has(alike[0], digest) else lacking).update(map(kv_group_of, alike))
            found = self._groups[digest] = frozenset(lacking - having if having else ())
        return found

    def _follow(self) -> None:
        if (workers := self._workers()) is not self._seen:
            self._seen, self._found, self._groups = workers, {}, {}

    @staticmethod
    def _find(workers: Sequence[WorkerInfo], model_id: str, digest: str) -> Sequence[str]:
        of_model = [one for one in workers if one.model_id == model_id]
        lacking: list[WorkerInfo] = []
        having = set[str]()  # roles
        # Dead ones stay registered for minutes
        for alike in grouped_by_adapters([one for one in of_model if one.lease != "dead"] or of_model):
            if _has(alike[0], digest):
                having |= {one.role for one in alike if one.state == "ready"}
            else:
                lacking += alike
        tried = () if "decode" in having else ("decode",) if having else ("decode", "prefill")
        return [one.worker_id for one in lacking if one.role not in tried]


def _has(worker: WorkerInfo, digest: str) -> bool:
    return any(own == digest for _, own in worker.adapters)


def ended_by(event: Ended) -> Reason:
    """Why a worker is excluded whose attempt has ended early, or that has not taken it in: the stream broke, or the worker
    drains, or is full."""
    if isinstance(event.reason, DrainingError):
        return Reason.DRAINED
    return Reason.REFUSED if isinstance(event.reason, OverloadedError) else Reason.LOST
