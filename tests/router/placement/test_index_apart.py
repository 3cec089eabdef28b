"""Placement with the prefix index in a Redis of its own is that with one Redis, in random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from cluster.config.worker import Role
from cluster.membership.facts import group_id
from cluster.membership.topology import Location
from cluster.membership.types import WorkerInfo
from cluster.redis.embedded import EmbeddedRedis
from router.placement.candidates import Candidates, Heads
from router.placement.place_script import Decision
from tests.harness.place_call import PlaceCall
from tests.router.placement.apart import MODEL_ID, Scripts

PAGE, KEY_BYTES = 16, 8
SMALL, LARGE = 12, 70  # pairs
TIE = 1.05


@dataclass
class Two:
    """The same cluster over one Redis, and over two."""

    one: Scripts
    apart: Scripts

    @property
    def both(self) -> tuple[Scripts, Scripts]:
        return self.one, self.apart


@pytest.fixture
def two(redis_url: str, index_server: EmbeddedRedis, namespace: str) -> Iterator[Two]:
    with redis.Redis.from_url(redis_url) as control, redis.Redis.from_url(index_server.url) as index:
        yield Two(Scripts(control, control, namespace + "-one"), Scripts(control, index, namespace + "-two"))


class State:
    """Workers with load and prefixes, drawn at random, in both."""

    def __init__(self, two: Two, rng: random.Random, pairs: int, most_holders: int):
        self.two, self.rng, self.pairs = two, rng, pairs
        roles: tuple[Role, Role] = ("prefill", "decode")
        names = [(role, n) for role in roles for n in range(pairs)]
        self.workers = [self._worker(role, n, slot) for slot, (role, n) in enumerate(names, 1)]
        self.by_name = {one.name: one for one in self.workers}
        busy, scale = rng.choice([0.0, 0.5, 1.0]), rng.choice([300, 3_000])
        load = {name: int(rng.expovariate(1 / scale)) if rng.random() < busy else 0 for name in self.by_name}
        systems = [rng.randbytes(rng.randrange(1, 30) * KEY_BYTES) for _ in range(3)]
        self.chains = [rng.choice(systems) + rng.randbytes(rng.randrange(60) * KEY_BYTES) for _ in range(8)]
        for one in two.both:
            one.enter(self.workers, load)
        left = dict.fromkeys(systems, most_holders)
        for chain in self.chains:
            system = next(one for one in systems if chain.startswith(one))
            holders = rng.sample(self.workers, min(left[system], rng.randrange(most_holders + 1)))
            left[system] -= len(holders)
            for worker in holders:
                held = rng.randrange(len(chain) // KEY_BYTES + 1)
                for one in two.both:
                    one.report(worker, chain, held)
        self.call = PlaceCall(
            "",
            MODEL_ID,
            a=1e-4,
            b=rng.choice([0.0, 1e-8]),
            token_bytes=float(rng.choice([1, 30_000])),
            bandwidths=tuple(sorted((10 ** rng.uniform(8, 11) for _ in range(5)), reverse=True)),
            per_token=rng.choice([1e-8, 1e-6]),
            rate=1e4,
            mode=rng.choice(["never", "fallback", "auto"]),
        )

    def _worker(self, role: Role, number: int, slot: int) -> WorkerInfo:
        where = Location(host=f"h{number // 2}", rack=f"r{number // 8}", zone="z")
        return WorkerInfo(
            *(
                f"{role}-{number}",
                self.rng.randrange(2**63),
                slot,
                role,
                MODEL_ID,
                "",
                "",
                b"",
                where.host,
                "h",
            ),
            *(131_072, self.rng.choice([1_000, 4_000]), PAGE, where),
        )

    def candidates(self) -> Candidates | Heads:
        some, out = self.workers, self.rng.sample(self.workers, self.rng.randrange(self.pairs // 4))
        if self.pairs == SMALL:
            left = [one for one in some if one not in out]
            return Candidates(*([one for one in left if one.role == role] for role in ("prefill", "decode")))
        group = group_id(MODEL_ID, PAGE, b"")
        barred = ([one.name for one in out if one.role == role] for role in ("prefill", "decode"))
        without_prefill, without_decode = barred
        return Heads(
            *(group, MODEL_ID),
            prefill=True,
            without_prefill=without_prefill,
            without_decode=without_decode,
            seen=(self.pairs, self.pairs),
        )

    def place(self) -> tuple[Decision | int, Decision | int]:
        """The same request in both."""
        chain = self.rng.choice(self.chains)
        chain = chain[: self.rng.randrange(len(chain) // KEY_BYTES + 1) * KEY_BYTES]
        chain += self.rng.randbytes(self.rng.randrange(5) * KEY_BYTES)
        call = PlaceCall(
            **{**vars(self.call), "chain": chain, "tokens": len(chain) // KEY_BYTES * PAGE + 5},
        )
        call.random, candidates = self.rng.random(), self.candidates()
        first, second = (one.place(call, candidates, self.by_name) for one in self.two.both)
        return first, second


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pairs", [SMALL, LARGE])
def test_the_placements_are_those_of_one_redis(two, pairs, seed):
    """Of a fleet that the router names, whatever the number of holders; of a large one while they are few."""
    rng = random.Random(seed)
    state = State(two, rng, pairs, 2 * SMALL if pairs == SMALL else 2)
    for _ in range(8 if pairs == SMALL else 3):
        first, second = state.place()
        assert first == second
    one, apart = two.both
    assert one.load() == apart.load()
    assert one.nodes() == apart.nodes(), "and so are the predictions"


@pytest.mark.parametrize("seed", range(6))
def test_of_many_holders_the_least_loaded_are_found(two, seed):
    """One Redis looks at eight of them, drawn at random; apart control chooses among 32."""
    state = State(two, random.Random(seed), LARGE, 30)
    first, second = state.place()
    assert isinstance(first, Decision) and isinstance(second, Decision)
    assert second.terms["cost"] <= TIE * first.terms["cost"]


@pytest.mark.parametrize("pairs", [SMALL, LARGE])
def test_a_slot_that_control_does_not_know_is_dropped(two, pairs):
    """A worker that has left, whose copy and nodes are still in the index; it would be the best of all."""
    state = State(two, random.Random(1), pairs, 2)
    gone = WorkerInfo("gone", 1, 9999, "prefill", MODEL_ID, "", "", b"", "h", "h", 131_072, 4_000, PAGE)
    two.apart.index.hset(two.apart.owners, str(gone.slot), gone.name)
    for chain in state.chains:
        two.apart.report(gone, chain, len(chain) // KEY_BYTES)
    for _ in range(4):
        first, second = state.place()
        assert isinstance(second, Decision) and first == second
