"""What a router tells Redis of its charges where calls are lost, its run ends, or nothing changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis

from cluster.config.router import RouterConfig
from router.placement import settlement
from router.placement.charges import MAX_CHANGES, Charges
from router.placement.keys import PlacementKeys
from router.placement.script_call import RedisBackoff
from router.placement.settlement import RETRY_SECONDS, SETTLE_SECONDS, Settlement
from router.placement.types import PlacementRequest
from tests.harness.fake_redis import FakeRedis
from tests.harness.waiting import until
from tests.router.placement.fleets import request
from tests.router.placement.scripts import INFO


@pytest.fixture
async def settling(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settlement]:
    """It has a run, also on a busy machine."""
    monkeypatch.setattr(settlement, "SCRIPT_SECONDS", 30.0)
    config = RouterConfig(model=Path("/m"), redis_url=redis_url, namespace=namespace)
    made = Settlement(config, PlacementKeys(namespace, config.router_id), Charges())
    await made.settle()
    yield made
    await made._script.close()


def placed(settling: Settlement, name: bytes) -> None:
    """By the router itself."""
    settling._charges.add(PlacementRequest(name, b"", 100, 10), INFO, INFO, 100, in_redis=False)


def table(settling: Settlement, client: redis.Redis) -> set[bytes]:
    kept: Any = client.hkeys(settling._keys.charges(settling.run))
    return set(kept)


async def test_a_request_whose_call_was_lost_is_charged_where_the_router_placed_it(settling, redis_url):
    """Redis may have charged it too, or may yet: that charge is replaced, or void."""
    settling.end_placement(settling.begin_placement(b"one"), answered=False)
    placed(settling, b"one")
    settling.end_placement(settling.begin_placement(b"given up"), answered=False)
    with redis.Redis.from_url(redis_url) as client:
        client.hset(settling._keys.charges(settling.run), b"given up", b"x")
        await settling.settle()
        assert table(settling, client) == {b"one"}


async def test_what_has_ended_is_no_load_while_redis_just_answers_placements_in_time(
    make, redis_url, namespace, monkeypatch
):
    """A settlement was given up earlier than a placement: Redis was told the same 128 changes again and again, and all
    later requests stayed load, until requests were refused as too late at idle workers."""
    placement = await make(2)
    for module in ("place_script", "settlement"):
        monkeypatch.setattr(f"router.placement.{module}.SCRIPT_SECONDS", 0.1)

    def late(script: Any) -> Any:
        async def call(keys: Any, arguments: Any, seconds: float) -> Any:
            answer = await script(keys, arguments, 30.0)
            if seconds < 0.19:  # it would have come then
                raise TimeoutError
            return answer

        return call

    settling, script = placement.settlement, placement.script
    with (
        mock.patch.object(settling, "_script", late(settling._script)),
        mock.patch.object(script, "_script", late(script._script)),
    ):
        for _ in range(2 * MAX_CHANGES):
            one = request()
            assert (await placement.place(one)).from_redis
            placement.release(one.transfer_id)
        for _ in range(5):
            await settling.settle()
    with redis.Redis.from_url(redis_url) as client:
        load: Any = client.hgetall(f"{{{namespace}}}:load")
    assert not {name: tokens for name, tokens in load.items() if name}


def test_a_charge_that_is_made_again_is_released_no_more():
    charges = Charges()
    charges.withdraw(b"one")
    charges.add(PlacementRequest(b"one", b"", 100, 10), INFO, INFO, 100, in_redis=False)
    changes = charges.changes()
    assert set(changes.added) == {b"one"} and not changes.released


async def test_a_charge_of_a_run_that_has_ended_meanwhile_is_added_to_the_next(make):
    """The walk would find it only later."""
    placement = await make(2)
    script, one = placement.script._script, request()

    async def slow(*arguments: Any) -> Any:
        answer = await script(*arguments)
        placement.settlement._calls.restart(0)
        await placement.settlement.settle()
        return answer

    with mock.patch.object(placement.script, "_script", slow):
        assert (await placement.place(one)).from_redis
    assert set(placement.charges.changes().added) == {one.transfer_id}


@pytest.mark.parametrize("charged", [False, True])
async def test_a_router_without_changes_keeps_its_lease(settling, redis_url, namespace, monkeypatch, charged):
    """Others would drop its table."""
    monkeypatch.setattr(settlement, "ROUTER_LEASE_SECONDS", 1.0)
    await settling.start()
    if charged:
        placed(settling, b"one")
    member = f"{settling._router_id}:{settling.run}"
    with redis.Redis.from_url(redis_url) as client:
        for _ in range(3):
            ends = client.zscore(f"{{{namespace}}}:routers", member)
            await until(
                lambda before=ends: client.zscore(f"{{{namespace}}}:routers", member) > before,
                "it is renewed",
            )
    await settling.close()


async def test_a_redis_that_refuses_is_called_again_after_a_pause(namespace):
    """One that loads its data would get a new connection of each router every 50 ms."""
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    fake = FakeRedis(lambda command: loading if command[0] == "EVALSHA" else b"+OK\r\n")
    config = RouterConfig(
        model=Path("/m"), redis_url=f"redis://{fake.address}?protocol=2", namespace=namespace
    )
    made, now = Settlement(config, PlacementKeys(namespace, config.router_id), Charges()), 1.0
    made._backoff = RedisBackoff(RETRY_SECONDS, clock=lambda: now)
    await made.start()
    assert made.errors == 1
    await asyncio.sleep(4 * SETTLE_SECONDS)
    assert made.errors == 1, "it waits"
    now += RETRY_SECONDS
    await until(lambda: made.errors == 2, "it calls again")
    await made.close()
    fake.close()
