"""Random load of several tenants and kinds of work on a small scheduler: every sequence that could run gets on within a
bounded number of steps, no tenant stays below its share of blocks, and the accounts return to zero."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import aging as aging_module
from tests.engine.scheduler.starvation_world import World


@pytest.mark.parametrize("flood", ["", "hand-offs", "prompts"])
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_no_sequence_waits_for_ever_and_no_tenant_stays_below_its_share(flood: str, seed: int) -> None:
    World(seed, flood).run()


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_no_hand_off_waits_for_ever_beside_others_of_its_size_and_prompts(seed: int) -> None:
    World(seed, "prompts", one_size=True).run()


@pytest.mark.parametrize("budget", [1, *(pytest.param(more, marks=pytest.mark.long) for more in (2, 3))])
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32))
def test_no_sequence_waits_for_ever_with_the_smallest_budgets(budget: int, seed: int) -> None:
    World(seed, "hand-offs", max_batch_tokens=budget).run()


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32))
def test_the_accounts_hold_with_several_classes(seed: int) -> None:
    aging = aging_module.AGING_SECONDS
    aging_module.AGING_SECONDS = 0.0
    try:
        World(seed, ranks=(-1, 0, 0, 1)).run()
    finally:
        aging_module.AGING_SECONDS = aging


def test_the_load_is_such_that_blocks_are_short() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(4):
        world = World(seed, max_batch_tokens=8)
        world.run()
        kinds += world.kinds
    assert min(kinds[one] for one in ("preempted", "returned", "evicted", "reserved")) > 10, kinds
