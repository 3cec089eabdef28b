"""Concurrent refreshes of a router's membership view."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from cluster.membership import keys, reader, scripts
from cluster.membership.reader import Members
from cluster.membership.registry import Registry, encode
from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import FORGET_SECONDS, REGISTER_AGAIN_SECONDS, RENEW_SECONDS
from cluster.redis.connect import connect

INFO = WorkerInfo("w", 7, 3, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


class Clock:
    """The reader's: it stands still unless a test sets it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reader, "time", made)
    monkeypatch.setattr(reader, "LEASE_DEAD_SECONDS", 300.0)  # of which a fifth is the deadline of a read
    return made


@pytest.fixture
def redis_clock(monkeypatch: pytest.MonkeyPatch) -> int:
    """Seconds at which Redis's clock stands, as scripts of objects made later read it."""
    seconds = 1_800_000_000
    for name in ("LOOK", "REGISTER", "RENEW"):
        script = getattr(scripts, name)
        assert "redis.call('TIME')" in script
        monkeypatch.setattr(scripts, name, script.replace("redis.call('TIME')", f"{{'{seconds}', '0'}}"))
    return seconds


@pytest.fixture
async def members(redis_url: str, namespace: str, clock: Clock) -> AsyncIterator[Members]:
    made = Members(redis_url, namespace)
    yield made
    await made.close()


def answer(number: int) -> list[Any]:
    info = encode(INFO).replace('"worker_id": "w"', f'"worker_id": "w{number}"')
    return [b"generation", [b"1000", b"4", b"w", info.encode(), b"900", b"{}", b""]]


async def test_fifty_at_once_are_one_read(members: Members, redis_url: str) -> None:
    await members.refresh()
    reads, read = [], members._read

    async def counted(**arguments: Any) -> Any:
        reads.append(arguments)
        return await read(**arguments)

    members._read = counted  # type: ignore[assignment]
    with connect(redis_url) as client:
        before = client.info("clients")["connected_clients"]
        await asyncio.gather(*(members.refresh() for _ in range(50)))
        assert len(reads) == 1
        assert client.info("clients")["connected_clients"] <= before, "over the connection that was there"


async def test_an_older_answer_does_not_replace_a_newer_one(members: Members) -> None:
    begun: list[asyncio.Event] = []
    members.redis_ok, members._back_since = True, -1e9  # Redis was there all the time

    async def slow(**arguments: Any) -> Any:
        number = len(begun)
        begun.append(asyncio.Event())
        if number == 0:
            await begun[0].wait()
        return answer(number)

    members._read = slow  # type: ignore[assignment]
    first = asyncio.create_task(members.refresh())
    while not begun:
        await asyncio.sleep(0)
    later = [asyncio.create_task(members.refresh()) for _ in range(5)]
    for _ in range(20):
        await asyncio.sleep(0)
    begun[0].set()
    await asyncio.gather(first, *later)
    assert [worker.worker_id for worker in members.all] == ["w1"]
    assert len(begun) == 2, "callers that asked meanwhile share the next read"


async def test_a_cancelled_waiter_does_not_cancel_the_read_for_others(members: Members) -> None:
    go, reads = asyncio.Event(), []

    async def slow(**arguments: Any) -> Any:
        reads.append(arguments)
        await go.wait()
        return answer(1)

    members._read = slow  # type: ignore[assignment]
    impatient, patient = (asyncio.create_task(members.refresh()) for _ in range(2))
    while not reads:
        await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait([impatient])
    go.set()
    await patient
    assert impatient.cancelled() and members.redis_ok and len(reads) == 1


async def test_a_read_that_fails_is_followed_by_another(members: Members) -> None:
    answers: list[Any] = [redis.ConnectionError("gone"), answer(5)]

    async def next_one(**arguments: Any) -> Any:
        told = answers.pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    members._read = next_one  # type: ignore[assignment]
    await members.refresh()
    assert not members.redis_ok
    await members.refresh()
    assert members.redis_ok and members.errors == 1


async def refresh_twice(members: Members, answers: list[Any]) -> None:
    """With these answers of Redis, of which later ones are left; the worker is there after each."""

    async def read(**arguments: Any) -> Any:
        return answers.pop(0)

    members._read = read  # type: ignore[assignment]
    for _ in range(2):
        await members.refresh()
        assert [worker.worker_id for worker in members.all] == ["w1"]


async def test_a_redis_that_was_rolled_back_between_two_looks_is_not_believed(members: Members) -> None:
    """It answers all the time, and has forgotten slots that it had given out: their workers are there all the same."""
    answers = [answer(1), [b"generation", [b"1000", b"3"]]]
    members.redis_ok, members._back_since = True, -1e9
    await refresh_twice(members, answers)


async def test_workers_that_redis_forgets_because_its_clock_jumped_have_time_to_register(
    members: Members, clock: Clock
) -> None:
    """All leases look long dead to it, so it deletes the workers. They live, and renew twice a second."""
    ahead = b"%d" % (1000 + 2 * FORGET_SECONDS * 1000)
    gone = [b"another", [ahead, b"4"]]
    answers: list[Any] = [answer(1), gone, gone]
    members.redis_ok, members._back_since = True, -1e9
    await refresh_twice(members, answers)
    clock.now += REGISTER_AGAIN_SECONDS + 1
    await members.refresh()
    assert members.all == [], "it had time to register"


