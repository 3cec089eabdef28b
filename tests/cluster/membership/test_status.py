"""A worker's status: one flat JSON object; known fields are checked strictly, unknown ones are ignored."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import orjson
import pytest

from cluster.membership.status import BOUNDS_SECONDS, WorkerStatus
from engine.request import EngineStats

COMMON = {
    *("pid", "phase", "attempts", "queued", "queued_prefill_tokens"),
    *("arrived_requests", "arrived_prompt_tokens", "first_tokens"),
    *("kv_usage_ratio", "prompt_tokens_asked", "prefix_hit_ratio"),
    *("handoffs", "handoffs_live", "handoffs_refused", "parts"),
    *(one.name for one in fields(EngineStats)),
    *(f"first_tokens_within_{bound:g}s" for bound in BOUNDS_SECONDS),
}
FULL = WorkerStatus(
    pid=7,
    phase="serving",
    running=3,
    kv_usage_ratio=0.25,
    first_tokens=20,
    first_tokens_within=tuple(range(1, len(BOUNDS_SECONDS) + 1)),
    ring_slots=64,
    transfer_rate_bytes_per_second=1e9,
    self_checks=2,
    self_check_wrong="",
    ray_head="10.0.0.7:6379",
    ray_head_silent_seconds=0.0,
)


def test_it_arrives_as_it_was_sent() -> None:
    assert WorkerStatus.decode(json.loads(json.dumps(FULL.encode()))) == FULL
    assert WorkerStatus.decode(WorkerStatus().encode()) == WorkerStatus()


def test_its_fields_are_those_of_the_wire() -> None:
    """Routers, autoscalers and people's scripts of other versions read them by these names."""
    assert set(WorkerStatus().encode()) == COMMON
    more = {"ring_slots", "transfer_rate_bytes_per_second", "self_checks", "self_check_wrong"}
    more |= {"ray_head", "ray_head_silent_seconds"}
    assert set(FULL.encode()) == COMMON | more
    assert FULL.encode()["first_tokens_within_0.75s"] == 5


def test_other_versions_report_more_or_fewer_fields() -> None:
    later = WorkerStatus.decode({"steps": 3, "temperature": {"of": "the card"}, "first_tokens_within_60s": 9})
    assert later == WorkerStatus(steps=3)
    earlier = WorkerStatus.decode({"first_tokens": 4, "first_tokens_within_0.1s": 1})
    assert earlier.first_tokens_within == (1, *[0] * (len(BOUNDS_SECONDS) - 1))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"running": "many"}, "status.running"),
        ({"output_tokens": None}, "status.output_tokens"),
        ({"blocks_free": True}, "status.blocks_free"),
        ({"phase": 3}, "status.phase"),
        ({"steps": float("nan")}, "status.steps"),
        ({"prefill_seconds": float("inf")}, "status.prefill_seconds"),
        ({"steps": 10**400}, "status.steps"),
        ({"steps": 2**63}, "status.steps"),
        ({"prefill_seconds": -1e300}, "status.prefill_seconds"),
        ({"first_tokens": 1, "first_tokens_within_5s": []}, "status.first_tokens_within_5s"),
        ([], "object"),
        ("x", "object"),
        (None, "object"),
    ],
)
def test_a_field_of_another_kind_is_named(told: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        WorkerStatus.decode(told)


def test_the_largest_numbers_can_be_shown() -> None:
    """`/v1/cluster` was an error as long as one worker reported more than 64 bits."""
    largest = WorkerStatus.decode({one.name: 2**63 - 1 for one in fields(EngineStats)})
    assert orjson.loads(orjson.dumps(largest.encode()))["steps"] == 2**63 - 1


def test_a_text_that_no_document_can_hold() -> None:
    with pytest.raises(ValueError):
        WorkerStatus.decode({"self_check_wrong": "\ud800"})


def test_each_role_shows_its_own_metrics() -> None:
    status = WorkerStatus(steps=5, handoffs=2, resends=1)
    prefill = {metric.name: value for metric, value in status.metrics("prefill")}
    decode = {metric.name: value for metric, value in status.metrics("decode")}
    assert prefill["baton_handoffs_started_total"] == decode["baton_handoffs_committed_total"] == 2
    assert prefill["baton_engine_steps_total"] == decode["baton_engine_steps_total"] == 5
    assert prefill["baton_kv_parts_resent_total"] == 1
    assert "baton_ring_slots" not in decode, "it has said nothing of a ring"
    assert not {"baton_handoffs_started_total", "baton_kv_parts_resent_total"} & decode.keys()
