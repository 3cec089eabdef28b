"""Blocks are short: who gets those that become free, a sequence that waits in the engine or the next hand-off."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cluster.errors import BlocksExhaustedError
from engine.scheduler.sequence import SequenceState as S
from tests.engine.parts import PAGE, Parts, request
from tests.engine.scheduler.offered_hand_offs import TOKENS, OfferedHandOffs
from tests.harness.calls import count_calls


def test_a_local_prompt_runs_beside_hand_offs_that_take_every_block() -> None:
    offers = OfferedHandOffs()
    offers.step()
    offers.parts.scheduler.add(request("local", [5] * 8 * PAGE, 100))
    assert offers.steps_until(["local"]) <= 2 * TOKENS


def test_preempted_streams_run_beside_hand_offs_that_take_every_block() -> None:
    """More of them than the cache holds at a time: the oldest is not passed by hand-offs, nor is any other."""
    offers = OfferedHandOffs()
    names = [f"stream {number}" for number in range(12)]
    for name in names:
        offers.parts.scheduler.add(request(name, [5] * 2 * PAGE, 100))
    offers.got += offers.parts.step()
    for name in names:
        offers.preempt(name)
    assert offers.steps_until(names) <= 8 * TOKENS


def blocked(tenant: str, held: int, **more: Any) -> OfferedHandOffs:
    """A prompt of `tenant` waits for blocks: 34 of 40 are held, so many by this tenant and the others by "c"."""
    offers = OfferedHandOffs()
    if held:
        offers.parts.hand_off("holds", blocks=held, tenant=tenant)
    offers.parts.hand_off("holds too", blocks=34 - held, tenant="c")
    offers.parts.scheduler.add(request("waits", [5] * 10 * PAGE, 100, tenant=tenant, **more))
    offers.parts.step()
    assert offers.parts.choices("waits")[0].state is S.WAITING
    return offers


@pytest.mark.parametrize(
    ("held", "weight", "hand_offs"), [(20, 1.0, 3), (5, 1.0, 2), (5, 0.5, 1), (1, 1.0, 0), (0, 1.0, 0)]
)
def test_a_hand_off_of_another_tenant_passes_while_that_one_holds_less(
    held: int, weight: float, hand_offs: int
) -> None:
    """Else a tenant with a backlog of its own would keep all others out."""
    offers = blocked("a", held)
    assert [offers.offer("b", weight=weight) for _ in range(4)] == [True] * hand_offs + [False] * (
        4 - hand_offs
    )


def test_no_hand_off_of_its_own_tenant_passes_one_that_waits() -> None:
    assert not blocked("a", 20).offer("a")


def test_a_hand_off_that_leaves_room_for_the_one_that_waits_is_taken() -> None:
    offers = blocked("a", 20)
    offers.parts.scheduler.remove("holds too")  # 20 free, ten of them claimed
    assert [offers.offer("a") for _ in range(6)] == [True] * 5 + [False]


def test_each_tenant_with_one_that_waits_has_a_claim() -> None:
    """The first of them holds much; the second one nothing, so what is free is for it."""
    offers = blocked("a", 20)
    offers.parts.scheduler.add(request("b waits", [6] * 10 * PAGE, 100, tenant="b"))
    assert not offers.offer("d")


def test_classes_come_before_shares_of_blocks() -> None:
    assert blocked("a", 1).offer("b", priority=1)
    assert not blocked("a", 20, priority=1).offer("b")


def test_one_that_waits_for_its_reader_has_no_claim() -> None:
    offers = blocked("a", 20)
    offers.parts.scheduler.set_paused("waits", True)
    assert offers.offer("a")


def test_one_that_waits_for_a_seat_has_no_claim() -> None:
    """Blocks would not help it."""
    offers = OfferedHandOffs(max_batch_requests=2)
    for name in ("one", "two"):
        offers.parts.hand_off(name, blocks=16, tenant="a")
    offers.parts.scheduler.add(request("waits", [5] * 8 * PAGE, 100, tenant="a"))
    offers.parts.step()
    assert offers.offer("a")


def test_a_claim_lasts_through_steps_that_have_no_token_for_it() -> None:
    """A long prompt takes the budget of several steps; what is freed meanwhile is not for hand-offs."""
    offers = OfferedHandOffs(max_batch_tokens=4)
    offers.parts.hand_off("holds", blocks=20)
    offers.parts.scheduler.add(request("long", [5] * 10 * PAGE, 100))
    offers.parts.step()
    offers.parts.scheduler.add(request("waits", [6] * 15 * PAGE, 100))
    offers.parts.step()
    assert not offers.offer()


@pytest.mark.parametrize(("held", "joins"), [(20, True), (1, False)])
def test_a_prompt_of_another_tenant_passes_one_that_waits_for_blocks_as_a_hand_off_does(
    held: int, joins: bool
) -> None:
    offers = blocked("a", held)
    offers.parts.scheduler.add(request("other", [6] * 2 * PAGE, 100, tenant="b"))
    offers.parts.step()
    assert (offers.parts.choices("other")[0].state is S.RUNNING) is joins


def test_no_prompt_of_a_lower_class_passes_one_that_waits_for_blocks() -> None:
    offers = blocked("a", 20)
    offers.parts.scheduler.add(request("lower", [6] * 2 * PAGE, 100, tenant="b", priority=-1))
    offers.parts.step()
    assert offers.parts.choices("lower")[0].state is S.WAITING


def test_a_large_prompt_is_not_passed_by_small_ones_for_ever() -> None:
    """Prompts of another tenant, one every step: they pass it until their tenant holds as much."""
    offers = blocked("a", 20)
    for number in range(200):
        offers.parts.scheduler.add(request(f"small {number}", [6 + number % 7] * 2, 4, tenant="b"))
        offers.got += offers.parts.step()
        for name in [name for name in offers.parts.scheduler.requests if offers.got[name] >= 4]:
            if name != "waits":
                offers.parts.scheduler.remove(name)
        if offers.got["waits"]:
            return
    raise AssertionError("it waits for ever")


def test_hand_offs_run_beside_local_prompts_that_take_every_block() -> None:
    """Small prompts, some of which always wait, and a large hand-off that is offered again now and then."""
    parts = Parts(24)
    got: Counter[str] = Counter()
    taken = 0
    for number in range(400):
        while len(parts.scheduler.waiting) < 8:
            parts.scheduler.add(request(f"local {number} {len(parts.scheduler.waiting)}", [3], 100))
        if number % 10 == 0:
            try:
                parts.hand_off(f"hand-off {number}", blocks=12)
                taken += 1
            except BlocksExhaustedError:
                pass
        got += parts.step(check=False)
        for name in [name for name in parts.scheduler.requests if got[name] >= 12]:
            parts.scheduler.remove(name)
    parts.check()
    assert taken >= 4, "as often as those that waited before it have had their blocks"
    assert sum(got[name] >= 12 for name in got if name.startswith("local")) >= 50


@pytest.mark.parametrize(("free", "refused"), [(0, False), (6, False), (6, True), (1, False)])
def test_a_step_costs_no_more_per_tenant_with_many_that_wait_for_blocks(free: int, refused: bool) -> None:
    def calls(tenants: int) -> int:
        parts = Parts(400)
        parts.hand_off("holds", blocks=400 - free)
        for number in range(tenants):
            if refused:
                with pytest.raises(BlocksExhaustedError):
                    parts.hand_off(f"refused {number}", blocks=8, tenant=f"t{number}")
            parts.scheduler.add(
                request(f"{number}", [number % 13] * (5 if number else 8) * PAGE, tenant=f"t{number}")
            )
        return count_calls(parts.scheduler.schedule)

    assert calls(240) <= 10 * calls(30)
