"""Of a large fleet the script reads the first of each sorted set, and finds better ones behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from cluster.config.worker import Role
from cluster.membership.facts import group_id, pack
from cluster.membership.topology import Location
from cluster.membership.types import WorkerInfo
from router.placement.candidates import Heads
from router.placement.keys import PlacementKeys
from router.placement.place_script import Decision, script_source
from tests.harness.place_call import PlaceCall, decision
from tests.router.placement.regret import FILL

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 10_000)
COUNT = 41  # of each role
ROLES: tuple[Role, Role] = ("prefill", "decode")


def worker(role: Role, number: int) -> WorkerInfo:
    """Alone on its host."""
    slot = 1 + number + COUNT * ROLES.index(role)
    host = Location(host=f"{role}-{number}")
    return replace(INFO, worker_id=f"{role}-{number}", role=role, slot=slot, location=host, place=host.place)


def placed(redis_url: str, workers: list[WorkerInfo], call: PlaceCall) -> tuple[str, str]:
    """The ids of the pair that is chosen where each worker has as many tokens as its number says."""
    loads = [int(one.worker_id.split("-")[1]) for one in workers]
    parts = ((one.name, load, load, pack(one), one.slot) for one, load in zip(workers, loads, strict=True))
    heads = Heads(*(group_id("m", 16, b""), "m"), prefill=True, without_prefill=[], without_decode=[])
    keys = PlacementKeys(call.namespace, call.router).place(1)
    with redis.Redis.from_url(redis_url) as client:
        client.eval(FILL, 0, f"{{{call.namespace}}}:", *(part for one in parts for part in one))
        found = decision(client.eval(script_source(), len(keys), *keys, *call.arguments(1, 1, heads)))
    assert isinstance(found, Decision)
    return found.prefill.split("@")[0], found.decode.split("@")[0]


def test_a_pair_that_lies_together_is_found_where_the_hand_off_costs_most(redis_url, namespace):
    """Twelve of either role have less to do than those of the only host that has both."""
    both = Location(host="both")
    workers = [
        replace(one, location=both, place=both.place) if one.worker_id.endswith("-12") else one
        for one in (worker(role, number) for role in ROLES for number in range(COUNT))
    ]
    near = PlaceCall(namespace, token_bytes=1e6, bandwidths=(1e12, 1e12, 1e8, 1e8, 1e8))
    assert placed(redis_url, workers, near) == ("prefill-12", "decode-12")


@pytest.mark.parametrize("roomy", [20, 40])
def test_a_decode_worker_with_room_is_found_behind_smaller_ones_with_less_load(redis_url, namespace, roomy):
    workers = [worker(role, number) for role in ROLES for number in range(COUNT)]
    small = [replace(one, blocks_total=4) if one.role == "decode" else one for one in workers]
    small[COUNT + roomy] = workers[COUNT + roomy]
    assert placed(redis_url, small, PlaceCall(namespace))[1] == f"decode-{roomy}"
