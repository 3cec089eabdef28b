"""A Redis, or a proxy before it, whose answers are well-formed and none of the scripts': requests are placed without it,
and nothing stops for good."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from cluster.membership.reader import Members
from router.placement.place_script import _ANSWER
from router.placement.settlement import Settlement
from tests.harness.waiting import until
from tests.router.placement.fleets import request

ANSWERS: list[Any] = [
    None,
    b"OK",
    7,
    [],
    [0],
    [b"x"],
    [-99],
    [-3],
    [-3, b"?"],
    [None, None, None, None],
    {},
    1.5,
]


@pytest.mark.parametrize(
    "answer", [*ANSWERS, [-3, b"inf"], [-3, b"nan"], b"\xff" * _ANSWER.size, struct.pack(">Q", 1)], ids=repr
)
async def test_a_placement_goes_on_without_redis(make, monkeypatch, answer):
    placement = await make(2)

    async def lies(*arguments: Any) -> Any:
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(placement.script, "_script", lies)
        assert not (await placement.place(request())).from_redis
    assert placement.script.errors == 1


@pytest.mark.parametrize("answer", [one for one in ANSWERS if one != 7], ids=repr)
async def test_charges_are_settled_once_redis_answers_as_it_should(make, monkeypatch, answer):
    """The task that settles had ended: what requests had charged stayed in the load for ever."""
    placement = await make(2)
    settlement: Settlement = placement.settlement
    way = settlement._script

    async def lies(*arguments: Any) -> Any:
        return answer

    placed = request()
    await placement.place(placed)
    with monkeypatch.context() as patch:
        patch.setattr(settlement, "_script", lies)
        errors = settlement.errors
        placement.release(placed.transfer_id)
        await until(lambda: settlement.errors > errors, "an answer was refused")
    assert settlement._script is way
    await until(lambda: not placement.charges.pending, "the charge is taken off")


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
async def test_a_reading_of_the_registry_keeps_the_last_membership(redis_url, namespace, monkeypatch, answer):
    members = Members(redis_url, namespace)
    await members.start()
    try:

        async def lies(*arguments: Any, **named: Any) -> Any:
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(members, "_read", lies)
            await members.refresh()
            assert not members.redis_ok
        await members.refresh()
        assert members.redis_ok
    finally:
        await members.close()


@pytest.mark.parametrize("count", [b"many", b"1.5", b"\xff"])
async def test_a_count_that_is_none_hides_only_itself(make, count):
    """`/v1/cluster` was answered with status 500."""
    placement = await make(2)
    await placement._client.set(placement._keys.calls, count)
    assert await placement.calls_in_redis() is None
