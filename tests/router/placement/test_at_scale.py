"""The cost of a request for router and Redis with many workers or many concurrent requests, counted in operations."""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.membership import keys
from cluster.membership.types import WorkerInfo
from cluster.redis.connect import connect
from router.placement import eligibility, place_script
from router.placement.candidates import Candidates
from router.placement.eligibility import MAX_CANDIDATES_KEPT
from router.placement.placement import Placement
from router.placement.script_call import RedisBackoff
from router.placement.types import PlacementRequest, Reason
from tests.harness.waiting import until

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 10_000)


def fleet(pairs: int) -> Any:
    """A router's membership view without a registry."""
    names = [(role, n) for role in ("prefill", "decode") for n in range(pairs)]
    workers = [
        replace(INFO, worker_id=f"{role}-{n}", slot=slot, role=role, host=f"h{n}")  # type: ignore[arg-type]
        for slot, (role, n) in enumerate(names, 1)
    ]
    return SimpleNamespace(all=workers)


def request(*excluded: str) -> PlacementRequest:
    return PlacementRequest(secrets.token_bytes(16), b"", 100, 10, dict.fromkeys(excluded, Reason.SILENT))


@pytest.fixture
async def make(redis_url, namespace):
    made = []

    async def one(pairs: int) -> Placement:
        config = RouterConfig(model="/m", redis_url=redis_url, namespace=namespace, local_prefill="never")
        members = fleet(pairs)
        client = connect(redis_url)
        owners = {str(worker.slot): worker.name for worker in members.all}
        for slot, name in owners.items():
            client.hset(keys.slot_owners(namespace), slot, name)
        client.close()
        placement = Placement(config, members, random.Random(1))
        made.append(placement)
        await placement.start()
        return placement

    yield one
    for placement in made:
        await placement.close()


async def test_a_suspect_does_not_make_every_request_rebuild_the_candidates(make, monkeypatch):
    placement, built = await make(4), []
    build = Candidates

    def counted(*arguments: Any) -> Any:
        built.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(eligibility, "Candidates", counted)
    suspect = f"prefill-0@{1:016x}"
    for _ in range(20):
        placed = await placement.place(request(suspect))
        assert placed.prefill is not None and placed.prefill.worker_id != "prefill-0"
    assert len(built) == 1
    for number in range(100):  # failed requests, each with another exclusion
        await placement.place(request(f"decode-{number}"))
    assert len(placement.eligibility._kept) <= MAX_CANDIDATES_KEPT, "what is kept has a bound"


async def test_more_workers_than_lua_can_take_at_once(make, monkeypatch):
    monkeypatch.setattr(place_script, "SCRIPT_SECONDS", 30.0)
    placement = await make(4100)
    placed = await placement.place(request())
    assert placed.from_redis
    assert placed.prefill is not None and placed.prefill.role == "prefill" and placed.decode.role == "decode"
    again = await placement.place(request())
    assert again.from_redis and (again.prefill, again.decode) != (placed.prefill, placed.decode)
    assert not placement.script.errors


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
