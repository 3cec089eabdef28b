"""Blocks that are kept for hand-offs that were refused for lack of them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import BlocksExhaustedError
from engine.scheduler.decision import StepDecision
from engine.scheduler.refusals import KEPT_SECONDS
from engine.scheduler.sequence import SequenceState as S
from tests.engine.parts import PAGE, Parts, request
from tests.engine.scheduler.offered_hand_offs import BLOCKS, KEPT, OfferedHandOffs, refused_now
from tests.harness.calls import count_calls


def refused(tenant: str = "") -> OfferedHandOffs:
    """A hand-off of ten blocks was refused: 34 of 40 are held."""
    offers = OfferedHandOffs()
    offers.parts.hand_off("holds", blocks=30, tenant=tenant)
    offers.parts.hand_off("holds too", blocks=4, tenant=tenant)
    with pytest.raises(BlocksExhaustedError):
        offers.parts.hand_off("refused", blocks=10, tenant=tenant)
    return offers


def add_and_step(offers: OfferedHandOffs, name: str, blocks: int, **more: Any) -> bool:
    """Whether a prompt of so many blocks joins in the next step."""
    offers.parts.scheduler.add(request(name, [7] * blocks * PAGE, 100, **more))
    offers.parts.step()
    return offers.parts.choices(name)[0].state is S.RUNNING


def test_a_later_prompt_leaves_a_refused_hand_off_its_blocks_for_some_steps() -> None:
    offers = refused()
    assert not add_and_step(offers, "waits", 1)
    offers.parts.scheduler.remove("holds too")
    offers.parts.step()
    assert offers.parts.choices("waits")[0].state is S.WAITING, "ten are free, all for the hand-off"
    for _ in range(70):
        offers.parts.step()
    assert offers.parts.choices("waits")[0].state is S.RUNNING


def test_a_refused_hand_off_comes_before_later_prompts_and_after_earlier_ones() -> None:
    offers = refused()
    assert not add_and_step(offers, "later", 4)
    offers.parts.scheduler.remove("holds too")
    offers.parts.hand_off("comes again", blocks=10)
    offers = OfferedHandOffs()
    offers.parts.hand_off("holds", blocks=34)
    assert not add_and_step(offers, "earlier", 8)
    assert not offers.offer()
    offers.parts.scheduler.remove("holds")
    with pytest.raises(BlocksExhaustedError):
        offers.parts.hand_off("comes again", blocks=34)


def test_a_hand_off_that_comes_again_ends_what_was_kept_for_it() -> None:
    offers = refused()
    offers.parts.scheduler.remove("holds too")
    offers.parts.hand_off("comes again", blocks=8)
    assert add_and_step(offers, "next", 1)


def test_a_hand_off_larger_than_the_cache_is_not_waited_for() -> None:
    offers = OfferedHandOffs()
    with pytest.raises(BlocksExhaustedError):
        offers.parts.hand_off("never", blocks=BLOCKS + 1)
    assert claims(offers) == 0
    assert add_and_step(offers, "next", 4)


def test_a_refused_hand_off_keeps_out_no_tenant_that_holds_less() -> None:
    assert add_and_step(refused("a"), "other", 2, tenant="b")
    assert not add_and_step(refused("a"), "own", 2, tenant="a")
    assert add_and_step(refused("a"), "high", 2, tenant="a", priority=1)


def test_blocks_that_a_tenants_sequences_share_count_once() -> None:
    """Sixteen choices with one prompt do not hold sixteen times its blocks."""
    parts = Parts(40)
    parts.scheduler.add(request("a", [3] * 8 * PAGE, n=16, tenant="a"))
    parts.process(parts.scheduler.schedule(), [13])
    assert len(parts.scheduler.running) == 16 and parts.pool.num_free == 32
    parts.hand_off("b", blocks=12, tenant="b")
    a, b = parts.choices("a")[0], parts.choices("b")[0]
    shares = parts.scheduler.blocks.shares
    assert (shares.of(a.request), shares.of(b.request)) == (8, 12)
    parts.scheduler.remove("b")
    assert shares.of(b.request) == 0
    parts.scheduler.preempt(a, StepDecision())
    assert shares.of(a.request) == 8, "the others hold them still"


def test_a_refused_hand_off_does_not_come_before_a_later_prompt_of_a_higher_class() -> None:
    offers = refused()
    assert not add_and_step(offers, "high", 8, priority=1)
    offers.parts.scheduler.remove("holds too")
    with pytest.raises(BlocksExhaustedError):
        offers.parts.hand_off("comes again", blocks=10)


def test_a_refusal_costs_no_more_beside_long_requests() -> None:
    """What tenants hold is kept, not counted in every step."""

    def calls(blocks: int) -> int:
        parts = Parts(blocks + 40)
        parts.scheduler.add(request("holds", [3] * blocks * PAGE, n=4, tenant="a"))
        parts.process(parts.scheduler.schedule(), [13])
        parts.scheduler.reserve(request("early", [5], tenant="c"), [], 30 * PAGE)
        parts.scheduler.add(request("waits", [4] * 50 * PAGE, tenant="b"))
        return count_calls(lambda: refused_now(parts))

    assert calls(60) <= calls(4) + 10


def stale(offers: OfferedHandOffs, tenant: str, blocks: int = 30) -> None:
    """A hand-off of the tenant is refused and does not come again."""
    with pytest.raises(BlocksExhaustedError):
        offers.parts.hand_off(f"stale {tenant}", blocks=blocks, tenant=tenant)


def steps_until_it_joins(offers: OfferedHandOffs, name: str, limit: int = 300) -> int:
    for step in range(1, limit):
        offers.parts.step()
        if offers.parts.choices(name)[0].state is S.RUNNING:
            return step
    raise AssertionError(f"{name} waits for ever")


def with_stale(*more: str) -> OfferedHandOffs:
    """26 blocks are free, of which one that does not come again has a claim to 20: half of the cache."""
    offers = OfferedHandOffs(max_batch_requests=2)
    offers.parts.hand_off("holds", blocks=8, tenant="a")
    for number in range(3):
        offers.parts.hand_off(f"a{number}", blocks=2, tenant="a")
    for name in list(offers.parts.scheduler.requests):
        offers.parts.scheduler.set_paused(name, True)
    offers.parts.scheduler.add(request("waits for a seat", [5] * PAGE, 100, tenant="a"))
    for tenant in ("x", *more):
        stale(offers, tenant, 40)
    return offers


def test_a_hand_off_that_went_elsewhere_keeps_others_out_for_some_steps_whatever_waits() -> None:
    offers = with_stale()
    offers.parts.scheduler.add(request("other", [6] * 8 * PAGE, 100, tenant="z"))
    assert KEPT - 4 <= steps_until_it_joins(offers, "other") <= KEPT + 2
    assert offers.parts.choices("waits for a seat")[0].state is S.WAITING


def test_claims_of_refused_hand_offs_are_at_most_half_of_the_cache() -> None:
    offers = with_stale("y", "v", "w")
    offers.parts.scheduler.add(request("six", [6] * 6 * PAGE, 100, tenant="z"))
    offers.parts.step()
    assert offers.parts.choices("six")[0].state is S.RUNNING


def claims(offers: OfferedHandOffs) -> int:
    return sum(1 for _ in offers.parts.scheduler.refusals.claims())


def test_an_offer_renews_a_claim_and_one_that_ends_unused_delays_the_next() -> None:
    offers = with_stale()
    for _ in range(3):
        for _ in range(40):
            offers.parts.step()
        assert claims(offers) == 1
        stale(offers, "x", 39)
    for delay in (KEPT, 2 * KEPT, 4 * KEPT):
        steps = 0
        while claims(offers):
            offers.parts.step()
            steps += 1
        assert KEPT <= steps <= KEPT + 2
        for _ in range(delay):
            stale(offers, "x")
            assert claims(offers) == 0
            offers.parts.step()
        stale(offers, "x")
    while claims(offers):
        offers.parts.step()
    offers.parts.hand_off("taken", tenant="x")
    stale(offers, "x")
    assert claims(offers) == 1, "it was taken"


def test_a_large_hand_off_gets_its_blocks_beside_small_ones_of_another_tenant() -> None:
    """Those take each block that becomes free; it holds nothing, and comes again in every other step."""
    offers, taken = OfferedHandOffs(), 0
    for number in range(100):
        if number % 2 == 0:
            try:
                offers.parts.hand_off(f"large {number}", blocks=12, tenant="x")
                taken += 1
            except BlocksExhaustedError:
                pass
        offers.step("y")
    assert taken >= 10 and sum(offers.got.values()) >= 300


def test_a_refused_hand_off_of_a_lower_class_hides_none_of_its_tenant() -> None:
    offers = OfferedHandOffs()
    offers.parts.hand_off("holds", blocks=30, tenant="x")
    for priority in (-1, 1):
        with pytest.raises(BlocksExhaustedError):
            offers.parts.hand_off("refused", blocks=20, tenant="x", priority=priority)
    assert not offers.offer("x") and not offers.offer("x", priority=-1)
    assert not add_and_step(offers, "prompt", 2, tenant="x")
    assert offers.offer("v", priority=1), "its tenant holds less"


def test_a_claim_ends_too_where_the_engine_makes_no_steps() -> None:
    offers = OfferedHandOffs()
    offers.parts.hand_off("holds", blocks=30)
    stale(offers, "x", 40)
    offers.parts.scheduler.remove("holds")
    stale(offers, "y", 30)
    offers.parts.now += KEPT_SECONDS
    offers.parts.hand_off("y again", blocks=30, tenant="y")
