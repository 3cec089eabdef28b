"""`place.lua` and `settle.lua` in a real Redis, called as a router calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import redis

from cluster.membership import keys
from cluster.membership.types import WorkerInfo
from cluster.protocol.priority import PriorityClass
from router.placement.candidates import Candidates
from router.placement.charges import AttemptCharge
from router.placement.keys import PlacementKeys
from router.placement.place_script import script_source
from router.placement.settlement import settle_source
from tests.harness.place_call import PlaceCall, decision
from tests.harness.redis_text import decoded

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 1000)
PREDICT_MS, TTL_MS, LEASE_MS = 10_000, 3_600_000, 60_000
LEAVING, OTHER_LIFE, VOID = -4, -5, -7
LATER_RUN, LOST_TABLE = -1, -2


@dataclass
class Cluster:
    """Two prefill and two decode workers of equal cost: 16,000 tokens of room at each decode worker."""

    client: redis.Redis
    namespace: str
    router: str = "router"
    run: int = 1
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    tables: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        names = ["p1", "p2", "d1", "d2"]
        self.workers = [
            replace(INFO, worker_id=name, slot=slot, role="prefill" if name[0] == "p" else "decode")
            for slot, name in enumerate(names, 1)
        ]
        self.by_id = {one.worker_id: one for one in self.workers}
        self.tag = f"{{{self.namespace}}}:"
        for one in self.workers:
            self.client.hset(keys.slot_owners(self.namespace), str(one.slot), one.name)

    def load(self) -> dict[str, int]:
        kept = self.client.hgetall(self.tag + "load")
        return {decoded(name): int(amount) for name, amount in kept.items() if name}

    def of(self, worker_id: str) -> str:
        """Its field of the load."""
        return f"{worker_id[0]}:{self.by_id[worker_id].name}"

    def place(self, tokens: int = 100, *, output: int = 10, number: int | None = None, **more: Any) -> Any:
        candidates = Candidates(self.workers[:2], self.workers[2:])
        script_keys = PlacementKeys(self.namespace, self.router).place(self.run)
        number = next(self.numbers) if number is None else number
        call = PlaceCall(
            self.namespace, tokens=tokens, output=output, **{"transfer_id": b"t%d" % number, **more}
        )
        arguments = call.arguments(self.run, number, candidates)
        answer: Any = self.client.eval(script_source(), len(script_keys), *script_keys, *arguments)
        found = decision(answer)
        if isinstance(found, int):
            return found
        return tuple(name.partition("@")[0] for name in (found.prefill, found.decode))

    def settle(self, **more: Any) -> Settled:
        """One call of settle.lua; changes by the names of its arguments."""
        router, run = more.get("router", self.router), more.get("run", self.run)
        prefilled, released = more.get("prefilled", []), more.get("released", [])
        pairs = [part for one in more.get("added", {}).items() for part in one]
        number = more["number"] if "number" in more else next(self.tables)
        arguments = [
            *(
                router,
                more.get("lease", LEASE_MS),
                run,
                number,
                more.get("oldest", 0),
                more.get("cursor", ""),
            ),
            *(len(prefilled), len(released), *prefilled, *released, *pairs),
        ]
        script_keys = PlacementKeys(self.namespace, router).settle(run)
        answer = self.client.eval(settle_source(), len(script_keys), *script_keys, *arguments)
        if run == 0:
            return Settled(int(answer))
        return Settled(int(answer[0]), answer[1], answer[2], answer[3], answer[4:])

    def begin(self, router: str = "router") -> int:
        """Take a run, as a router does that starts."""
        run = self.settle(router=router, run=0, number=0).status
        self.settle(router=router, run=run, number=1)
        if router == self.router:
            self.run, self.tables = run, count(2)
        return run

    def table(self, router: str = "router", run: int | None = None) -> dict[bytes, bytes]:
        kept: Any = self.client.hgetall(PlacementKeys(self.namespace, router).charges(run or self.run))
        return dict(kept)

    def expire(self, router: str, run: int | None = None) -> None:
        """Its lease has run out."""
        self.client.zadd(self.tag + "routers", {f"{router}:{run or self.run}": 1})


@dataclass
class Settled:
    """settle.lua's answer; of a run that was asked for, only its number."""

    status: int
    skipped: int = 0
    more: int = 0
    cursor: bytes = b""
    ids: list[bytes] = field(default_factory=list)


def charge(p: str, d: str, prefill: int, decode: int, priority_class: PriorityClass = "normal") -> bytes:
    return AttemptCharge(p, d, prefill, decode, priority_class).packed


ONE = charge("p", "d", 100, 150)
OTHER = charge("p", "e", 7, 9, "high")
