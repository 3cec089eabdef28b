"""Prompts of which each position is computed, and attempts that end at their prefill worker: what is cached somewhere, and
what is expected there afterwards."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.membership.types import WorkerInfo
from router.placement.calibration import Calibration, Calibrations
from router.placement.candidates import Candidates
from router.placement.charges import Charges
from router.placement.place_script import Decision
from router.placement.prefix_index import PrefixIndex
from router.placement.standalone_placement import StandalonePlacement
from router.placement.types import Placed, PlacementRequest
from tests.router.placement.scripts import Cluster, charge
from wire import common_pb2

PAGES = 6
TOKENS = 16 * PAGES + 4
CHAIN = random.Random(1).randbytes(8 * PAGES)


@pytest.fixture
def cached(cluster: Cluster) -> tuple[str, str]:
    """Workers that are expected to have the prompt, with a little load more than the others."""
    p, d = cluster.place(TOKENS, chain=CHAIN, transfer_id=b"first")
    cluster.settle(released=[b"first"])
    for one in (p, d):
        cluster.client.hset(cluster.tag + "load", cluster.of(one), 40)
    assert cluster.place(TOKENS, chain=CHAIN, transfer_id=b"again", per_token=1e-3, token_bytes=1e9) == (p, d)
    cluster.settle(released=[b"again"])
    return p, d


def holders(cluster: Cluster) -> set[str]:
    """Workers that are expected to have any of the prompts."""
    slots = {str(one.slot).encode(): one.worker_id for one in cluster.workers}
    found: set[str] = set()
    for key in cluster.client.scan_iter(f"*{cluster.namespace}*w:*"):
        found |= {slots[field] for field in cluster.client.hkeys(key) if field in slots}
    return found


def test_a_whole_prompt_goes_where_it_is_computed_first(cluster, cached):
    """Its hand-off is as short as any other's: the decode worker's blocks count."""
    p, d = cached
    chosen = cluster.place(TOKENS, chain=CHAIN, transfer_id=b"t", token_bytes=1e9, whole=True)
    assert chosen[0] != p and chosen[1] == d
    p_name, d_name = (cluster.by_id[one].name for one in chosen)
    assert cluster.table() == {b"t": charge(p_name, d_name, TOKENS, TOKENS + 10)}, "all of it waits there"


@pytest.mark.parametrize("alone", [False, True])
def test_a_decode_worker_that_prefills_reuses_nothing_of_a_whole_prompt(cluster, cached, alone):
    _, d = cached
    for one in ("p1", "p2"):
        cluster.client.hset(cluster.tag + "load", cluster.of(one), 10_000)
    more: Any = {"per_token": 1e-6, "mode": "always", "alone": alone}
    assert cluster.place(TOKENS, chain=CHAIN, transfer_id=b"t", **more) == ("", d)
    cluster.settle(released=[b"t"])
    chosen = cluster.place(TOKENS, chain=CHAIN, transfer_id=b"u", whole=True, **more)
    assert chosen[0] == "" and chosen[1] != d
    name = cluster.by_id[chosen[1]].name
    assert cluster.table() == {b"u": charge(name, name, TOKENS, TOKENS + 10)}, "it lives there too"


def test_an_attempt_that_ends_at_its_prefill_worker_leaves_nothing_at_a_decode_worker(cluster):
    """Neither load nor expected blocks, and no decode worker's load or lack of room makes it dearer."""
    for one in ("d1", "d2"):
        cluster.client.hset(cluster.tag + "load", cluster.of(one), 15_990)
    before = cluster.load()
    p, d = cluster.place(TOKENS, chain=CHAIN, transfer_id=b"t", alone=True, token_bytes=1e12, per_token=1.0)
    assert cluster.load() == {**before, cluster.of(p): TOKENS}
    assert cluster.table() == {b"t": charge(cluster.by_id[p].name, cluster.by_id[d].name, TOKENS, 0)}
    assert holders(cluster) == {p}
    answer: Any = cluster.client.hget(cluster.tag + "answers:router", "1")
    terms = Decision.unpack(answer).terms
    assert (terms["handoff"], terms["decode_penalty"]) == (0, 0)
    assert terms["cost"] == terms["first_token"] == pytest.approx(TOKENS * 1e-3)


