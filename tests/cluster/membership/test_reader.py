"""Registry entries of workers of other versions, as a router reads them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from cluster.membership import keys
from cluster.membership.reader import Members, decode
from cluster.membership.registry import encode
from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo
from cluster.redis.connect import connect
from router.placement.candidates import Candidates

INFO = WorkerInfo("w", 7, 3, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


def answer(*registrations: dict[str, Any]) -> list[Any]:
    out: list[Any] = [b"1000", b"4"]
    for facts in registrations:
        out += [
            facts.get("worker_id", "?").encode(errors="replace"),
            json.dumps(facts).encode(),
            b"900",
            b"{}",
            b"",
        ]
    return out


def facts(worker_id: str, **changed: Any) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(encode(replace(INFO, worker_id=worker_id)))
    return {**written, **changed}


def test_extra_fields_of_a_later_version_are_left_out():
    later = facts("later", colour="red")
    later["location"] = {**later["location"], "planet": "earth"}
    assert [worker.worker_id for worker in decode(answer(later))] == ["later"]


def test_adapters_are_read_and_checked():
    digest = "0123456789abcdef" * 2
    pairs = (("team/a", digest), ("b", digest))
    written = json.loads(encode(replace(INFO, adapters=pairs)))
    (worker,) = decode(answer(written))
    assert worker.adapters == pairs
    assert digest in dict(worker.adapters).values()
    before = facts("before")
    del before["adapters"]
    assert decode(answer(before))[0].adapters == ()
    for wrong in ([["a", "short"]], [["a b", digest]], [["a", digest]] * 300, [["a"]], 5, [[1, 2]]):
        assert decode(answer(facts("wrong", adapters=wrong))) == []


def test_one_that_is_not_understood_does_not_take_the_others_along():
    broken = facts("broken")
    del broken["layout"]
    workers = decode(answer(facts("a"), broken, facts("b", epoch="no number"), facts("c")))
    assert [worker.worker_id for worker in workers] == ["a", "c"]


NONSENSE: list[dict[str, Any]] = [
    {"blocks_total": "many"},
    {"blocks_total": -1},
    {"blocks_total": True},
    {"page_size": 0},
    {"page_size": 16.0},
    {"slot": -1},
    {"slot": 2**32},
    {"epoch": "1" * 17},
    {"epoch": "-1"},
    {"role": "both"},
    {"address": 7},
    {"worker_id": "\ud800"},
    {"worker_id": ""},
    {"worker_id": "w\0x"},
    {"worker_id": "w\nx"},
    {"worker_id": "w" * 1025},
    {"place": ["here"]},
    {"location": {"rack": 7}},
    {"model_id": None},
    {"layout": "ff"},
]


@pytest.mark.parametrize("wrong", NONSENSE, ids=lambda wrong: "=".join(map(repr, *wrong.items())))
def test_a_file_with_invalid_values_does_not_affect_the_others(wrong):
    """They are packed together for every placement."""
    workers = decode(answer(facts("a"), facts("broken") | wrong, facts("c")))
    assert [worker.worker_id for worker in workers] == ["a", "c"]
    assert Candidates(workers, workers).arguments


@pytest.mark.parametrize("renewed", [b"x", b"inf", math.inf, -math.inf, math.nan])
def test_a_lease_that_is_none_does_not_affect_the_others(renewed):
    told = answer(facts("a"), facts("broken"), facts("c"))
    told[2 + 5 + 2] = renewed
    assert [worker.worker_id for worker in decode(told)] == ["a", "c"]


@pytest.mark.parametrize(
    "status", [b"[]", b"7", b"null", b'"x"', b"{", b'{"running": "many"}', b'{"steps": NaN}', b"[" * 100_000]
)
def test_a_status_that_is_none_counts_as_empty(status):
    told = answer(facts("a"), facts("broken"), facts("c"))
    told[2 + 5 + 3] = status
    read = decode(told)
    assert [worker.worker_id for worker in read] == ["a", "broken", "c"]
    assert read[1].status == WorkerStatus()


def test_a_registration_that_is_nested_too_deeply_does_not_affect_the_others():
    told = answer(facts("a"), facts("broken"), facts("c"))
    told[2 + 5 + 1] = b"[" * 100_000
    assert [worker.worker_id for worker in decode(told)] == ["a", "c"]


async def test_foreign_data_in_redis_does_not_stop_reading(redis_url, namespace):
    """A foreign value in the place of the last slot."""
    members = Members(redis_url, namespace)
    with connect(redis_url) as client:
        client.set(keys.slots(namespace), "foreign")
        for name, registration in {"w": encode(INFO), "stray": "no worker"}.items():
            client.hset(keys.members(namespace), name, registration)
            client.zadd(keys.leases(namespace), {name: 2.0**52})
    await members.refresh()
    await members.refresh()
    assert members.redis_ok
    assert [worker.worker_id for worker in members.all] == ["w"]
    await members.close()
