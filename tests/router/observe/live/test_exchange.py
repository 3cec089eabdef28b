"""Routers exchange their figures through a real Redis."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
import redis

from cluster.membership import keys
from router.observe.live.exchange import Exchange
from router.observe.live.report import Counts, Requests, RouterReport, encode


def report(requests: int) -> RouterReport:
    return RouterReport("ready", 1.0, 0, Counts(Requests(ok=requests)))


async def test_each_receives_the_others_messages_until_they_leave(redis_url: str, namespace: str) -> None:
    one, two = (Exchange(redis_url, namespace, name) for name in ("one", "two"))
    assert set(await one.swap(report(1))) == {"one"}
    heard = await two.swap(report(2))
    assert {name: told.report.counts.requests.ok for name, told in heard.items()} == {"one": 1, "two": 2}
    assert 0.0 <= heard["one"].age_seconds < 10.0
    await one.leave()
    assert set(await two.swap(report(3))) == {"two"}
    await two.leave()


async def test_junk_and_the_long_silent_are_left_out(redis_url: str, namespace: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        now = int(time.time() * 1000)
        told = {"junk": "x", "other version": f"{now} {{}}", "long gone": f"{now - 3_600_000} {{}}"}
        client.hset(keys.router_reports(namespace), mapping=told)
        own = Exchange(redis_url, namespace, "own")
        assert set(await own.swap(report(1))) == {"own"}
        assert set(client.hkeys(keys.router_reports(namespace))) == {b"other version", b"own"}
        await own.leave()


async def test_a_report_from_the_future_is_forgotten_in_time(redis_url: str, namespace: str) -> None:
    """After a failover to a Redis whose clock is behind; its router has ended meanwhile."""
    own, raw = Exchange(redis_url, namespace, "own"), encode(report(1))
    with redis.Redis.from_url(redis_url) as client:
        now = int(time.time() * 1000)
        client.hset(keys.router_reports(namespace), "ended", b"%d " % (now + 3_600_000) + raw)
        assert (await own.swap(report(1)))["ended"].age_seconds == 0.0
        assert client.hget(keys.router_reports(namespace), "ended") < b"%d " % (now + 60_000)
        assert (await own.swap(report(1)))["ended"].report.counts.requests.ok == 1
    await own.leave()


async def test_without_redis_a_router_lists_itself() -> None:
    alone = Exchange("unix:///nowhere/redis.sock", "test", "alone")
    for requests in (1, 2):
        heard = await alone.swap(report(requests))
        assert {name: told.report.counts.requests.ok for name, told in heard.items()} == {"alone": requests}
    await alone.leave()


async def test_names_that_are_no_text_and_counts_beyond_all_bounds_are_left_out(
    redis_url: str, namespace: str
) -> None:
    """The first was a traceback each second; of the others /v1/cluster/live could make no JSON."""
    valid: dict[str, Any] = orjson.loads(encode(report(1)))
    wrong: list[dict[str, Any]] = [
        {"in_flight": 1e300},
        {"uptime_seconds": 1e300},
        {"uptime_seconds": -1},
        {"requests": [1e300, 0, 0, 0]},
        {"requests": [2**62, 0, 0, 0]},
        {"prompt_tokens": 1e300},
        {"cached_tokens": True},
        {"output_tokens": -5},
        {"ttft": [[0, 1e300]]},
        {"itl": [[1e300, 0]]},
        {"flows": [["p", "d", 1e300, 1]]},
        {"flows": [["p", "d", 1, 2**63]]},
    ]
    own = Exchange(redis_url, namespace, "own")
    with redis.Redis.from_url(redis_url) as client:
        now = b"%d " % (time.time() * 1000)
        for number, changed in enumerate(wrong):
            told = now + orjson.dumps({**valid, **changed})
            client.hset(keys.router_reports(namespace), f"wrong {number}", told)
        client.hset(keys.router_reports(namespace), b"\xff", now + orjson.dumps(valid))
        client.hset(keys.router_reports(namespace), "right", now + orjson.dumps(valid))
    assert set(await own.swap(report(1))) == {"own", "right"}
    await own.leave()


async def test_a_redis_that_answers_with_an_error_is_not_called_out_of_reach(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = Exchange(redis_url, namespace, "own")
    with redis.Redis.from_url(redis_url) as client:
        client.set(keys.router_reports(namespace), "no hash")
    assert set(await own.swap(report(1))) == {"own"}
    assert "Redis answers with an error: " in caplog.text and "WRONGTYPE" in caplog.text
    await own.leave()


@pytest.mark.parametrize("answer", [b"OK", None, 7, {}, [1, 2, 3], [b"a"], [b"a", b"b", b"c"]], ids=repr)
async def test_malformed_answers_leave_the_router_alone(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    own = Exchange(redis_url, namespace, "own")

    async def lies(*arguments: Any) -> Any:
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(own, "_call", lies)
        assert set(await own.swap(report(1))) == {"own"}
    await own.leave()


async def test_the_event_loop_goes_on_while_many_reports_are_read(redis_url: str, namespace: str) -> None:
    own, raw, turns = Exchange(redis_url, namespace, "own"), encode(report(1)), 0
    read = asyncio.Event()

    async def answered(*_: Any) -> Any:
        read.set()
        return [part for n in range(50) for part in (b"r%d" % n, 5, raw)]

    async def count() -> None:
        nonlocal turns
        await read.wait()
        while True:
            turns += 1
            await asyncio.sleep(0)

    own._call, call = answered, own._call  # type: ignore[assignment]
    counting = asyncio.create_task(count())
    assert len(await own.swap(report(1))) == 51
    counting.cancel()
    assert turns >= 45
    own._call = call
    await own.leave()
