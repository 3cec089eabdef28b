"""Choices of the placement script: candidates that the router names, or the heads of Redis's sorted sets."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from cluster.membership import facts
from cluster.membership.facts import CLIQUE, HOST, place_of
from cluster.membership.topology import LEVELS
from cluster.membership.types import WorkerInfo

_RACK, _ZONE, _FAR = range(HOST + 1, len(LEVELS) + 1)


class Candidates:
    """Named one by one: a small fleet, and some of a large one where the sets do not help."""

    def __init__(
        self,
        prefill: Sequence[WorkerInfo],
        decode: Sequence[WorkerInfo],
        *,
        of_many: bool = False,
        drawn: bool = False,
    ):
        """`of_many`: there are more workers in the sorted sets, whose scores follow the placement. `drawn`: at random, for
        one request."""
        self.prefill, self.decode = list(prefill), list(decode)
        self.model_id = decode[0].model_id if decode else ""
        self.of_many, self.drawn = of_many, drawn

    @cached_property
    def arguments(self) -> list[bytes]:
        """Packed when the script is called, because a router that places without Redis does not use them."""
        workers = (*self.decode, *self.prefill)
        where = [one.location for one in workers]
        return [
            *(b"-" if self.of_many else b"", str(len(self.prefill)).encode()),
            self.slots,
            struct.pack(f">{len(self.decode)}d", *(facts.capacity_of(one) for one in self.decode)),
            _numbered(map(place_of, workers)),
            _numbered(one.rack for one in where),
            _numbered(one.zone for one in where),
            bytes(CLIQUE if one.clique else HOST for one in where),
            *(f"{one.role[0]}:{one.name}".encode() for one in workers),
        ]

    @cached_property
    def slots(self) -> bytes:
        """The slots of all candidates, decode workers first."""
        workers = (*self.decode, *self.prefill)
        return struct.pack(f">{len(workers)}I", *(one.slot for one in workers))

    @cached_property
    def prefill_by_id(self) -> Mapping[str, WorkerInfo]:
        return {one.worker_id: one for one in self.prefill}

    @cached_property
    def decode_by_id(self) -> Mapping[str, WorkerInfo]:
        return {one.worker_id: one for one in self.decode}


def _numbered(names: Iterable[str]) -> bytes:
    """A byte per name: equal names have the same number, "" has 0. There may be 255 different names."""
    numbers = {"": 0}
    return bytes(numbers.setdefault(name, len(numbers)) for name in names)


class Heads:
    """The first workers of the sorted sets of a KV group, without some that are named."""

    slots = b""  # Redis finds them

    def __init__(
        self,
        group: bytes,
        model_id: str,
        *,
        prefill: bool,
        without_prefill: Collection[str],
        without_decode: Collection[str],
        seen: tuple[int, int] = (0, 0),
    ):
        """`prefill`: whether a prefill worker is wanted. The names are worker_id@epoch. `seen`: how many prefill and
        decode workers the router has: if the sets hold fewer than half of them, it names candidates itself."""
        self.model_id = model_id
        without = (without_prefill, without_decode)
        self.arguments: list[bytes] = [
            group,
            b"1" if prefill else b"0",
            *("".join("\0" + name for name in names).encode() for names in without),
            *(str(count).encode() for count in seen),
        ]


def level_of(prefill: WorkerInfo, decode: WorkerInfo) -> int:
    """Index in LEVELS of what the pair shares; the script decides likewise."""
    p, d = prefill.location, decode.location
    if place_of(prefill) == place_of(decode):
        return (CLIQUE if p.clique else HOST) - 1
    if p.rack and p.rack == d.rack:
        return _RACK - 1
    return (_ZONE if p.zone and p.zone == d.zone else _FAR) - 1
