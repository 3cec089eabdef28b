"""The order of eviction: class, then what a tenant holds for its weight, then age."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.scheduler.growth import choose_victim
from engine.scheduler.sequence import Sequence
from tests.engine.fake_model import PAGE, FakeRunner

_ones = st.lists(
    st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=12
)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def sequence(arrival: int, priority: int, tenant: str, blocks: int) -> Sequence:
    request = EngineRequest(
        str(arrival), [1], SamplingParams(), priority=priority, tenant=tenant, weight=WEIGHTS[tenant]
    )
    return Sequence(request, 0, [1], arrival, blocks=list(range(blocks)))


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