async def test_a_worker_that_leaves_is_not_kept_however_late_that_is_read(
    members: Members, clock: Clock
) -> None:
    """The router itself was stopped meanwhile: both clocks have gone on."""
    later = b"%d" % (1000 + 2 * FORGET_SECONDS * 1000)
    answers: list[Any] = [answer(1), [b"another", [later, b"4"]]]
    members.redis_ok, members._back_since = True, -1e9

    async def read(**arguments: Any) -> Any:
        return answers.pop(0)

    members._read = read  # type: ignore[assignment]
    await members.refresh()
    clock.now += 2 * FORGET_SECONDS
    await members.refresh()
    assert members.all == []


async def test_what_has_not_changed_is_not_read_again(
    redis_clock: int, members: Members, redis_url: str, namespace: str
) -> None:
    """What is derived from the list is derived once."""
    registry = Registry(redis_url, namespace)
    one, two = (replace(INFO, worker_id=name, slot=0) for name in ("one", "two"))
    slot = registry.register(one, WorkerStatus(), None)
    await members.refresh()
    before = members.all
    registry.renew(replace(one, slot=slot), WorkerStatus(running=7))
    await members.refresh()
    assert members.all is before
    registry.register(two, WorkerStatus(), None)
    await members.refresh()
    assert [worker.worker_id for worker in members.all] == ["one", "two"]
    registry.drain("two", "exit")
    await members.refresh()
    assert [worker.state for worker in members.all] == ["ready", "draining"]
    with connect(redis_url) as client:
        now = redis_clock * 1000
        for age, lease in ((3000, "suspect"), (3000, "suspect"), (9000, "dead"), (0, "live")):
            client.zadd(keys.leases(namespace), {"one": now - age})
            before = members.all
            await members.refresh()
            assert members.all[0].lease == lease and members.all[0].status.running == 7
            assert (members.all is before) == (before[0].lease == lease)
        members._back_since = -1e9
        client.zadd(keys.leases(namespace), {"two": now - FORGET_SECONDS * 1000 - 5000})
        for _ in range(2):
            await members.refresh()
        assert [worker.worker_id for worker in members.all] == ["one"], "dead for long"
    registry.close()


async def test_a_status_is_read_when_it_is_shown(
    members: Members, redis_url: str, namespace: str, clock: Clock
) -> None:
    registry = Registry(redis_url, namespace)
    slot = registry.register(replace(INFO, slot=0), WorkerStatus(), None)
    await members.refresh()
    registry.renew(replace(INFO, slot=slot), WorkerStatus(running=7))
    await members.refresh()
    assert members.all[0].status.running == 0
    clock.now += RENEW_SECONDS + 0.1
    await members.refresh_status()
    assert members.all[0].status.running == 7
    registry.renew(replace(INFO, slot=slot), WorkerStatus(running=8))
    clock.now += reader.STATUS_SECONDS + 0.1
    await members.refresh()
    assert members.all[0].status.running == 8, "for a while, as it was shown a moment ago"
    registry.close()


async def test_a_redis_that_was_emptied_is_read_again(
    members: Members, redis_url: str, namespace: str
) -> None:
    """Its generations do not start from zero again."""
    registry = Registry(redis_url, namespace)
    registry.register(replace(INFO, slot=0), WorkerStatus(), None)
    await members.refresh()
    members._back_since = -1e9
    with connect(redis_url) as client:
        for key in client.scan_iter(f"{{{namespace}}}:*"):
            client.delete(key)
    registry.register(replace(INFO, worker_id="other", slot=0), WorkerStatus(), None)
    members.redis_ok = True
    await members.refresh()
    assert "other" in [worker.worker_id for worker in members.all]
    registry.close()


async def test_the_event_loop_goes_on_while_many_registrations_are_read(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests waited more than a second while a router read 3,000 new ones."""
    registration, turns, loop = encode(INFO).encode(), [0], asyncio.get_running_loop()
    in_turn: Counter[int] = Counter()
    read_one = reader._worker

    def turn() -> None:
        turns[0] += 1
        if not members.all:
            loop.call_soon(turn)

    def counted(*values: Any) -> WorkerInfo:
        in_turn[turns[0]] += 1
        return read_one(*values)

    async def many(**call: Any) -> list[Any]:
        return [b"1", [1000, 4, *[b"w", registration, b"900", b"{}", b""] * 1000]]

    monkeypatch.setattr(reader, "_worker", counted)
    monkeypatch.setattr(members, "_read", many)
    turn()
    await members.refresh()
    assert len(members.all) == 1000
    assert max(in_turn.values()) <= reader.SLICE


async def test_a_redis_that_answers_with_an_error_is_not_called_out_of_reach(
    members: Members, redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    await members.refresh()
    with connect(redis_url) as client:
        client.set(keys.members(namespace), "no hash")
    members._generation = ""
    await members.refresh()
    assert "Redis answers with an error: " in caplog.text and "WRONGTYPE" in caplog.text
    assert "out of reach" not in caplog.text
