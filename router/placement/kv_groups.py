"""Groups of workers between which KV can move: one model, one KV layout.

During a rolling upgrade there are two. A request's prefill and decode worker are of one KV group. Once a token of it has
come, those of its later attempts are of the same group, until that cannot serve any more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence

from cluster.errors import UnavailableError
from cluster.membership.facts import comparable
from cluster.membership.types import WorkerInfo
from router.placement.types import KvGroup, Mode


def kv_group_of(worker: WorkerInfo) -> KvGroup:
    return KvGroup(worker.model_id, worker.page_size, comparable(worker.layout))


class KvGroups:
    """The KV groups of one membership."""

    def __init__(
        self, prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo], mode: Mode, model: str = ""
    ):
        """`model`: its name, for errors, where the router has several."""
        self._of_model = f" for model {model!r}" if model else ""
        self._weights = Counter(kv_group_of(worker) for worker in decode)
        prefilled = {kv_group_of(worker) for worker in prefill}
        self._serving = [one for one in self._weights if mode == "always" or one in prefilled]
        if not self._serving and mode != "never":
            self._serving = list(self._weights)  # decode workers prefill by themselves

    def choose(self, before: KvGroup | None, rng: random.Random, failed: Collection[KvGroup] = ()) -> KvGroup:
        """The group `before` if it serves, else one of the same model, else any, by the number of decode workers; one of
        `failed` only where all others have failed too.

        Raises UnavailableError where none serves.
        """
        if not self._serving:
            missing = "prefill worker that fits a decode worker" if self._weights else "decode worker"
            raise UnavailableError(f"no {missing} is available{self._of_model}", retry_after_seconds=1.0)
        if before is not None and before in self._serving:
            return before
        same_model = [one for one in self._serving if before is not None and one.model_id == before.model_id]
        among = same_model or self._serving
        among = [one for one in among if one not in failed] or among
        return among[0] if len(among) == 1 else rng.choices(among, [self._weights[one] for one in among])[0]
