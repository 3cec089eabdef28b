"""Placements while Redis is away: one call tries it after a pause, the others cost little; begin and end are logged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.errors import UnavailableError
from router.placement import eligibility, place_script
from router.placement.eligibility import MAX_CANDIDATES_KEPT
from router.placement.script_call import RedisBackoff
from tests.harness.waiting import until
from tests.router.placement.fleets import request


async def test_after_a_pause_one_call_tries_redis(make, monkeypatch):
    placement, asked = await make(2), []
    way, ready = placement.script._script, asyncio.Event()
    now = [100.0]
    placement.script._backoff = RedisBackoff(1.0, clock=lambda: now[0])

    async def slow(*arguments: Any) -> Any:
        asked.append(arguments)
        await ready.wait()
        if len(asked) == 1:
            raise TimeoutError("not back yet")
        return await way(*arguments)

    monkeypatch.setattr(placement.script, "_script", slow)
    placement.script._backoff.failed()
    assert not (await placement.place(request())).from_redis and not asked, "it rests"
    for attempts in (1, 2):
        now[0] += 1.0
        ready.clear()
        waiting = [asyncio.create_task(placement.place(request())) for _ in range(50)]
        await until(lambda w=waiting: sum(task.done() for task in w) == 49, "the others go on", 10.0)
        assert len(asked) == attempts, "one tries, the others go on without"
        ready.set()
        placed = await asyncio.gather(*waiting)
        assert sum(one.from_redis for one in placed) == attempts - 1
    placed = await asyncio.gather(*(placement.place(request()) for _ in range(5)))
    assert all(one.from_redis for one in placed)
    monkeypatch.undo()


async def test_without_redis_a_placement_does_not_look_at_the_whole_fleet(make, monkeypatch):
    """Nor at all charges: the event loop would stand still for milliseconds."""
    placement = await make(20)
    packed: list[Any] = []
    built: list[Any] = []
    monkeypatch.setattr(placement.script, "may_ask", lambda: False)
    monkeypatch.setattr("cluster.membership.facts.pack", packed.append)
    usable = eligibility.Eligibility.usable

    def counted(self: Any, *arguments: Any) -> Any:
        built.append(arguments)
        return usable(self, *arguments)

    monkeypatch.setattr(eligibility.Eligibility, "usable", counted)
    requests = [request() for _ in range(10)] + [request("decode-1") for _ in range(10)]
    for one in requests:
        placed = await placement.place(one)
        assert not placed.from_redis and (not one.excluded or placed.decode.worker_id != "decode-1")
    assert not packed and len(built) == 2 * 2, "by role and set of excluded workers"
    for number in range(100):
        await placement.place(request(f"decode-{number}"))
    assert len(placement.eligibility._kept_whole) <= MAX_CANDIDATES_KEPT


async def test_an_outage_of_redis_is_logged_at_its_begin_and_end(make, monkeypatch, caplog):
    placement, now = await make(2), [100.0]
    placement.script._backoff = RedisBackoff(1.0, clock=lambda: now[0])

    async def silent(*arguments: Any) -> Any:
        raise TimeoutError

    def logged() -> list[str]:
        return [record.message for record in caplog.records if record.name == place_script.__name__]

    with monkeypatch.context() as patch:
        patch.setattr(placement.script, "_script", silent)
        for _ in range(5):
            assert not (await placement.place(request())).from_redis
            now[0] += 1.0
    assert placement.script.errors == 5
    (began,) = logged()
    assert began.endswith("places without Redis: TimeoutError")
    for _ in range(3):
        assert (await placement.place(request())).from_redis
    assert logged()[1:] == [began.replace("without Redis: TimeoutError", "with Redis again")]


@pytest.mark.parametrize("gone", ["prefill", "decode"])
async def test_workers_that_left_while_redis_was_waited_for_are_not_placed_on(make, monkeypatch, gone):
    """It was an IndexError, or a prompt for a decode worker that must not prefill."""
    placement = await make(2)

    async def late(*_: Any) -> Any:
        placement._members.all = [one for one in placement._members.all if one.role != gone]
        raise TimeoutError

    monkeypatch.setattr(placement.script, "_script", late)
    with pytest.raises(UnavailableError, match=f"no {gone} worker"):
        await placement.place(request())
    assert len(placement.charges) == 0
    monkeypatch.undo()
