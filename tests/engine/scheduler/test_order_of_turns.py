"""The order of tenants' turns by itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.turns import Turns
from tests.engine.parts import Parts, request


def test_a_heavy_tenant_that_comes_and_goes_does_not_take_more_than_its_share() -> None:
    """It has a step's tokens, is absent, and comes back with sequences that have had none."""
    turns_ = Turns()
    heavy = [Parts(8).scheduler._new_sequence(request(f"h{n}", [3], tenant="h"), S.RUNNING) for n in range(4)]
    light = [
        Parts(8).scheduler._new_sequence(request(f"l{n}", [3], tenant=f"l{n}"), S.RUNNING) for n in range(2)
    ]
    turns_.order([*heavy, *light])
    turns_.taken(heavy)
    turns_.order(light)
    turns_.taken([light[0]])
    (turns_of_all,) = turns_.order([*heavy, *light])
    first = list(turns_of_all)[:2]
    assert {s.request.tenant for s in first} == {"l0", "l1"}


def test_one_that_joins_in_a_step_takes_no_turn_of_its_tenants_others() -> None:
    turns_, scheduler = Turns(), Parts(8).scheduler
    a0, a1, joins, *others = [
        scheduler._new_sequence(request(f"{number}", [3], tenant="aaabbb"[number]), S.RUNNING)
        for number in range(6)
    ]
    turns_.order([a0, a1, *others])
    turns_.taken([a0, joins, *others])
    assert turns_._ahead == {("b", 0): 2.0}, "one of the tenant a was left out, when it had had one"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([-1, 0, 1])),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
def test_the_order_is_that_of_shares_however_far_it_is_taken(
    tenants: list[tuple[int, float, int]], data: st.DataObject
) -> None:
    turns_, scheduler = Turns(), Parts(8).scheduler
    sequences = [
        scheduler._new_sequence(
            request(f"{tenant} {number}", [3], tenant=f"{tenant}", weight=weight, priority=priority),
            S.RUNNING,
        )
        for tenant, (count, weight, priority) in enumerate(tenants)
        for number in range(count)
    ]
    for _ in range(6):
        present = [s for s in sequences if data.draw(st.integers(0, 4))]
        (ordered,) = turns_.order(present)
        left_out = sorted(present, key=lambda s: (s.rank, s.turn))
        had: Counter[str] = Counter()
        turn: dict[Sequence, tuple[int, float]] = {}
        for s in left_out:
            had[s.request.tenant] += 1
            ahead = turns_._ahead.get((s.request.tenant, s.rank), 0.0)
            turn[s] = (s.rank, ahead + had[s.request.tenant] / s.request.weight)
        expected = sorted(left_out, key=lambda s: turn[s])
        count = data.draw(st.integers(0, len(present)))
        taken = [next(ordered) for _ in range(count)]
        assert taken == expected[:count]
        turns_.taken(taken)
