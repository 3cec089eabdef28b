"""The workers of one placement in the script's form: made once per membership, sent with every call."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cluster.membership.types import WorkerInfo
from router.placement.types import Mode


class Candidates:
    """Prefill workers first, then decode workers, each by place; the script's answer counts them from 1."""

    def __init__(self, prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo], mode: Mode):
        self.prefill, self.decode = sorted(prefill, key=_place), sorted(decode, key=_place)
        self.workers = [*self.prefill, *self.decode]
        self.model_id = decode[0].model_id if decode else ""
        may_local = mode in ("always", "auto") or (mode == "fallback" and not prefill)
        loads = [f"p:{worker.name}" for worker in self.prefill] + [f"d:{one.name}" for one in self.decode]
        if may_local:
            loads += [f"p:{worker.name}" for worker in self.decode]
        capacities = [float(worker.blocks_total * worker.page_size) for worker in self.decode]
        self.arguments: list[bytes] = [
            str(len(prefill)).encode(),
            str(len(self.workers)).encode(),
            struct.pack(f">{len(capacities)}d", *capacities),
            _packed([worker.slot for worker in self.workers]),
            _packed(self._runs()),
            *(field.encode() for field in loads),
        ]

    def _runs(self) -> list[int]:
        """(place, last index) of neighbours of one role in one place. The script asks only which are the same."""
        numbers: dict[str, int] = {}
        runs: list[int] = []
        before = None
        for index, worker in enumerate(self.workers, 1):
            here = worker.role, numbers.setdefault(_place(worker), len(numbers))
            if here != before:
                runs += [here[1], index]
            runs[-1] = index
            before = here
        return runs


def _place(worker: WorkerInfo) -> str:
    return worker.place or worker.host


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)
