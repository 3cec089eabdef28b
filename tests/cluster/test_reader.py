"""What a router reads of workers of other versions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from cluster.membership.reader import decode
from cluster.membership.registration import encode
from cluster.membership.types import WorkerInfo

INFO = WorkerInfo("w", 7, 3, "prefill", "m", "127.0.0.1:1", "", b"x", "", "host", 4096, 10_000)


def answer(*registrations: dict[str, Any]) -> list[Any]:
    out: list[Any] = [b"1000", b"4"]
    for facts in registrations:
        out += [facts.get("worker_id", "?").encode(), json.dumps(facts).encode(), b"900", b"{}", b""]
    return out


def facts(worker_id: str, **changed: Any) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(encode(replace(INFO, worker_id=worker_id)))
    return {**written, **changed}


def test_what_a_later_version_says_beside_is_left_out():
    later = facts("later", colour="red")
    later["location"] = {**later["location"], "planet": "earth"}
    assert [worker.worker_id for worker in decode(answer(later))] == ["later"]


def test_one_that_is_not_understood_does_not_take_the_others_along():
    broken = facts("broken")
    del broken["layout"]
    workers = decode(answer(facts("a"), broken, facts("b", epoch="no number"), facts("c")))
    assert [worker.worker_id for worker in workers] == ["a", "c"]
