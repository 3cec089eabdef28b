"""Routers charge and settle over a connection that loses answers and that repeats, delays and reorders calls; routers die,
stay silent for longer than a lease, and return under their names. Once every living router has settled, `load` is the sum
of their charges, and no late call changes it. The scripts are the real ones, with a virtual clock."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from cluster.config.router import RouterConfig
from cluster.membership import keys
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import ROUTER_LEASE_SECONDS
from router.placement import place_script, settlement
from router.placement.placement import Placement
from router.placement.table_walk import WALK_SECONDS
from router.placement.types import PlacementRequest
from tests.harness.redis_machine import RedisMachine
from tests.harness.redis_text import decoded

NAMES = st.sampled_from(["one", "two"])
# "repeated": the connection broke after the first, and the second was answered.
WAYS = st.sampled_from(["well", "well", "repeated", "answer lost", "late"])
REACHED: Counter[str] = Counter()


Sent = tuple["Way", list[str], list[Any]]


class Way:
    """Replaces the ScriptCall of one script of one router."""

    def __init__(self, machine: Any, source: str):
        self.machine = machine
        self.source = source.replace(
            "redis.call('TIME')", f"{{redis.call('GET', '{{{machine.namespace}}}:clock'), '0'}}"
        )

    def run(self, keys: Any, arguments: Any) -> Any:
        return self.machine.client.eval(self.source, len(keys), *keys, *arguments)

    async def __call__(self, keys: Any, arguments: Any, seconds: float) -> Any:
        how = self.machine.way
        REACHED[how] += 1
        self.machine.sent.append((self, list(keys), list(arguments)))
        if how == "late":
            self.machine.late.append((self, list(keys), list(arguments)))
            raise TimeoutError("Redis did not answer in time")
        answer = self.run(keys, arguments)
        if how == "repeated":
            again = self.run(keys, arguments)
            assert again == answer or self.machine.settles, "a repetition has another answer"
            answer = again
        if how == "answer lost":
            raise TimeoutError("Redis did not answer in time")
        return answer

    async def close(self) -> None:
        """Nothing is held."""


class Charges(RedisMachine):
    def __init__(self, client: redis.Redis, url: str) -> None:
        super().__init__(client, url)
        self.now, self.way, self.settles = 10**6, "well", False
        self.late: list[Sent] = []
        self.sent: deque[Sent] = deque(maxlen=12)  # the network may repeat them
        self.routers: dict[str, Placement] = {}
        self.held: dict[str, list[bytes]] = {}
        self.gone: list[Placement] = []
        self.saved: dict[bytes, Any] | None = None
        self.tick(0)

    def tick(self, seconds: float) -> None:
        self.now += int(seconds)
        self.client.set(f"{{{self.namespace}}}:clock", self.now)

    @initialize()
    def build(self) -> None:
        info = WorkerInfo("p", 1, 1, "prefill", "m", "h:1", "", b"", "", "h", 4096, 10_000)
        workers = [replace(info, worker_id=f"p{n}", slot=n) for n in (1, 2)]
        workers += [replace(info, worker_id=f"d{n}", slot=n, role="decode") for n in (3, 4)]
        for worker in workers:
            self.client.hset(keys.slot_owners(self.namespace), str(worker.slot), worker.name)
        self.members = SimpleNamespace(all=workers)
        for name in ("one", "two"):
            self.comes(name, "well")

    @rule(name=NAMES, way=WAYS)
    def comes(self, name: str, way: str) -> None:
        """Start a router for the first time, or after a death that no other router has noticed."""
        if old := self.routers.get(name):
            self.gone.append(old)
        config = RouterConfig(
            model="/m",
            redis_url=self.url,
            namespace=self.namespace,
            router_id=name,
            local_prefill="never",
        )
        router = Placement(config, self.members)  # type: ignore[arg-type]
        router.script._script = Way(self, place_script.script_source())  # type: ignore[assignment]
        router.settlement._script = Way(self, settlement.settle_source())  # type: ignore[assignment]
        self.routers[name], self.held[name] = router, []
        self.settle(name, way)  # as it starts

    @rule(name=NAMES, way=WAYS, tokens=st.integers(1, 5000))
    def places(self, name: str, way: str, tokens: int) -> None:
        transfer, self.way = secrets.token_bytes(8), way
        request = PlacementRequest(transfer, b"", tokens, 10)
        placed = self.loop.run_until_complete(self.routers[name].place(request))
        REACHED["placed by Redis" if placed.from_redis else "placed alone"] += 1
        self.held[name].append(transfer)

    @rule(name=NAMES, tokens=st.integers(1, 5000))
    def places_well(self, name: str, tokens: int) -> None:
        self.places(name, "well", tokens)

    @rule(name=NAMES, pick=st.integers(0, 9), over=st.booleans())
    def gets_on(self, name: str, pick: int, over: bool) -> None:
        held = self.held[name]
        if held and over:
            self.routers[name].release(held.pop(pick % len(held)))
        elif held:
            self.routers[name].prefilled(held[pick % len(held)])

    @rule(name=NAMES, way=WAYS)
    def settles_once(self, name: str, way: str) -> None:
        self.settle(name, way)

    def settle(self, name: str, way: str) -> None:
        self.way, self.settles = way, True
        self.loop.run_until_complete(self.routers[name].settlement.settle())
        self.settles = False

    @rule(data=st.data())
    def a_late_call_arrives(self, data: st.DataObject) -> None:
        if self.late:
            way, names, arguments = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
            way.run(names, arguments)
            REACHED["arrived late"] += 1

    @rule(seconds=st.sampled_from([1, ROUTER_LEASE_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        """Let a lease pass: routers that do not settle meanwhile count as dead."""
        self.tick(seconds)

    @rule()
    def the_clock_goes_back(self) -> None:
        """As after a failover. Living routers notice with their next walk."""
        self.tick(-1000)
        self.settled()
        REACHED["the clock went back"] += 1

    @rule(keep=st.booleans())
    def redis_is_saved_or_rolled_back(self, keep: bool) -> None:
        """Everything but the clock; a rolled back Redis knows nothing of what was done since."""
        tag = f"{{{self.namespace}}}:"
        here: list[Any] = [key for key in self.client.keys(tag + "*") if key != (tag + "clock").encode()]
        if keep:
            self.saved = {key: self.client.dump(key) for key in here}
        elif self.saved is not None:
            for key in here:
                self.client.delete(key)
            for key, value in self.saved.items():
                self.client.restore(key, 0, value)
            REACHED["rolled back"] += 1

    def settled(self) -> None:
        """Settle every living router until none sees a later run, and each has walked over its table."""
        for _ in range(8):
            for name in self.routers:
                self.routers[name].settlement._walk._ended = -WALK_SECONDS
                self.settle(name, "well")

    def load(self) -> dict[str, int]:
        kept = self.client.hgetall(f"{{{self.namespace}}}:load")
        return {decoded(field): int(amount) for field, amount in kept.items() if field}

    def held_by_all(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for router in self.routers.values():
            total.update(router.charges.load())
        return dict(total)

    @rule(shuffle=st.randoms(use_true_random=False))
    def all_settle(self, shuffle: Any) -> None:
        sent = [*self.late, *self.sent]
        self.late.clear()
        self.settled()
        assert self.load() == self.held_by_all()
        shuffle.shuffle(sent)
        for way, names, arguments in sent:
            answer = way.run(names, arguments)
            REACHED["void" if answer == [-5] else "arrived after all"] += 1
            assert self.load() == self.held_by_all(), "a call that is over has changed the load"

    def teardown(self) -> None:
        if self.routers:
            self.all_settle_at_the_end()
        for router in [*self.routers.values(), *self.gone]:
            self.loop.run_until_complete(router._client.aclose())
        super().teardown()

    def all_settle_at_the_end(self) -> None:
        """After the end nothing of any router's charges is left."""
        for name in self.routers:
            for transfer in self.held[name]:
                self.routers[name].release(transfer)
        self.tick(ROUTER_LEASE_SECONDS + 1)
        self.settled()
        assert self.load() == {}
        assert not any(router.charges.pending for router in self.routers.values())
        self.tick(ROUTER_LEASE_SECONDS + 1)
        self.settled()
        assert not self.client.keys(f"{{{self.namespace}}}:chg:*"), "a table without charges"


def test_charges_in_any_order(redis_url, monkeypatch):
    monkeypatch.setattr(place_script, "RETRY_SECONDS", 0.0)
    how = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with redis.Redis.from_url(redis_url) as client:
        run_state_machine_as_test(lambda: Charges(client, redis_url), settings=how)  # type: ignore[arg-type]
    for what in (
        "rolled back",
        "the clock went back",
        "repeated",
        "answer lost",
        "arrived late",
        "void",
        "arrived after all",
        "placed by Redis",
    ):
        assert REACHED[what] > 0, f"hardly ever: {what}: {REACHED}"
