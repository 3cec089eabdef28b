"""The purpose of placement, in simulated time: routers agree, and bursts find each other's prefixes."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from tests.router.placement.simulation import KEY_BYTES, PAGE, Request, Simulation

PAIRS = 4
RATE = 6000.0


def conversations(count: int, per_second: float) -> list[Request]:
    """Turns of many conversations with a few system prompts, in order of time."""
    rng = random.Random(7)
    systems = [rng.randbytes(32 * KEY_BYTES) for _ in range(5)]
    talks = [rng.choice(systems) for _ in range(count // 6)]
    requests = []
    for at in accumulate(rng.expovariate(per_second) for _ in range(count)):
        number = rng.randrange(len(talks))
        question, answer = rng.randrange(4, 120), rng.randrange(2, 20)
        chain = talks[number] + rng.randbytes(question * KEY_BYTES)
        requests.append(Request(at, chain, len(chain) // KEY_BYTES * PAGE, answer * PAGE))
        talks[number] = chain + rng.randbytes(answer * KEY_BYTES)
    return requests


@pytest.fixture
def simulate(redis_url, namespace):
    made: list[Simulation] = []

    def start(routers: int, rate: float = RATE, index_url: str = "") -> Simulation:
        simulation = Simulation(
            redis_url, f"{namespace}-{len(made)}", routers, PAIRS, rate, index_url=index_url
        )
        made.append(simulation)
        return simulation

    yield start
    for simulation in made:
        simulation.close()


@pytest.mark.long
def test_many_routers_place_as_one(simulate):
    requests = conversations(2500, per_second=9.0)
    means = {routers: simulate(routers).run(requests).mean_ttft for routers in (1, 4, 16)}
    assert means[1] > 0.2, "without queues there is nothing to agree on"
    for routers in (4, 16):
        assert means[routers] == pytest.approx(means[1], rel=0.03), means


@pytest.mark.parametrize("apart", [False, True], ids=["one Redis", "index apart"])
def test_siblings_of_a_burst_find_the_prefix_that_the_first_one_brought(simulate, index_server, apart):
    """5 ms apart: no worker has reported anything yet."""
    rng = random.Random(3)
    system = rng.randbytes(50 * KEY_BYTES)
    requests = [Request(worker * 0.001, system, 50 * PAGE, 16) for worker in range(4 * PAIRS)]
    for burst in range(5):
        shared = system + rng.randbytes(200 * KEY_BYTES)
        for sibling in range(8):
            chain = shared + rng.randbytes(KEY_BYTES)
            requests.append(Request(100.0 * (burst + 1) + 0.005 * sibling, chain, 251 * PAGE, 16))
    seen = simulate(4, rate=20_000.0, index_url=index_server.url if apart else "").run(requests)
    cached = sum(seen.cached[-40:])
    assert cached / sum(request.tokens for request in requests[-40:]) >= 0.88
