"""Random states of a large fleet in a real Redis, and the cost of every pair by a plain full scan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import redis

from cluster.config.worker import Role
from cluster.index import scripts
from cluster.membership.facts import group_id, pack
from cluster.membership.scripts import SETS
from cluster.membership.topology import Location
from cluster.membership.types import WorkerInfo
from router.placement.candidates import Heads, level_of
from router.placement.keys import PlacementKeys
from router.placement.place_script import Decision, script_source
from tests.harness.place_call import PlaceCall, decision

PAGE = 16
KEY_BYTES = 8
CAPACITIES = (16_384, 65_536, 262_144)  # tokens
# name, load of p:, load of d:, facts, slot of each worker
FILL = (
    SETS
    + """
local tag = ARGV[1]
local t = redis.call('TIME')
redis.call('HSET', tag .. 'load', '', string.rep('0', 65))
for i = 2, #ARGV, 5 do
  local name = ARGV[i]
  redis.call('HSET', tag .. 'load', 'p:' .. name, ARGV[i + 1], 'd:' .. name, ARGV[i + 2])
  redis.call('HSET', tag .. 'facts', name, ARGV[i + 3])
  redis.call('HSET', tag .. 'owners', ARGV[i + 4], name)
  redis.call('ZADD', tag .. 'leases', t[1] * 1000 + 3600000, string.sub(name, 1, -18))
  enter(tag, name, ARGV[i + 3])
