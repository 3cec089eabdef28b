"""The candidates of a placement in the script's form: made once per membership, sent with every call."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cluster.membership.topology import LEVELS
from cluster.membership.types import WorkerInfo
from router.placement.types import Mode

_CLIQUE, _HOST, _RACK, _ZONE, _FAR = range(1, len(LEVELS) + 1)  # the script counts from 1


class Candidates:
    """Prefill workers first, then decode workers, each sorted by place; the script's answer counts them from 1."""

    def __init__(self, prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo], mode: Mode):
        self.prefill, self.decode = sorted(prefill, key=_place), sorted(decode, key=_place)
        self.workers = [*self.prefill, *self.decode]
        self.model_id = decode[0].model_id if decode else ""
        may_local = mode in ("always", "auto") or (mode == "fallback" and not prefill)
        loads = [f"p:{worker.name}" for worker in self.prefill] + [f"d:{one.name}" for one in self.decode]
        if may_local:
            loads += [f"p:{worker.name}" for worker in self.decode]
        capacities = [float(worker.blocks_total * worker.page_size) for worker in self.decode]
        places = _Places(self.workers)
        self.arguments: list[bytes] = [
            str(len(prefill)).encode(),
            str(len(self.workers)).encode(),
            struct.pack(f">{len(capacities)}d", *capacities),
            _packed([worker.slot for worker in self.workers]),
            _packed(places.runs),
            _packed(places.facts),
            *(field.encode() for field in loads),
        ]


class _Places:
    """`runs`: (place, last index) of neighbours of one role in one place. `facts`: of each place, what its workers share
    (a clique or a host), and the numbers of its rack and zone, 0 where unknown."""

    def __init__(self, workers: Sequence[WorkerInfo]):
        self.runs: list[int] = []
        self.facts: list[int] = []
        numbers: dict[str, int] = {}
        regions: dict[str, int] = {"": 0}
        before = None
        for index, worker in enumerate(workers, 1):
            place = _place(worker)
            if place not in numbers:
                numbers[place] = len(numbers)
                where = worker.location
                region = [
                    f"{level}/{name}" if name else ""
                    for level, name in (("r", where.rack), ("z", where.zone))
                ]
                self.facts += [_CLIQUE if where.clique else _HOST]
                self.facts += [regions.setdefault(name, len(regions)) for name in region]
            here = worker.role, numbers[place]
            if here != before:
                self.runs += [here[1], index]
            self.runs[-1] = index
            before = here


def level_of(prefill: WorkerInfo, decode: WorkerInfo) -> int:
    """Index in LEVELS of what the pair shares; the script decides likewise."""
    p, d = prefill.location, decode.location
    if _place(prefill) == _place(decode):
        return (_CLIQUE if p.clique else _HOST) - 1
    if p.rack and p.rack == d.rack:
        return _RACK - 1
    return (_ZONE if p.zone and p.zone == d.zone else _FAR) - 1


def _place(worker: WorkerInfo) -> str:
    return worker.place or worker.host


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)
