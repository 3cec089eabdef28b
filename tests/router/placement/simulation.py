"""Many routers over one Redis, or two, in simulated time: the real scripts, made-up workers with queues and caches."""

from __future__ import annotations

import heapq
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config.worker import Role
from cluster.index import scripts, slot_keys
from cluster.membership import keys
from cluster.membership.types import WorkerInfo
from cluster.redis.connect import connect
from router.placement.candidates import Candidates
from router.placement.charges import Charges
from router.placement.keys import PlacementKeys
from router.placement.place_script import Decision, script_source
from router.placement.prefix_index import match_source, record_source
from router.placement.settlement import SETTLE_SECONDS, Calls, settle_source
from router.placement.types import PlacementRequest
from tests.harness.place_call import PlaceCall, decision

PAGE = 16
KEY_BYTES = 8
STEP_SECONDS = 0.02
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Request:
    at: float
    chain: bytes  # index keys of the prompt's blocks
    tokens: int
    output: int


@dataclass
class Seen:
    """What came of a run: seconds to first token and cached tokens, by request."""

    ttft: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    @property
    def mean_ttft(self) -> float:
        return sum(self.ttft) / len(self.ttft)


@dataclass
class Router:
    name: str
    phase: float  # seconds: routers beat at different moments
    charges: Charges = field(default_factory=Charges)
    calls: Calls = field(default_factory=Calls)
    beats: bool = False  # at its next moment
    placed: int = 0

    @property
    def next_id(self) -> bytes:
        """Transfer id of the next attempt."""
        return b"%s/%d" % (self.name.encode(), self.placed)

    def charge(self, request: Request, p: WorkerInfo, d: WorkerInfo, uncached: int) -> bytes:
        attempt = PlacementRequest(self.next_id, request.chain, request.tokens, request.output)
        self.placed += 1
        self.charges.add(attempt, p, d, uncached, in_redis=True)
        return attempt.transfer_id

    def keys(self, namespace: str) -> PlacementKeys:
        return PlacementKeys(namespace, self.name)


