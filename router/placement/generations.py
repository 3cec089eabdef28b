"""Workers between which KV can move, kept apart from those of another model or layout.

During a rolling upgrade both kinds are there. A request is placed inside one of them, prefill and decode alike, and
goes on there after a lost worker; only when its own is gone does it go on in another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from cluster.errors import UnavailableError
from cluster.membership.types import WorkerInfo
from router.placement.types import Generation, Mode, PlacementRequest
from wire import common_pb2


def generation_of(worker: WorkerInfo) -> Generation:
    return Generation(worker.model_id, worker.page_size, _comparable(worker.layout))


def within(generation: Generation | None, workers: list[WorkerInfo]) -> list[WorkerInfo]:
    return workers if generation is None else [one for one in workers if generation_of(one) == generation]


def usable(workers: list[WorkerInfo], request: PlacementRequest) -> list[WorkerInfo]:
    """Of the request's generation, without those that failed it, unless nobody else is left."""
    workers = within(request.generation, workers)
    others = [worker for worker in workers if not request.excludes(worker)]
    return others or workers


@lru_cache(maxsize=256)
def _comparable(layout: bytes) -> bytes:
    """Heads are re-sharded on the way: the degree of tensor parallelism may differ."""
    parsed = common_pb2.KvLayout.FromString(layout)
    parsed.tensor_parallel = 0
    return parsed.SerializeToString(deterministic=True)


class Generations:
    """Those of one membership, made once for it."""

    def __init__(self, prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo], mode: Mode):
        self._weights = Counter(generation_of(worker) for worker in decode)
        prefilled = {generation_of(worker) for worker in prefill}
        self._serving = [one for one in self._weights if mode == "always" or one in prefilled]
        if not self._serving and mode != "never":
            self._serving = list(self._weights)  # its decode workers prefill by themselves

    def choose(self, before: Generation | None, rng: random.Random) -> Generation:
        """Where a request goes: where it was, else where its model is, else anywhere, by the number of decode workers.

        Raises UnavailableError where nobody can serve it.
        """
        if not self._serving:
            missing = "prefill worker that fits a decode worker" if self._weights else "decode worker"
            raise UnavailableError(f"no {missing} is there", retry_after_seconds=1.0)
        if before is not None and before in self._serving:
            return before
        same_model = [one for one in self._serving if before is not None and one.model_id == before.model_id]
        among = same_model or self._serving
        return among[0] if len(among) == 1 else rng.choices(among, [self._weights[one] for one in among])[0]
