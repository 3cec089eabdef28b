"""Hand-offs that were refused: none is for ever, and a refusal costs little."""

from __future__ import annotations

import pytest

from cluster.errors import BlocksExhaustedError
from tests.engine.parts import PAGE, Parts, request
from tests.engine.scheduler.offered_hand_offs import OfferedHandOffs, refused_now
from tests.harness.calls import count_calls


@pytest.mark.parametrize("blocks", [6, 16])
def test_the_growth_of_many_choices_keeps_a_hand_off_out_of_half_of_the_cache_at_most(blocks: int) -> None:
    """It is a projection: one with more choices than the cache has room for would be refused for ever."""
    offers = OfferedHandOffs()
    offers.parts.hand_off("holds", blocks=20)
    offers.parts.hand_off("choices", n=16, blocks=blocks)
    assert offers.parts.pool.num_free == 20 - blocks
    with pytest.raises(BlocksExhaustedError):
        offers.parts.hand_off("more choices", n=16, blocks=blocks)


def test_a_hand_off_of_a_lower_class_is_not_refused_for_ever() -> None:
    """Those of a higher class take all that becomes free, and have claims to more; it counts as of theirs in time."""
    offers = OfferedHandOffs()
    offers.parts.step_seconds = 0.1
    taken, began = list[float](), offers.parts.now
    for _ in range(700):
        offers.step("a")
        while offers.offer("a"):
            pass
        if offers.offer("b", priority=-1):
            taken.append(offers.parts.now - began)
    assert len(taken) == 2
    assert 30.0 <= taken[0] <= 35.0 and 30.0 <= taken[1] - taken[0] <= 35.0, "one for each aging time"


def test_a_hand_off_of_a_lower_class_that_was_not_offered_for_long_has_not_aged() -> None:
    offers = OfferedHandOffs()
    for _ in range(2):
        while offers.offer("a"):
            pass
        assert not offers.offer("b", priority=-1)
        assert offers.parts.scheduler.refusals.rank(request("b", [3], tenant="b", priority=-1)) == 1
        offers.parts.now += 31.0
        assert offers.parts.scheduler.refusals.rank(request("b", [3], tenant="b", priority=-1)) == 1
        for _ in range(65):
            offers.step("a")
    assert ("b", 1) not in offers.parts.scheduler.refusals.spans


def calls_of_a_refusal(tenants: int, running: int, free: int) -> int:
    """Of the second one between two steps."""
    parts = Parts(running + free)
    for number in range(running):
        parts.hand_off(f"holds {number}", tenant="a")
    for number in range(tenants):
        parts.scheduler.add(request(f"{number}", [number % 13] * 50 * PAGE, tenant=f"t{number}"))
    parts.step()
    refused_now(parts)
    return count_calls(lambda: refused_now(parts))


def test_a_refusal_costs_no_more_beside_many_tenants_that_wait_and_many_that_run() -> None:
    for free in (2, 30):
        assert calls_of_a_refusal(400, 400, free) <= calls_of_a_refusal(20, 20, free) + 20


def test_a_hand_off_is_taken_without_a_look_at_each_tenant_that_waits() -> None:
    """They wait for seats, and what they need at most is left."""

    def calls(tenants: int) -> int:
        parts = Parts(1000, max_batch_tokens=8, max_batch_requests=8)
        for number in range(tenants):
            parts.scheduler.add(request(f"{number}", [3] * 2 * PAGE, tenant=f"t{number}"))
        assert len(parts.scheduler.waiting) == tenants
        parts.scheduler.reserve(request("first", [3], tenant="new"), [], PAGE)  # it looks at all of them once
        return count_calls(lambda: parts.scheduler.reserve(request("taken", [3], tenant="new"), [], 8 * PAGE))

    assert calls(100) <= calls(20) + 20