end
"""
)
_INSERT = (
    scripts.tree() + "insert(ARGV[1], ARGV[2], {ARGV[3]}, tonumber(ARGV[4]), true, 0, now_ms() + 3600000)"
)


@dataclass
class Fleet:
    """Workers of two KV groups in at least 50 places, with load and prefixes."""

    workers: list[WorkerInfo]
    pending: np.ndarray  # by worker
    resident: np.ndarray
    held: dict[int, int] = field(default_factory=dict)  # slot → blocks of the chain
    chain: bytes = b""


@dataclass(frozen=True)
class Outcome:
    """Costs in seconds of the pair that was chosen and of the best pair."""

    chosen: float
    best: float
    told: float  # what the script says of its choice

    @property
    def regret(self) -> float:
        return self.chosen / self.best - 1 if self.best > 0 else 0.0


def random_fleet(rng: random.Random) -> Fleet:
    places = rng.randrange(50, 80)
    cliques = rng.random() < 0.5
    racks, zones = rng.randrange(4, 20), rng.randrange(2, 4)
    count = rng.randrange(40, 200)
    workers = []
    for slot in range(1, count + 1):
        place = rng.randrange(places)
        role: Role = "prefill" if rng.random() < 0.5 else "decode"
        location = Location(
            clique=f"c{place}" if cliques else "",
            host=f"h{place}",
            rack=f"r{place % racks}" if place % 5 else "",
            zone=f"z{place % racks % zones}",
        )
        capacity = rng.choice(CAPACITIES) // PAGE
        page = PAGE if rng.random() < 0.8 else 2 * PAGE
        workers.append(
            WorkerInfo(
                *(f"{role}-{slot}", rng.randrange(2**63), slot, role, "m", "", "", b"", f"h{place}", "h"),
                *(131_072, capacity * PAGE // page, page, location),
            )
        )
    busy = rng.choice([0.0, 0.5, 0.9, 1.0])  # share of the workers that have anything
    scale = rng.choice([300, 3_000, 30_000])
    pending = [int(rng.expovariate(1 / scale)) if rng.random() < busy else 0 for _ in workers]
    resident = [
        int(rng.random() * 1.2 * one.blocks_total * one.page_size) if rng.random() < busy else 0
        for one in workers
    ]
    return Fleet(workers, np.array(pending), np.array(resident))


class Trial:
    """One fleet, filled into Redis under a namespace of its own."""

    def __init__(self, client: redis.Redis, namespace: str, rng: random.Random):
        self.client, self.namespace, self.rng = client, namespace, rng
        self.fleet = random_fleet(rng)
        fill: list[Any] = [f"{{{namespace}}}:"]
        for worker, pending, resident in zip(
            self.fleet.workers, self.fleet.pending, self.fleet.resident, strict=True
        ):
            fill += [worker.name, int(pending), int(resident), pack(worker), worker.slot]
        client.eval(FILL, 0, *fill)
        self._index()

    def _index(self) -> None:
        """A system prompt that many hold, and a conversation that few hold further."""
        rng, fleet = self.rng, self.fleet
        system, talk = rng.randrange(4, 60), rng.randrange(4, 400)
        fleet.chain = rng.randbytes((system + talk) * KEY_BYTES)
        many = rng.sample(fleet.workers, int(rng.choice([0, 0.1, 0.5, 1.0]) * len(fleet.workers)))
        few = rng.sample(fleet.workers, rng.randrange(0, 6))
        # Another conversation with the same system prompt, so that the prompt is a node of its own
        other = fleet.chain[: system * KEY_BYTES] + rng.randbytes(KEY_BYTES)
        prefix = scripts.prefix(self.namespace, "m")
        for worker in many:
            self._hold(worker.slot, system)
            self.client.eval(_INSERT, 0, prefix, other, worker.slot, system + 1)
        for worker in few:
            self._hold(worker.slot, system + rng.randrange(1, talk + 1))

    def _hold(self, slot: int, blocks: int) -> None:
        chain = self.fleet.chain[: blocks * KEY_BYTES]
        prefix = scripts.prefix(self.namespace, "m")
        self.client.eval(_INSERT, 0, prefix, chain, slot, blocks)
        self.fleet.held[slot] = max(blocks, self.fleet.held.get(slot, 0))

    def outcomes(self, requests: int) -> Iterator[Outcome]:
        for number in range(1, requests + 1):
            yield self._one(number)

    def _one(self, number: int) -> Outcome:
        rng = self.rng
        near = rng.choice([1e9, 1e10, 1e11])
        steps = rng.choice([(1, 1, 1, 1, 1), (1, 1, 0.1, 0.01, 0.01), (1, 0.1, 0.1, 0.1, 0.01)])
        call = PlaceCall(
            self.namespace,
            chain=self.fleet.chain,
            tokens=len(self.fleet.chain) // KEY_BYTES * PAGE + rng.randrange(1, 400),
            output=256,
            random=rng.random(),
            a=(a := rng.choice([2e-5, 2e-4])),
            b=rng.choice([0.0, 1e-9]),
            rate=1 / a,
            token_bytes=rng.choice([2e4, 2e5]),
            bandwidths=tuple(near * step for step in steps),
            per_token=rng.choice([1e-8, 1e-6]),
            feeds="reported",
            transfer_id=b"%d" % number,
        )
        share = rng.choice([0.0, 0.0, 0.1, 0.5])
        fit = [one for one in self.fleet.workers if one.page_size == PAGE]
        excluded = {one.name for one in fit if rng.random() < share}
        eligible = [one for one in fit if one.name not in excluded]
        if {one.role for one in eligible} != {"prefill", "decode"}:
            excluded, eligible = set(), fit
        heads = Heads(
            *(group_id("m", PAGE, b""), "m"),
            prefill=True,
            without_prefill=[one.name for one in fit if one.name in excluded and one.role == "prefill"],
            without_decode=[one.name for one in fit if one.name in excluded and one.role == "decode"],
        )
        named = PlacementKeys(self.namespace, "router").place(1)
        answer: Any = self.client.eval(script_source(), len(named), *named, *call.arguments(1, number, heads))
        placed = decision(answer)
        assert isinstance(placed, Decision), placed
        names = [one.name for one in eligible]
        assert placed.prefill in names and placed.decode in names, "one that the request excludes"
        ps = [one for one in eligible if one.role == "prefill"]
        ds = [one for one in eligible if one.role == "decode"]
        costs = self._costs(call, ps, ds)
        chosen = costs[
            [one.name for one in ps].index(placed.prefill), [one.name for one in ds].index(placed.decode)
        ]
        self._uncharge(placed, call)
        return Outcome(float(chosen), float(costs.min()), placed.terms["cost"])

    def _costs(self, call: PlaceCall, ps: list[WorkerInfo], ds: list[WorkerInfo]) -> np.ndarray:
        """Of every pair, by the formula of choose.lua: wait, prefill, hand-off beyond what overlaps, decode penalty."""
        L = call.tokens
        hit = {one.slot: min(self.fleet.held.get(one.slot, 0) * PAGE, L - 1) for one in (*ps, *ds)}
        index = {one.slot: at for at, one in enumerate(self.fleet.workers)}
        u = np.array([L - hit[one.slot] for one in ps], dtype=float)
        compute = call.a * u + call.b * u * (L - u / 2)
        ready = np.array([self.fleet.pending[index[one.slot]] for one in ps]) / call.rate + compute
        load = np.array([self.fleet.resident[index[one.slot]] for one in ds], dtype=float)
        capacity = np.array([one.blocks_total * one.page_size for one in ds], dtype=float)
        lack = L + call.output + load - capacity
        penalty = call.per_token * load + np.where(lack > 0, 1 + lack / capacity, 0)
        level = np.array([[level_of(p, d) for d in ds] for p in ps])
        moved = np.array([L - hit[one.slot] for one in ds]) * call.token_bytes
        ship = moved[None, :] / np.array(call.bandwidths)[level] - 0.9 * compute[:, None]
        return ready[:, None] + penalty[None, :] + np.maximum(ship, 0)

    def _uncharge(self, placed: Decision, call: PlaceCall) -> None:
        """The next request finds the same state."""
        tag = f"{{{self.namespace}}}:"
        by_name = {one.name: at for at, one in enumerate(self.fleet.workers)}
        again: list[Any] = [tag]
        for name in (placed.prefill, placed.decode):
            at = by_name[name]
            worker = self.fleet.workers[at]
            loads = int(self.fleet.pending[at]), int(self.fleet.resident[at])
            again += [name, *loads, pack(worker), worker.slot]
        self.client.eval(FILL, 0, *again)
