"""The order of eviction: class, then what a tenant holds for its weight, then age."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.scheduler.decision import StepDecision
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.shares import Shares, Victims
from tests.engine.fake_model import PAGE, FakeRunner
from tests.engine.parts import Parts, request

_ones = st.lists(
    st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=12
)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def sequence(arrival: int, priority: int, tenant: str, blocks: int) -> Sequence:
    request = EngineRequest(
        str(arrival), [1], SamplingParams(), priority=priority, tenant=tenant, weight=WEIGHTS[tenant]
    )
    return Sequence(request, 0, [1], arrival, S.RUNNING, blocks=list(range(blocks)))


def choose_victim(candidates: list[Sequence], holders: list[Sequence]) -> Sequence:
    return Victims(candidates, Shares(held(holders))).next()


def held(holders: list[Sequence]) -> Counter[str]:
    blocks: Counter[str] = Counter()
    for one in holders:
        blocks[one.request.tenant] += len(one.blocks)
    return blocks


@given(ones=_ones, chosen=st.data())
def test_it_is_of_the_lowest_class_and_of_the_tenant_that_holds_most(ones, chosen):
    everyone = [sequence(arrival, *one) for arrival, one in enumerate(ones)]
    candidates = chosen.draw(st.lists(st.sampled_from(everyone), min_size=1, unique_by=id))
    victim = choose_victim(candidates, everyone)
    assert victim in candidates
    lowest = [one for one in candidates if one.rank == max(other.rank for other in candidates)]
    assert victim in lowest

    def share(tenant: str) -> float:
        return sum(len(one.blocks) for one in everyone if one.request.tenant == tenant) / WEIGHTS[tenant]

    assert share(victim.request.tenant) == max(share(one.request.tenant) for one in lowest)
    assert victim.arrival == max(
        one.arrival for one in lowest if share(one.request.tenant) == share(victim.request.tenant)
    )


def test_one_without_a_token_since_its_last_preemption_is_spared():
    """Its tenant holds most, but it would be preempted again and again before it gets on."""
    spared, other = sequence(0, 0, "a", 9), sequence(1, 0, "c", 1)
    spared.preempted_at = len(spared.tokens)
    assert choose_victim([spared, other], [spared, other]) is other
    spared.tokens.append(3)
    assert choose_victim([spared, other], [spared, other]) is spared


def test_of_spared_ones_alone_the_oldest_goes_on_whatever_its_tenant_holds():
    ones = [sequence(0, 0, "a", 9), sequence(1, 0, "c", 1)]
    for one in ones:
        one.preempted_at = len(one.tokens)
    assert choose_victim(ones, ones) is ones[1]


def test_a_spared_one_of_a_lower_class_goes_before_others_of_a_higher_one():
    spared, other = sequence(0, -1, "a", 1), sequence(1, 0, "c", 9)
    spared.preempted_at = len(spared.tokens)
    assert choose_victim([spared, other], [spared, other]) is spared


def test_a_second_victim_of_a_step_is_chosen_by_what_is_held_then():
    ones = [sequence(0, 0, "a", 4), sequence(1, 0, "a", 3), sequence(2, 0, "c", 3)]
    blocks = held(ones)
    victims = Victims(ones, Shares(blocks))
    assert victims.next() is ones[1]
    blocks["a"] -= 3
    ones[1].machine.to(S.WAITING)
    assert victims.next() is ones[2]


def test_a_light_tenants_stream_is_not_preempted_while_another_holds_most() -> None:
    """It comes last in a step, when all others are scheduled: it was the only one left to choose."""
    parts = Parts(100, max_batch_tokens=256)
    for number in range(12):
        parts.scheduler.add(request(f"a{number}", [3 + number] * 20, 200, tenant="a"))
    parts.step()
    parts.scheduler.add(request("b", [5] * 8, 240, tenant="b"))
    got: Counter[str] = Counter()
    for _ in range(230):
        got += parts.step(check=False)
    assert got["b"] >= 225
    assert sum(got.values()) - got["b"] > got["b"], "the other tenant goes on too"
    parts.check()


def test_a_light_tenants_reservation_is_not_evicted_while_another_holds_most() -> None:
    parts = Parts(24)
    for number in range(2):
        parts.scheduler.add(request(f"a{number}", [3 + number] * 8 * PAGE, 200, tenant="a"))
    parts.step()
    parts.scheduler.reserve(request("b", [5] * 4, tenant="b"), [], 5 * PAGE)
    parts.step()
    for _ in range(4 * PAGE):
        decision = parts.scheduler.schedule()
        assert not decision.evicted_reservations
        if decision.preemptions:
            return
        for one in decision.scheduled:
            one.num_computed += 1
            one.tokens.append(13)
    raise AssertionError("the blocks last longer than expected")


def test_a_copy_for_a_victim_that_was_scheduled_is_not_made() -> None:
    """Its block is another sequence's by then."""
    parts = Parts(7)
    parts.scheduler.add(request("a", [3] * 2 * PAGE + [4], n=3, tenant="a"))
    for name in ("b0", "b1"):
        parts.scheduler.add(request(name, [ord(name[1])] * PAGE, tenant="b"))
    parts.process(parts.scheduler.schedule(), [13] * 3)
    assert parts.pool.num_free == 2, "one for a copy of each choice but the last"
    decision = parts.scheduler.schedule()
    assert parts.scheduled(decision) == {"a/0": 1, "b0/0": 1, "b1/0": 1}
    assert decision.preemptions == 2
    assert [copy.target for copy in decision.plan().copies] == [parts.choices("a")[0].blocks[2]]


