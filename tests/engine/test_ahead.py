"""Claims before a waiting sequence: the room that is left is that of a plain sum, and an admission costs little."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.ahead import Ahead
from engine.scheduler.sequence import Sequence
from tests.engine.parts import Parts, count_calls, request


@pytest.mark.parametrize("seed", range(60))
def test_the_room_is_that_of_a_plain_sum(seed: int) -> None:
    """Tenants are passed and admitted in any order; claims of those that hold as much by then do not count."""
    rng, parts = random.Random(seed), Parts(400)
    for tenant in "abcdef":
        parts.hand_off(tenant, blocks=rng.randint(1, 40), tenant=tenant)
    shares = parts.scheduler._blocks.shares
    ahead = Ahead(parts.pool, shares, parts.scheduler._claims, iter(()))
    claims: list[tuple[Sequence, int]] = []
    for number in range(60):
        weight = rng.choice((0.5, 1.0, 2.0))
        one = Sequence(request(f"{number}", [3], tenant=rng.choice("abcdef"), weight=weight), 0, [3], number)
        need, free = rng.randint(1, 12), parts.pool.num_free
        share = shares.of(one.request, need)
        room = free - sum(count for other, count in claims if shares.of(other.request) < share)
        assert (need <= ahead.room(one, [], need)) == (need <= room)
        if need <= room and rng.random() < 0.7:
            parts.scheduler._blocks.allocate(one, [], need)
            ahead.admitted(one.request.tenant)
        else:
            claims.append((one, rng.randint(1, 30)))
            ahead.passed(*claims[-1])


def test_admissions_of_many_tenants_with_claims_do_not_order_all_of_them_each() -> None:
    """A sequence of each has evicted a reservation, so blocks are set aside for it."""

    def calls(tenants: int) -> int:
        parts = Parts(80 * tenants, max_batch_tokens=8 * tenants, max_batch_requests=8 * tenants)
        for number in range(tenants):
            parts.scheduler._claims.evicted_for(parts.hand_off(f"r{number}", tenant=f"t{number}"))
            parts.scheduler.add(request(f"w{number}", [number % 13] * 2, tenant=f"t{number}"))
        return count_calls(parts.scheduler.schedule)

    assert calls(240) <= 10 * calls(30)