def worker(role: Any, number: int) -> WorkerInfo:
    return WorkerInfo(f"{role}-{number}", 1, number, role, "m", "h:1", "", b"", "", "h", 4096, 1000)


def request(**more: Any) -> PlacementRequest:
    return PlacementRequest(b"t" * 16, CHAIN, TOKENS, 10, **more)


@pytest.mark.parametrize(
    ("prefills", "more", "chosen"),
    [
        (2, {}, ({0}, {0})),
        (2, {"whole_prompt": True}, ({0, 1}, {0})),
        (2, {"whole_prompt": True, "ends_at_prefill": True}, ({0, 1}, {0, 1})),
        (0, {}, (set(), {0})),
        (0, {"whole_prompt": True}, (set(), {0, 1})),
    ],
)
def test_a_router_without_redis_prefers_no_holder_that_computes_all(prefills, more, chosen):
    last: Any = SimpleNamespace(valid=False)
    found: tuple[set[int], set[int]] = (set(), set())
    for role in range(2):  # it remembers one worker for each block
        placement = StandalonePlacement(Calibrations(), Charges(), last, random.Random(1))
        placement.remember(CHAIN, ("prefill-0", "decode-0")[role])
        candidates = Candidates(
            [worker("prefill", number) for number in range(prefills)],
            [worker("decode", number) for number in range(2)],
        )
        for _ in range(20):
            placed = placement.place(request(**more), candidates)
            one = (placed.prefill, placed.decode)[role]
            if one is not None:
                found[role].add(one.slot)
    assert found == chosen


@pytest.mark.parametrize(("more", "slots"), [({}, ["2", "1"]), ({"ends_at_prefill": True}, ["1"])])
async def test_an_index_of_its_own_expects_blocks_where_they_will_be(more, slots):
    config = RouterConfig(model="/m", redis_url="redis://h:1", index_url="redis://h:2")
    index = PrefixIndex(config, random.Random(1))
    sent: list[Any] = []

    def send(keys: Any, arguments: Any, *_: Any) -> bool:
        sent.append(arguments)
        return True

    index._record = SimpleNamespace(send=send)  # type: ignore[assignment]
    index.record(request(**more), Placed(worker("prefill", 1), worker("decode", 2), 0, 0, True))
    assert sent[0][5:] == slots
    index.record(request(**more), Placed(None, worker("decode", 2), 0, 0, True))
    assert sent[1][5:] == ["2"]
    await index.close()


def test_a_charge_without_redis_is_the_scripts():
    charges = Charges()
    p, d = worker("prefill", 1), worker("decode", 2)
    for at, tokens in ((p, 0), (d, TOKENS + 10)):
        charges.add(request(ends_at_prefill=True), at, d, TOKENS, in_redis=False)
        assert charges.changes().added == {b"t" * 16: charge(at.name, d.name, TOKENS, tokens)}
    charges.release(b"t" * 16)
    assert not charges.by_worker


def test_scored_prompts_do_not_teach_how_long_others_take():
    """Their steps make logits of each position."""
    report = common_pb2.WorkReport(
        computed_prompt_tokens=100, prompt_compute_seconds=9.0, kv_bytes_shipped=5000, not_shipped_tokens=50
    )
    calibration, start = Calibration(), Calibration().a
    calibration.learn(report, 100, 0, scored=True)
    assert (calibration.observed, calibration.a, calibration.token_bytes) == (0, start, 100.0)
    calibration.learn(report, 100, 0)
    assert calibration.observed == 1 and calibration.a > start
