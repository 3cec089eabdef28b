"""The scripts of a placement over one Redis, and over two, called as a router calls them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import redis

from cluster.index import scripts, slot_keys
from cluster.membership import keys
from cluster.membership.facts import pack
from cluster.membership.types import WorkerInfo
from router.placement.candidates import Candidates, Heads
from router.placement.keys import PlacementKeys
from router.placement.place_script import Decision, script_source
from router.placement.prefix_index import match_source, record_source
from router.placement.settlement import settle_source
from tests.harness.place_call import PlaceCall, decision
from tests.router.placement.regret import FILL

MODEL_ID, TTL_MS, PREDICT_MS = "m", 3_600_000, 10_000


@dataclass
class Scripts:
    """`index`: the Redis with the prefix index, which may be the same."""

    control: redis.Redis
    index: redis.Redis
    namespace: str
    numbers: Any = field(default_factory=lambda: count(1))
    sequence: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.apart = self.index is not self.control
        self.keys = PlacementKeys(self.namespace, "router")
        self.prefix = scripts.prefix(self.namespace, MODEL_ID)
        self._place = self.control.register_script(script_source(apart=self.apart))
        self._match = self.index.register_script(match_source())
        self._record = self.index.register_script(record_source())
        self._report = self.index.register_script(scripts.report())
        settle = self.control.register_script(settle_source())
        self.run = int(settle(keys=self.keys.settle(0), args=["router", TTL_MS, 0, 0, 0, "", 0, 0]))

    @property
    def owners(self) -> str:
        """Of the index."""
        return slot_keys.owners(self.namespace) if self.apart else keys.slot_owners(self.namespace)

    def enter(self, workers: list[WorkerInfo], load: dict[str, int]) -> None:
        """Register workers, with the load of each."""
        parts = ((one.name, load[one.name], load[one.name], pack(one), one.slot) for one in workers)
        self.control.eval(FILL, 0, f"{{{self.namespace}}}:", *(part for one in parts for part in one))
        if self.apart:
            self.index.hset(self.owners, mapping={str(one.slot): one.name for one in workers})

    def report(self, worker: WorkerInfo, chain: bytes, held: int) -> None:
        number = self.sequence.get(worker.slot, 1)
        self.sequence[worker.slot] = number + 1
        sequences = slot_keys.sequences(self.namespace) if self.apart else keys.sequences(self.namespace)
        answer = self._report(
            keys=[self.owners, sequences],
            args=[self.prefix, worker.slot, worker.name, number, TTL_MS, held, chain],
        )
        assert answer == b"ok"

    def match(self, call: PlaceCall, candidates: Candidates | Heads) -> bytes:
        arguments: list[str | bytes] = [
            *(self.prefix, call.chain, call.feeds),
            *(struct.pack(">dd", call.random, TTL_MS), candidates.slots),
        ]
        return bytes(self._match(keys=[self.owners], args=arguments))

    def place(
        self, call: PlaceCall, candidates: Candidates | Heads, by_name: dict[str, WorkerInfo]
    ) -> Decision | int:
        chain = call.chain
        number = next(self.numbers)
        call = replace(call, namespace=self.namespace, transfer_id=b"t%d" % number)
        if self.apart and chain:
            call = replace(call, chain=self.match(call, candidates))
        arguments = call.arguments(self.run, number, candidates)
        found = decision(self._place(keys=self.keys.place(self.run), args=arguments))
        if self.apart and chain and isinstance(found, Decision):
            slots = [str(by_name[name].slot) for name in (found.decode, found.prefill) if name]
            keeps = b"0" if call.random < 1 / 8 else b"1"
            self._record(
                keys=[self.owners],
                args=[self.prefix, chain, struct.pack(">dd", PREDICT_MS, TTL_MS), call.feeds, keeps, *slots],
            )
        return found

    def load(self) -> dict[bytes, bytes]:
        kept: Any = self.control.hgetall(keys.load(self.namespace))
        return {name: value for name, value in kept.items() if name}

    def nodes(self) -> dict[bytes, Any]:
        """The index: label or holders by key, without the model's prefix; times of predictions left out."""
        found: dict[bytes, Any] = {}
        for key in self.index.scan_iter(f"{self.prefix}*", count=1000):
            short = key[len(self.prefix) :]
            if short.startswith(b"n:"):
                found[short] = self.index.get(key)
            else:
                held = self.index.hgetall(key)
                found[short] = {slot: value[:8] for slot, value in held.items()}
        return found
