"""Blocks are short: who gets those that become free, a sequence that waits in the engine or the next hand-off."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cluster.errors import BlocksExhaustedError
from engine.scheduler.decision import StepDecision
from engine.scheduler.refusals import KEPT_SECONDS
from engine.scheduler.sequence import SequenceState as S
from tests.engine.parts import PAGE, STEP_SECONDS, Parts, count_calls, request

BLOCKS = 40
TOKENS = 5  # of each request
KEPT = round(KEPT_SECONDS / STEP_SECONDS)


class Flow:
    """Hand-offs of two blocks each, as many as there is room for, before every step."""

    def __init__(self, blocks: int = BLOCKS, **settings: object):
        self.parts = Parts(blocks, **settings)
        self.got: Counter[str] = Counter()
        self.count = 0

    def step(self, tenant: str = "") -> None:
        while self.offer(tenant):
            pass
        self.got += self.parts.step(check=False)
        for name in [name for name in self.parts.scheduler.requests if self.got[name] >= TOKENS]:
            self.parts.scheduler.remove(name)

    def offer(self, tenant: str = "", **more: Any) -> bool:
        self.count += 1
        try:
            self.parts.hand_off(f"hand-off {self.count}", blocks=2, tenant=tenant, **more)
        except BlocksExhaustedError:
            return False
        return True

    def preempt(self, name: str) -> None:
        (sequence,) = self.parts.choices(name)
        self.parts.scheduler._preempt(sequence, StepDecision())

    def steps_until(self, names: list[str], tenant: str = "") -> int:
        """Until each of them has got a token more."""
        before = Counter({name: self.got[name] for name in names})
        for step in range(1, 500):
            self.step(tenant)
            if all(self.got[name] > before[name] for name in names):
                self.parts.check()
                return step
        raise AssertionError(f"no token: {[name for name in names if self.got[name] == before[name]]}")


def test_a_local_prompt_runs_beside_hand_offs_that_take_every_block() -> None:
    flow = Flow()
    flow.step()
    flow.parts.scheduler.add(request("local", [5] * 8 * PAGE, 100))
    assert flow.steps_until(["local"]) <= 2 * TOKENS


def test_preempted_streams_run_beside_hand_offs_that_take_every_block() -> None:
    """More of them than the cache holds at a time: the oldest is not passed by hand-offs, nor is any other."""
    flow = Flow()
    names = [f"stream {number}" for number in range(12)]
    for name in names:
        flow.parts.scheduler.add(request(name, [5] * 2 * PAGE, 100))
    flow.got += flow.parts.step()
    for name in names:
        flow.preempt(name)
    assert flow.steps_until(names) <= 8 * TOKENS


def blocked(tenant: str, held: int, **more: Any) -> Flow:
    """A prompt of `tenant` waits for blocks: 34 of 40 are held, so many by this tenant and the others by "c"."""
    flow = Flow()
    if held:
        flow.parts.hand_off("holds", blocks=held, tenant=tenant)
    flow.parts.hand_off("holds too", blocks=34 - held, tenant="c")
    flow.parts.scheduler.add(request("waits", [5] * 10 * PAGE, 100, tenant=tenant, **more))
    flow.parts.step()
    assert flow.parts.choices("waits")[0].state is S.WAITING
    return flow


@pytest.mark.parametrize(
    ("held", "weight", "hand_offs"), [(20, 1.0, 3), (5, 1.0, 2), (5, 0.5, 1), (1, 1.0, 0), (0, 1.0, 0)]
)
def test_a_hand_off_of_another_tenant_passes_while_that_one_holds_less(
    held: int, weight: float, hand_offs: int
) -> None:
    """Else a tenant with a backlog of its own would keep all others out."""
    flow = blocked("a", held)
    assert [flow.offer("b", weight=weight) for _ in range(4)] == [True] * hand_offs + [False] * (
        4 - hand_offs
    )


def test_no_hand_off_of_its_own_tenant_passes_one_that_waits() -> None:
    assert not blocked("a", 20).offer("a")


def test_a_hand_off_that_leaves_room_for_the_one_that_waits_is_taken() -> None:
    flow = blocked("a", 20)
    flow.parts.scheduler.remove("holds too")  # 20 free, ten of them claimed
    assert [flow.offer("a") for _ in range(6)] == [True] * 5 + [False]


def test_each_tenant_with_one_that_waits_has_a_claim() -> None:
    """The first of them holds much; the second one nothing, so what is free is for it."""
    flow = blocked("a", 20)
    flow.parts.scheduler.add(request("b waits", [6] * 10 * PAGE, 100, tenant="b"))
    assert not flow.offer("d")


def test_classes_come_before_shares_of_blocks() -> None:
    assert blocked("a", 1).offer("b", priority=1)
    assert not blocked("a", 20, priority=1).offer("b")


def test_one_that_waits_for_its_reader_has_no_claim() -> None:
    flow = blocked("a", 20)
    flow.parts.scheduler.set_paused("waits", True)
    assert flow.offer("a")


def test_one_that_waits_for_a_seat_has_no_claim() -> None:
    """Blocks would not help it."""
    flow = Flow(max_batch_requests=2)
    for name in ("one", "two"):
        flow.parts.hand_off(name, blocks=16, tenant="a")
    flow.parts.scheduler.add(request("waits", [5] * 8 * PAGE, 100, tenant="a"))
    flow.parts.step()
    assert flow.offer("a")


def test_a_claim_lasts_through_steps_that_have_no_token_for_it() -> None:
    """A long prompt takes the budget of several steps; what is freed meanwhile is not for hand-offs."""
    flow = Flow(max_batch_tokens=4)
    flow.parts.hand_off("holds", blocks=20)
    flow.parts.scheduler.add(request("long", [5] * 10 * PAGE, 100))
    flow.parts.step()
    flow.parts.scheduler.add(request("waits", [6] * 15 * PAGE, 100))
    flow.parts.step()
    assert not flow.offer()


@pytest.mark.parametrize(("held", "joins"), [(20, True), (1, False)])
def test_a_prompt_of_another_tenant_passes_one_that_waits_for_blocks_as_a_hand_off_does(
    held: int, joins: bool
) -> None:
    flow = blocked("a", held)
    flow.parts.scheduler.add(request("other", [6] * 2 * PAGE, 100, tenant="b"))
    flow.parts.step()
    assert (flow.parts.choices("other")[0].state is S.RUNNING) is joins


def test_no_prompt_of_a_lower_class_passes_one_that_waits_for_blocks() -> None:
    flow = blocked("a", 20)
    flow.parts.scheduler.add(request("lower", [6] * 2 * PAGE, 100, tenant="b", priority=-1))
    flow.parts.step()
    assert flow.parts.choices("lower")[0].state is S.WAITING


def test_a_large_prompt_is_not_passed_by_small_ones_for_ever() -> None:
    """Prompts of another tenant, one every step: they pass it until their tenant holds as much."""
    flow = blocked("a", 20)
    for number in range(200):
        flow.parts.scheduler.add(request(f"small {number}", [6 + number % 7] * 2, 4, tenant="b"))
        flow.got += flow.parts.step()
        for name in [name for name in flow.parts.scheduler.requests if flow.got[name] >= 4]:
            if name != "waits":
                flow.parts.scheduler.remove(name)
        if flow.got["waits"]:
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


def refused(tenant: str = "") -> Flow:
    """A hand-off of ten blocks was refused: 34 of 40 are held."""
    flow = Flow()
    flow.parts.hand_off("holds", blocks=30, tenant=tenant)
    flow.parts.hand_off("holds too", blocks=4, tenant=tenant)
    with pytest.raises(BlocksExhaustedError):
        flow.parts.hand_off("refused", blocks=10, tenant=tenant)
    return flow


def add_and_step(flow: Flow, name: str, blocks: int, **more: Any) -> bool:
    """Whether a prompt of so many blocks joins in the next step."""
    flow.parts.scheduler.add(request(name, [7] * blocks * PAGE, 100, **more))
    flow.parts.step()
    return flow.parts.choices(name)[0].state is S.RUNNING


def test_a_later_prompt_leaves_a_refused_hand_off_its_blocks_for_some_steps() -> None:
    flow = refused()
    assert not add_and_step(flow, "waits", 1)
    flow.parts.scheduler.remove("holds too")
    flow.parts.step()
    assert flow.parts.choices("waits")[0].state is S.WAITING, "ten are free, all for the hand-off"
    for _ in range(70):
        flow.parts.step()
    assert flow.parts.choices("waits")[0].state is S.RUNNING


def test_a_refused_hand_off_comes_before_later_prompts_and_after_earlier_ones() -> None:
    flow = refused()
    assert not add_and_step(flow, "later", 4)
    flow.parts.scheduler.remove("holds too")
    flow.parts.hand_off("comes again", blocks=10)
    flow = Flow()
    flow.parts.hand_off("holds", blocks=34)
    assert not add_and_step(flow, "earlier", 8)
    assert not flow.offer()
    flow.parts.scheduler.remove("holds")
    with pytest.raises(BlocksExhaustedError):
        flow.parts.hand_off("comes again", blocks=34)


def test_a_hand_off_that_comes_again_ends_what_was_kept_for_it() -> None:
    flow = refused()
    flow.parts.scheduler.remove("holds too")
    flow.parts.hand_off("comes again", blocks=8)
    assert add_and_step(flow, "next", 1)


def test_a_hand_off_larger_than_the_cache_is_not_waited_for() -> None:
    flow = Flow()
    with pytest.raises(BlocksExhaustedError):
        flow.parts.hand_off("never", blocks=BLOCKS + 1)
    assert claims(flow) == 0
    assert add_and_step(flow, "next", 4)


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
    shares = parts.scheduler._blocks.shares
    assert (shares.of(a.request), shares.of(b.request)) == (8, 12)
    parts.scheduler.remove("b")
    assert shares.of(b.request) == 0
    parts.scheduler._preempt(a, StepDecision())
    assert shares.of(a.request) == 8, "the others hold them still"


def test_a_refused_hand_off_does_not_come_before_a_later_prompt_of_a_higher_class() -> None:
    flow = refused()
    assert not add_and_step(flow, "high", 8, priority=1)
    flow.parts.scheduler.remove("holds too")
    with pytest.raises(BlocksExhaustedError):
        flow.parts.hand_off("comes again", blocks=10)


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


def refused_now(parts: Parts) -> None:
    with pytest.raises(BlocksExhaustedError):
        parts.scheduler.reserve(request("refused", [5], tenant="d"), [], 8 * PAGE)


def stale(flow: Flow, tenant: str, blocks: int = 30) -> None:
    """A hand-off of the tenant is refused and does not come again."""
    with pytest.raises(BlocksExhaustedError):
        flow.parts.hand_off(f"stale {tenant}", blocks=blocks, tenant=tenant)


def steps_until_it_joins(flow: Flow, name: str, limit: int = 300) -> int:
    for step in range(1, limit):
        flow.parts.step()
        if flow.parts.choices(name)[0].state is S.RUNNING:
            return step
    raise AssertionError(f"{name} waits for ever")


def with_stale(*more: str) -> Flow:
    """26 blocks are free, of which one that does not come again has a claim to 20: half of the cache."""
    flow = Flow(max_batch_requests=2)
    flow.parts.hand_off("holds", blocks=8, tenant="a")
    for number in range(3):
        flow.parts.hand_off(f"a{number}", blocks=2, tenant="a")
    for name in list(flow.parts.scheduler.requests):
        flow.parts.scheduler.set_paused(name, True)
    flow.parts.scheduler.add(request("waits for a seat", [5] * PAGE, 100, tenant="a"))
    for tenant in ("x", *more):
        stale(flow, tenant, 40)
    return flow


def test_a_hand_off_that_went_elsewhere_keeps_others_out_for_some_steps_whatever_waits() -> None:
    flow = with_stale()
    flow.parts.scheduler.add(request("other", [6] * 8 * PAGE, 100, tenant="z"))
    assert KEPT - 4 <= steps_until_it_joins(flow, "other") <= KEPT + 2
    assert flow.parts.choices("waits for a seat")[0].state is S.WAITING


def test_claims_of_refused_hand_offs_are_at_most_half_of_the_cache() -> None:
    flow = with_stale("y", "v", "w")
    flow.parts.scheduler.add(request("six", [6] * 6 * PAGE, 100, tenant="z"))
    flow.parts.step()
    assert flow.parts.choices("six")[0].state is S.RUNNING


def claims(flow: Flow) -> int:
    return sum(1 for _ in flow.parts.scheduler._refusals.claims())


def test_an_offer_renews_a_claim_and_one_that_ends_unused_delays_the_next() -> None:
    flow = with_stale()
    for _ in range(3):
        for _ in range(40):
            flow.parts.step()
        assert claims(flow) == 1
        stale(flow, "x", 39)
    for delay in (KEPT, 2 * KEPT, 4 * KEPT):
        steps = 0
        while claims(flow):
            flow.parts.step()
            steps += 1
        assert KEPT <= steps <= KEPT + 2
        for _ in range(delay):
            stale(flow, "x")
            assert claims(flow) == 0
            flow.parts.step()
        stale(flow, "x")
    while claims(flow):
        flow.parts.step()
    flow.parts.hand_off("taken", tenant="x")
    stale(flow, "x")
    assert claims(flow) == 1, "it was taken"


def test_a_large_hand_off_gets_its_blocks_beside_small_ones_of_another_tenant() -> None:
    """Those take each block that becomes free; it holds nothing, and comes again in every other step."""
    flow, taken = Flow(), 0
    for number in range(100):
        if number % 2 == 0:
            try:
                flow.parts.hand_off(f"large {number}", blocks=12, tenant="x")
                taken += 1
            except BlocksExhaustedError:
                pass
        flow.step("y")
    assert taken >= 10 and sum(flow.got.values()) >= 300


def test_a_refused_hand_off_of_a_lower_class_hides_none_of_its_tenant() -> None:
    flow = Flow()
    flow.parts.hand_off("holds", blocks=30, tenant="x")
    for priority in (-1, 1):
        with pytest.raises(BlocksExhaustedError):
            flow.parts.hand_off("refused", blocks=20, tenant="x", priority=priority)
    assert not flow.offer("x") and not flow.offer("x", priority=-1)
    assert not add_and_step(flow, "prompt", 2, tenant="x")
    assert flow.offer("v", priority=1), "its tenant holds less"


def test_a_claim_ends_too_where_the_engine_makes_no_steps() -> None:
    flow = Flow()
    flow.parts.hand_off("holds", blocks=30)
    stale(flow, "x", 40)
    flow.parts.scheduler.remove("holds")
    stale(flow, "y", 30)
    flow.parts.now += KEPT_SECONDS
    flow.parts.hand_off("y again", blocks=30, tenant="y")


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