def test_a_class_cannot_be_outbid():
    polite, greedy = sequence(0, 1, "a", 5), sequence(1, 32767, "a", 5)
    assert polite.rank == greedy.rank
    assert choose_victim([polite, greedy], [polite, greedy]) is greedy


def test_a_crowd_of_one_tenant_does_not_push_another_out():
    """Six of the crowd and one other, which came last: by age alone it would go first."""
    runner = FakeRunner(30, max_batch_tokens=64)
    engine = Engine(runner, runner.config, secret=b"s")
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for index in range(7):
        tenant = "crowd" if index < 6 else "other"
        engine.add(EngineRequest(f"{tenant}{index}", [index + 3] * 2 * PAGE, sampling, tenant=tenant))
    ended = []
    while engine.has_work:
        ended += [done.request_id for done in engine.step().done]
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert len(ended) == 7
    assert ended.index("other6") < ended.index("crowd5"), ended


def test_a_second_victim_is_of_the_tenant_that_holds_most_after_the_first() -> None:
    parts = Parts(5 + 4 * 2 + 2 * 3)
    for number in range(5):
        grows = parts.hand_off(f"b{number}", tokens=3, tenant=f"b{number}")
        grows.tokens.append(13)
        grows.num_computed = PAGE
    for tenant, count, blocks in (("a", 4, 2), ("c", 2, 3)):
        for number in range(count):
            parts.hand_off(f"{tenant}{number}", blocks=blocks, tenant=tenant)
    assert parts.scheduler.schedule().preemptions == 2
    assert {s.request.request_id for s in parts.scheduler.waiting} == {"a3", "c1"}


def test_a_sequence_that_is_computed_again_is_not_preempted_before_it_has_a_token() -> None:
    parts = Parts(9, max_batch_tokens=PAGE, prefix_caching=False)
    parts.scheduler.add(request("a", [3] * 6 * PAGE, tenant="a"))
    for _ in range(6):
        parts.step()
    (large,) = parts.choices("a")
    assert len(large.tokens) == large.num_prompt + 1
    parts.scheduler.preempt(large, StepDecision())
    small = parts.hand_off("b", tokens=3, blocks=2, tenant="b")
    parts.step()
    assert large.state is S.RUNNING and large.missing > 1
    small.tokens += [13] * (2 * PAGE + 1 - len(small.tokens))
    small.num_computed = 2 * PAGE
    parts.step()
    assert (large.state, small.state) == (S.RUNNING, S.WAITING), "though its tenant holds less"
    while len(large.tokens) == large.num_prompt + 1:
        parts.step()
        assert large.state is S.RUNNING