class Simulation:
    def __init__(
        self,
        url: str,
        namespace: str,
        routers: int,
        pairs: int,
        rate: float,
        seed: int = 0,
        index_url: str = "",
    ):
        """`rate`: prefill tokens a second of a worker. `index_url`: of a Redis of the prefix index's own."""
        self._rate = rate
        self._rng = random.Random(seed)
        self._redis = connect(url)
        self._namespace = namespace
        self._routers = [Router(f"r{n}", SETTLE_SECONDS * (n + 1) / routers) for n in range(routers)]
        self._index, self._apart = connect(index_url or url), bool(index_url)
        self._place = self._redis.register_script(script_source(apart=self._apart))
        self._match = self._index.register_script(match_source())
        self._record = self._index.register_script(record_source())
        self._settle = self._redis.register_script(settle_source())
        self._report = self._index.register_script(scripts.report())
        self._owners, self._sequences = keys.slot_owners(namespace), keys.sequences(namespace)
        if self._apart:
            self._owners, self._sequences = slot_keys.owners(namespace), slot_keys.sequences(namespace)
        for router in self._routers:
            told: list[str | int] = [router.name, HOUR_MS, 0, 0, 0, "", 0, 0]
            router.calls.restart(int(self._settle(keys=router.keys(namespace).settle(0), args=told)))
        roles: tuple[Role, Role] = ("prefill", "decode")
        workers = [
            WorkerInfo(f"{role}-{n}", n + 1, slot, role, "m", "", "", b"", "", f"h{n}", 131072, 65536)
            for slot, (role, n) in enumerate([(role, n) for role in roles for n in range(pairs)], start=1)
        ]
        for worker in workers:
            self._redis.hset(keys.slot_owners(namespace), str(worker.slot), worker.name)
            self._index.hset(self._owners, str(worker.slot), worker.name)
        self._candidates = Candidates(workers[:pairs], workers[pairs:])
        self._by_name = {worker.name: worker for worker in workers}
        self._free_at = dict.fromkeys((worker.name for worker in workers), 0.0)
        self._holds: dict[str, set[bytes]] = {worker.name: set() for worker in workers}
        self._sequence: Counter[int] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0.0

    def close(self) -> None:
        self._redis.close()
        self._index.close()

    def run(self, requests: Sequence[Request]) -> Seen:
        seen = Seen()
        for request in requests:
            self._catch_up(request.at)
            self._now = request.at
            self._serve(request, self._rng.choice(self._routers), seen)
        return seen

    def _catch_up(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._now, _, action = heapq.heappop(self._events)
            action()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action))

    def _serve(self, request: Request, router: Router, seen: Seen) -> None:
        answer = self._place(
            keys=router.keys(self._namespace).place(router.calls.run), args=self._arguments(router, request)
        )
        placed = decision(answer)
        assert isinstance(placed, Decision)
        p, d = self._by_name[placed.prefill], self._by_name[placed.decode]
        if self._apart:
            self._expect(request, p, d)
        uncached = placed.uncached_tokens
        seen.cached.append(placed.cached_prefill_tokens)
        begun = max(request.at, self._free_at[p.name])
        first = begun + self._uncomputed(p, request) / self._rate
        self._free_at[p.name] = first
        self._holds[p.name].update(_blocks(request.chain))
        seen.ttft.append(first - request.at)
        done = first + request.output * STEP_SECONDS
        attempt = router.charge(request, p, d, uncached)

        def computed() -> None:
            router.charges.prefilled(attempt)
            self._changed(router)
            self._say(p, request.chain)

        def ended() -> None:
            router.charges.release(attempt)
            self._changed(router)
            self._say(d, request.chain)

        self._at(first, computed)
        self._at(done, ended)

    def _uncomputed(self, worker: WorkerInfo, request: Request) -> int:
        held, mine = 0, self._holds[worker.name]
        for block in _blocks(request.chain):
            if block not in mine:
                break
            held += PAGE
        return max(1, request.tokens - held)

    def _arguments(self, router: Router, request: Request) -> list[Any]:
        router.calls.end(number := router.calls.begin(b""), answered=True)
        call = PlaceCall(
            self._namespace,
            router=router.name,
            chain=request.chain,
            tokens=request.tokens,
            output=request.output,
            random=self._rng.random(),
            a=1 / self._rate,
            rate=self._rate,
            predict_ms=HOUR_MS,
            lease_ms=HOUR_MS,
            transfer_id=router.next_id,
        )
        if self._apart:
            call.chain = self._matched(call)
        return call.arguments(router.calls.run, number, self._candidates)

    def _matched(self, call: PlaceCall) -> bytes:
        numbers = struct.pack(">dd", call.random, HOUR_MS)
        args: list[str | bytes] = [scripts.prefix(self._namespace, "m"), call.chain, call.feeds]
        args += [numbers, self._candidates.slots]
        return bytes(self._match(keys=[self._owners], args=args))

    def _expect(self, request: Request, p: WorkerInfo, d: WorkerInfo) -> None:
        numbers = struct.pack(">dd", HOUR_MS, HOUR_MS)
        args: list[str | bytes] = [scripts.prefix(self._namespace, "m"), request.chain, numbers, "1"]
        args += [str(d.slot), str(p.slot)]
        self._record(keys=[self._owners], args=args)

    def _changed(self, router: Router) -> None:
        if not router.beats:
            router.beats = True
            beat = (self._now - router.phase) // SETTLE_SECONDS + 1
            self._at(beat * SETTLE_SECONDS + router.phase, lambda: self._beat(router))

    def _beat(self, router: Router) -> None:
        router.beats = False
        changes = router.charges.changes()
        run, number, oldest = router.calls.settle()
        told = [router.name, HOUR_MS, run, number, oldest, "", *changes.arguments]
        self._settle(keys=router.keys(self._namespace).settle(run), args=told)
        router.charges.confirmed(changes)

    def _say(self, worker: WorkerInfo, chain: bytes) -> None:
        self._sequence[worker.slot] += 1
        self._report(
            keys=[self._owners, self._sequences],
            args=[
                *(scripts.prefix(self._namespace, "m"), worker.slot, worker.name),
                *(self._sequence[worker.slot], HOUR_MS, len(chain) // KEY_BYTES, chain),
            ],
        )


def _blocks(chain: bytes) -> list[bytes]:
    return [chain[begin : begin + KEY_BYTES] for begin in range(0, len(chain), KEY_BYTES)]
