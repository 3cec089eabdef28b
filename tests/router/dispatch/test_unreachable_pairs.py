"""Two workers that do not reach each other get no request together, as long as there is another way."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.worker import Role
from cluster.errors import BlocksExhaustedError, PeerLostError, TransportError
from cluster.membership.types import WorkerInfo
from router.dispatch.unreachable_pairs import UnreachablePairs
from router.link.backoff import FIRST_SECONDS
from router.placement.types import Placed


def worker(role: Role, index: int) -> WorkerInfo:
    return WorkerInfo(f"{role}-{index}", 1, 0, role, "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


PS, DS = ([worker(role, index) for index in range(4)] for role in ("prefill", "decode"))
LOST = PeerLostError("nothing heard")


def placed(prefill: WorkerInfo | None, decode: WorkerInfo) -> Placed:
    return Placed(prefill, decode, 0, 0, True)


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def pairs(clock):
    return UnreachablePairs(lambda: clock.now, random.Random(1))


def test_one_of_two_is_left_out_and_either_goes_on_with_others(pairs):
    pairs.failed(placed(PS[0], DS[0]), LOST)
    assert {pairs.left_out(PS[:2], DS[:2]) for _ in range(40)} == {
        frozenset({PS[0].name}),
        frozenset({DS[0].name}),
    }


def test_an_absent_worker_is_not_excluded(pairs):
    """Other KV groups, and what the request leaves out by itself."""
    pairs.failed(placed(PS[0], DS[0]), LOST)
    assert not pairs.left_out(PS[:2], DS[1:])
    assert not pairs.left_out(PS[1:], DS)


def test_a_worker_that_reaches_no_other_is_excluded_alone(pairs):
    for decode in DS:
        pairs.failed(placed(PS[0], decode), LOST)
    assert pairs.left_out(PS, DS) == {PS[0].name}


def test_the_last_decode_worker_stays(pairs):
    pairs.failed(placed(PS[0], DS[0]), LOST)
    assert pairs.left_out(PS[:2], DS[:1]) == {PS[0].name}
    assert pairs.left_out(PS[:1], DS[:1]) == {PS[0].name}, "it may prefill by itself"


def test_the_last_prefill_worker_stays_while_it_reaches_a_decode_worker(pairs):
    pairs.failed(placed(PS[0], DS[0]), LOST)
    assert pairs.left_out(PS[:1], DS[:2]) == {DS[0].name}
    pairs.failed(placed(PS[0], DS[1]), LOST)
    assert pairs.left_out(PS[:1], DS[:2]) == {PS[0].name}


def test_they_are_tried_again_after_a_while_and_used_once_they_have_met(pairs, clock):
    pair = placed(PS[0], DS[0])
    pairs.failed(pair, LOST)
    clock.now += FIRST_SECONDS
    assert not pairs.any_unreachable
    pairs.failed(pair, LOST)
    clock.now += FIRST_SECONDS
    assert pairs.any_unreachable, "twice as long"
    pairs.reached(pair)
    assert not pairs.any_unreachable


@pytest.mark.parametrize("reason", [LOST, TransportError("NIXL does not reach d", field="require_transport")])
def test_both_ways_of_not_reaching_count(pairs, reason):
    pairs.failed(placed(PS[0], DS[0]), reason)
    assert pairs.any_unreachable


def test_nothing_else_counts(pairs):
    pairs.failed(placed(PS[0], DS[0]), BlocksExhaustedError("full"))
    pairs.failed(placed(None, DS[0]), LOST)
    assert not pairs.any_unreachable


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.integers(0, 99))
def test_with_any_unreachable_pairs_the_rest_reach_each_other_and_a_decode_worker(apart, seed):
    pairs = UnreachablePairs(rng=random.Random(seed))
    for p, d in sorted(apart):
        pairs.failed(placed(PS[p], DS[d]), LOST)
    out = pairs.left_out(PS, DS)
    assert any(one.name not in out for one in DS)
    assert not [(p, d) for p, d in apart if PS[p].name not in out and DS[d].name not in out]
