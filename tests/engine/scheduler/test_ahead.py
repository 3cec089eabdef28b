"""Claims before a waiting sequence: the room that is left is that of a plain sum, and an admission costs little."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.ahead import Ahead
from engine.scheduler.decision import StepDecision
from engine.scheduler.sequence import Sequence
from tests.engine.parts import PAGE, Parts, request
from tests.harness.calls import count_calls


@pytest.mark.parametrize("seed", range(60))
def test_the_room_is_that_of_a_plain_sum(seed: int) -> None:
    """Tenants are passed and admitted in any order; claims of those that hold as much by then do not count."""
    rng, parts = random.Random(seed), Parts(400)
    for tenant in "abcdef":
        parts.hand_off(tenant, blocks=rng.randint(1, 40), tenant=tenant)
    shares = parts.scheduler.blocks.shares
    ahead = Ahead(parts.pool, shares, parts.scheduler.claims, iter(()))
    claims: list[tuple[Sequence, int]] = []
    for number in range(60):
        weight = rng.choice((0.5, 1.0, 2.0))
        one = Sequence(request(f"{number}", [3], tenant=rng.choice("abcdef"), weight=weight), 0, [3], number)
        need, free = rng.randint(1, 12), parts.pool.num_free
        share = shares.of(one.request, need)
        room = free - sum(count for other, count in claims if shares.of(other.request) < share)
        assert (need <= ahead.room(one, need, free)) == (need <= room)
        if need <= room and rng.random() < 0.7:
            parts.scheduler.blocks.allocate(one, [], need)
            ahead.admitted(one.request.tenant)
        else:
            claims.append((one, rng.randint(1, 30)))
            ahead.passed(*claims[-1])


def test_admissions_of_many_tenants_with_claims_do_not_order_all_of_them_each() -> None:
    """A sequence of each has evicted a reservation, so blocks are set aside for it."""

    def calls(tenants: int) -> int:
        parts = Parts(80 * tenants, max_batch_tokens=8 * tenants, max_batch_requests=8 * tenants)
        for number in range(tenants):
            parts.scheduler.claims.evicted_for(parts.hand_off(f"r{number}", tenant=f"t{number}"))
            parts.scheduler.add(request(f"w{number}", [number % 13] * 2, tenant=f"t{number}"))
        return count_calls(parts.scheduler.schedule)

    assert calls(240) <= 10 * calls(30)


def waiting_with_prefix(tenants: int) -> tuple[Parts, list[int]]:
    """Of each tenant a prompt waits of which eight blocks are cached and held; three are free, and it needs four. Also
    the blocks that others hold."""
    parts = Parts(8 * tenants + 3 + 2, max_batch_tokens=1000, max_batch_requests=tenants)
    for number in range(tenants):
        salt = number.to_bytes(16, "little")
        parts.scheduler.add(request(f"first {number}", [3] * 8 * PAGE, tenant=f"t{number}", salt=salt))
    parts.step(check=False)
    for one in parts.scheduler.running:
        parts.prefixes.register(one, one.num_computed)
        one.paused = True
        salt = one.request.salt
        prompt = [3] * 8 * PAGE + [13] + [3] * 3 * PAGE
        parts.scheduler.add(request(f"waits {salt[0]}", prompt, tenant=f"v{salt[0]}", salt=salt))
    return parts, parts.pool.allocate(parts.pool.num_free - 3, "z")


def test_the_prefix_of_a_prompt_that_waits_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (parts, _), looks = waiting_with_prefix(20), 0
    match = parts.pool.match

    def counting(hashes: list[bytes]) -> list[int]:
        nonlocal looks
        looks += len(hashes)
        return match(hashes)

    monkeypatch.setattr(parts.pool, "match", counting)
    parts.scheduler.schedule()
    assert looks >= 20 * 8
    looks = 0
    for _ in range(5):
        assert not parts.scheduler.schedule().scheduled and parts.scheduler.short_of_blocks
    assert looks == 0


def test_a_prompt_that_waits_joins_once_another_has_computed_more_of_its_prefix() -> None:
    parts, others = waiting_with_prefix(1)
    assert not parts.scheduler.schedule().scheduled
    holder, waits = (parts.choices(name)[0] for name in ("first 0", "waits 0"))
    holder.paused = False
    for _ in range(PAGE):
        assert list(parts.scheduler.schedule().scheduled) == [holder]
        holder.num_computed += 1
        holder.tokens.append(3)
        parts.prefixes.register(holder, holder.num_computed)
    holder.paused = True
    parts.pool.free(others[:1])
    assert parts.pool.num_free == 3
    assert list(parts.scheduler.schedule().scheduled) == [waits]


def test_the_claim_of_a_preempted_sequence_is_not_that_of_when_it_came() -> None:
    parts, others = waiting_with_prefix(1)
    waits = parts.choices("waits 0")[0]
    parts.scheduler.schedule()
    assert (waits.found, waits.claim) == (8, 4)
    parts.pool.free(others)
    assert list(parts.scheduler.schedule().scheduled) == [waits]
    waits.num_computed = len(waits.tokens)
    waits.tokens += [13] * 3 * PAGE
    parts.scheduler.preempt(waits, StepDecision())
    parts.pool.allocate(1, "z")
    assert not parts.scheduler.schedule().scheduled
    assert (waits.found, waits.claim) == (8, 7)
