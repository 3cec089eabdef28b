"""Promises of the policy under any sequence of observations."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.autoscaler.budget import Claim, share_out
from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import Reason
from baton.autoscaler.pool_target import PoolTarget
from baton.autoscaler.prefill_demand import replicas_for, wait_beyond
from cluster.config.worker import ROLES
from tests.baton.autoscaler.configs import make_config
from tests.baton.autoscaler.fluid import FluidCluster

FEW = settings(max_examples=12, deadline=None)
HOUR = 3600.0


@st.composite
def configs(draw: st.DrawFn) -> AutoscalingConfig:
    pools = {}
    for role in ROLES:
        least = draw(st.integers(1, 4))
        pools[role] = PoolLimits(
            min_replicas=least,
            max_replicas=draw(st.integers(least, 20)),
            gpus_per_replica=draw(st.integers(1, 4)),
            startup_seconds=draw(st.floats(1, 200)),
        )
    floor = sum(pool.min_replicas * pool.gpus_per_replica for pool in pools.values())
    return make_config(**pools, gpu_budget=floor + draw(st.integers(0, 30)))


@FEW
@given(config=configs(), loads=st.lists(st.floats(0, 30), min_size=1, max_size=5))
def test_budget_and_limits_hold_under_any_load(config: AutoscalingConfig, loads: list[float]) -> None:
    cluster = FluidCluster(config)
    for load in loads:
        cluster.run(900.0, load)
    for decision in cluster.history:
        assert decision.gpus_asked <= config.gpu_budget
        for pool in decision.pools:
            limits = config.pool(pool.role)
            assert limits.min_replicas <= pool.target <= limits.max_replicas


@settings(max_examples=5, deadline=None)  # six hours each
@given(load=st.floats(0.2, 15))
def test_a_steady_load_is_served_and_nothing_swings(load: float) -> None:
    cluster = FluidCluster(make_config())
    cluster.run(4 * HOUR, load)
    settled = cluster.now
    cluster.run(2 * HOUR, load)
    for role in ROLES:
        assert len(set(cluster.targets_since(settled, role))) == 1
    assert cluster.targets["prefill"] >= load  # a replica computes one request a second
    assert cluster.queue_tokens == 0


@FEW
@given(low=st.floats(0.5, 8), more=st.floats(1.0, 2.0))
def test_more_load_never_gets_less_than_less_needs(low: float, more: float) -> None:
    """Not than less load has: a backlog at the start may have got it a replica that hysteresis keeps."""
    quiet, busy = FluidCluster(make_config()), FluidCluster(make_config())
    quiet.run(HOUR, low)
    busy.run(HOUR, low * more)
    for role in ROLES:
        assert busy.targets[role] >= quiet.history[-1].pool(role).needed


@FEW
@given(load=st.floats(4, 12), room=st.integers(1, 3))
def test_replicas_that_never_come_do_not_block_the_other_pool(load: float, room: int) -> None:
    """The budget could go into prefill replicas that fit nowhere; decode never waits longer for what it needs than
    such replicas may take to come."""
    config = make_config(gpu_budget=16, itl_objective_seconds=0.02)
    stuck = FluidCluster(config, room={"prefill": room})
    stuck.run(HOUR, load)
    short = longest = 0
    for decision in stuck.history:
        short = short + 1 if decision.decode.needed > decision.decode.target else 0
        longest = max(longest, short)
    assert stuck.targets["decode"] >= stuck.history[-1].decode.needed
    assert longest * config.interval_seconds <= config.prefill.startup_seconds + 4 * config.interval_seconds
    assert any(d.prefill.reason is Reason.UNSCHEDULABLE and d.prefill.changed for d in stuck.history)
    asked = sum(d.prefill.target > d.prefill.before for d in stuck.history)
    assert asked <= 12, "given back, and asked for again ever more rarely"


claims = st.builds(
    lambda role, want, before, gpus, needed, late: Claim(
        role,
        PoolTarget(want, Reason.PREFILL_LOAD),
        before,
        before - min(late, before),
        0,
        1,
        needed,
        late,
        gpus,
    ),
    st.sampled_from(ROLES),
    st.integers(1, 20),
    st.integers(1, 10),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(0, 3),
)


@given(all_claims=st.lists(claims, min_size=2, max_size=6), spare=st.integers(0, 20), may_move=st.booleans())
def test_shares_stay_within_the_budget_and_reach_what_is_wanted_where_there_is_room(
    all_claims: list[Claim], spare: int, may_move: bool
) -> None:
    """Of one model's two pools, and of several models'."""
    budget = sum(one.gpus_held(one.before) for one in all_claims) + spare
    shares = share_out(budget, all_claims, may_move)
    held = sum(one.gpus_held(share.target) for one, share in zip(all_claims, shares, strict=True))
    assert held <= budget
    for claim, share in zip(all_claims, shares, strict=True):
        assert share.target <= max(claim.before, claim.want.target)
        assert share.target >= min(claim.before, claim.want.target, claim.least)
    if sum(one.gpus_held(one.want.target) for one in all_claims) <= budget:
        assert [share.target for share in shares] == [one.want.target for one in all_claims]


def test_the_model_furthest_from_its_need_gets_the_next_replica_and_may_get_one_of_anothers() -> None:
    def claim(before: int, needed: int) -> Claim:
        return Claim("decode", PoolTarget(needed, Reason.DECODE_LOAD), before, before, 0, 1, needed, 0, 1)

    quiet, busy, busiest = claim(3, 3), claim(2, 4), claim(2, 8)
    assert [one.target for one in share_out(9, [quiet, busy, busiest], False)] == [3, 2, 4]
    idle = replace(quiet, needed=1, want=PoolTarget(3, Reason.STEADY))
    assert [one.target for one in share_out(7, [idle, busy, busiest], True)] == [2, 2, 2]


def test_replicas_move_only_if_the_other_pool_gets_one_by_it() -> None:
    """A pool of replicas with one GPU gave up all but its need to one whose replicas have 8, which got none."""

    def small(before: int, draining: int = 0) -> Claim:
        steady = PoolTarget(before, Reason.STEADY)
        return Claim("decode", steady, before, before + draining, draining, 1, 4, 0, 1)

    large = Claim("decode", PoolTarget(2, Reason.DECODE_LOAD), 1, 1, 0, 1, 2, 0, 8)
    assert [one.target for one in share_out(16, [small(8), large], True)] == [8, 1], "it can spare 4"
    late = replace(small(8), late=3, ready=5)
    assert [one.target for one in share_out(16, [late, large], False)] == [8, 1], "3 overdue ones are too few"
    moved = share_out(20, [small(12), large], True)
    assert [(one.target, one.reason) for one in moved] == [(4, Reason.BUDGET), (1, Reason.BUDGET)]
    # While they drain they are kept for it, and no more is taken.
    for draining in (8, 3):
        going = replace(small(4), draining=draining, want=PoolTarget(6, Reason.DECODE_LOAD))
        other = Claim("decode", PoolTarget(3, Reason.DECODE_LOAD), 2, 2, 0, 1, 2, 0, 1)
        assert [one.target for one in share_out(22, [going, large, other], True)] == [4, 1, 2]
    assert [one.target for one in share_out(20, [small(4), large], True)] == [4, 2]


def test_another_short_pool_gets_a_replica_where_the_neediest_can_get_none() -> None:
    idle = Claim("decode", PoolTarget(5, Reason.STEADY), 5, 5, 0, 1, 2, 0, 1)
    large = Claim("decode", PoolTarget(2, Reason.DECODE_LOAD), 1, 1, 0, 1, 4, 0, 8)
    busy = Claim("prefill", PoolTarget(4, Reason.PREFILL_LOAD), 3, 3, 0, 1, 4, 0, 1)
    assert [one.target for one in share_out(16, [idle, large, busy], True)] == [4, 1, 3]


@given(all_claims=st.lists(claims, min_size=2, max_size=6), spare=st.integers(0, 20))
def test_what_moves_suffices_for_a_replica_of_a_short_pool(all_claims: list[Claim], spare: int) -> None:
    budget = sum(one.gpus_held(one.before) for one in all_claims) + spare
    before, moved = (share_out(budget, all_claims, may_move) for may_move in (False, True))
    if [one.target for one in before] != [one.target for one in moved]:
        free = budget - sum(one.gpus * share.target for one, share in zip(all_claims, moved, strict=True))
        short = [
            one.gpus
            for one, share in zip(all_claims, moved, strict=True)
            if share.target < one.want.target and share.target >= one.before
        ]
        assert short and free >= min(short)


@given(offered=st.floats(0, 40), service=st.floats(0.05, 5), wait=st.floats(0.05, 20))
def test_enough_is_enough_and_one_less_is_not(offered: float, service: float, wait: float) -> None:
    n = replicas_for(offered, service, wait, 0.01)
    assert wait_beyond(n, offered, service, wait) <= 0.01
    assert n == 0 or wait_beyond(n - 1, offered, service, wait) > 0.01 or n == 1
