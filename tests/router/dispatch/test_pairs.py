"""Two workers that do not reach each other get no request together, as long as there is another way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import BlocksExhaustedError, PeerLostError
from cluster.membership.types import WorkerInfo
from router.dispatch.pairs import Pairs
from router.dispatch.probation import FIRST_SECONDS, TRY_SECONDS
from router.placement.types import Placed, PlacementRequest


def worker(role: str, index: int) -> WorkerInfo:
    return WorkerInfo(f"{role}-{index}", 1, 0, role, "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


P0, P1, D0, D1 = worker("prefill", 0), worker("prefill", 1), worker("decode", 0), worker("decode", 1)
LOST = PeerLostError("nothing heard")


def placed(prefill: WorkerInfo | None, decode: WorkerInfo) -> Placed:
    return Placed(prefill, decode, 0, 0, True)


def request(*excluded: str) -> PlacementRequest:
    return PlacementRequest(b"t", b"", 1, 1, excluded=frozenset(excluded))


def members(*decode: WorkerInfo) -> Any:
    return SimpleNamespace(decode=list(decode))


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def pairs(clock):
    made = Pairs(lambda: clock.now)
    made.failed(placed(P0, D0), LOST)
    return made


def test_another_decode_worker_is_asked_for(pairs):
    other = pairs.elsewhere(placed(P0, D0), request("x"), members(D0, D1))
    assert other.excluded == {"x", D0.name}


@pytest.mark.parametrize("others", [(), (D1,)])
def test_with_the_only_decode_worker_another_prefill_worker(pairs, others):
    """The only one that is left for this request."""
    other = pairs.elsewhere(placed(P0, D0), request(D1.worker_id), members(D0, *others))
    assert other.excluded == {D1.worker_id, P0.name}


@pytest.mark.parametrize("good", [placed(P0, D1), placed(P1, D0), placed(None, D0)])
def test_each_of_them_goes_on_with_others(pairs, good):
    assert pairs.elsewhere(good, request(), members(D0, D1)) is None


def test_with_nobody_else_it_stands(pairs):
    assert pairs.elsewhere(placed(P0, D0), request(P0.name), members(D0)) is None


def test_it_is_tried_again_after_a_while_and_used_once_they_have_met(pairs, clock):
    clock.now += FIRST_SECONDS
    assert pairs.elsewhere(placed(P0, D0), request(), members(D0, D1)) is None
    pairs.failed(placed(P0, D0), LOST)
    clock.now += FIRST_SECONDS
    assert pairs.elsewhere(placed(P0, D0), request(), members(D0, D1)) is not None, "twice as long"
    clock.now += FIRST_SECONDS
    assert pairs.elsewhere(placed(P0, D0), request(), members(D0, D1)) is None
    pairs.met(placed(P0, D0))
    assert pairs.elsewhere(placed(P0, D0), request(), members(D0, D1)) is None


def test_one_request_tries_and_the_others_wait_for_how_it_ends(pairs, clock):
    clock.now += FIRST_SECONDS
    tries = [pairs.elsewhere(placed(P0, D0), request(), members(D0, D1)) is None for _ in range(5)]
    assert tries == [True, False, False, False, False]
    clock.now += TRY_SECONDS
    assert pairs.elsewhere(placed(P0, D0), request(), members(D0, D1)) is None, "its client has left it"


def test_only_who_could_not_be_reached_counts(clock):
    pairs = Pairs(lambda: clock.now)
    pairs.failed(placed(P0, D0), BlocksExhaustedError("full"))
    pairs.failed(placed(None, D0), LOST)
    assert pairs.elsewhere(placed(P0, D0), request(), members(D0, D1)) is None
