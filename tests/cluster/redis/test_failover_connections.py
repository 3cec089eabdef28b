"""Connections whose server is replaced: each one finds the new server, and searches are shared and bounded."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
import redis

from cluster.redis import finder as module
from cluster.redis import sentinels
from cluster.redis.connect import connect, connect_async
from cluster.redis.failover import FailoverError
from cluster.redis.sentinels import NotFoundError
from router.placement.script_call import ScriptCall
from tests.cluster.redis.finders import OK, finder_of, says
from tests.harness.fake_redis import Answer, names_master, names_owner
from tests.harness.waiting import wait_for

READONLY = b"-READONLY You can't write against a read only replica.\r\n"


def test_the_thread_that_asks_sentinels_ends_with_its_last_connection(fake, monkeypatch) -> None:
    monkeypatch.setattr(sentinels, "POLL_SECONDS", 0.02)
    before = {one for one in threading.enumerate() if one.name == "redis-master"}  # of earlier tests
    server = fake(lambda command: b"+PONG\r\n")
    sentinel = fake(says(names_master(server.port)))
    url = f"redis+sentinel://{sentinel.address}/m?protocol=2"
    clients = [connect(url), connect(url)]
    for client in clients:
        assert client.ping()
    watching = [one for one in threading.enumerate() if one.name == "redis-master" and one not in before]
    assert len(watching) == 1, "one for all connections of a process"
    while clients:
        assert watching[0].is_alive()
        clients.pop().close()
    del client
    gc.collect()
    watching[0].join(10.0)
    assert not watching[0].is_alive()


def test_a_blocking_client_leaves_a_replaced_master_that_still_answers(fake, monkeypatch) -> None:
    monkeypatch.setattr(sentinels, "POLL_SECONDS", 0.02)
    old, new = fake(lambda command: b"+PONG\r\n"), fake(lambda command: b"+PONG\r\n")
    sentinel = fake(says(names_master(old.port)))
    with connect(f"redis+sentinel://{sentinel.address}/m?protocol=2") as client:
        assert client.ping()
        sentinel.answer = says(names_master(new.port, epoch=1))
        wait_for(lambda: client.ping() and new.connections == 1, 10, "it is at the new master")


async def test_clients_of_the_loop_leave_a_replaced_master_that_still_answers(fake, monkeypatch) -> None:
    monkeypatch.setattr(sentinels, "POLL_SECONDS", 0.02)
    old, new = fake(answering(b":1\r\n")), fake(answering(b":2\r\n"))
    sentinel = fake(says(names_master(old.port)))
    url = f"redis+sentinel://{sentinel.address}/m?protocol=2"
    script, client = ScriptCall(url, "return 1"), connect_async(url)
    try:
        assert await script([], [], 5.0) == 1
        await client.get("x")
        sentinel.answer = says(names_master(new.port, epoch=1))
        deadline = time.monotonic() + 10
        while new.connections < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
            await script([], [], 5.0)
            await client.get("x")
        assert await script([], [], 5.0) == 2
    finally:
        await script.close()
        await client.aclose()


def test_each_server_gets_its_own_password_and_errors_show_none(fake) -> None:
    sentinel = fake(says(names_master(1)))
    hosts = f"redis+sentinel://user:of-redis@{sentinel.address}/m?protocol=2&sentinel_password=of-sentinel"
    with connect(hosts) as client, pytest.raises(redis.ConnectionError) as caught:
        client.ping()  # nothing listens on port 1
    assert sentinel.named("AUTH") == [["AUTH", "of-sentinel"]]
    refuses = fake(lambda command: b"-WRONGPASS invalid username-password pair\r\n")
    url = hosts.replace(sentinel.address, refuses.address)
    with connect(url) as client, pytest.raises(redis.RedisError) as again:
        client.ping()
    for error in (caught, again):
        assert "of-redis" not in str(error.value) and "of-sentinel" not in str(error.value)


# --- off the loop ---------------------------------------------------------------------------------------------


async def test_the_loop_runs_while_a_seed_thinks(fake) -> None:
    think = threading.Event()

    def answer(command: list[str]) -> bytes:
        think.wait(20)
        return names_master(5)

    searching = asyncio.create_task(finder_of(fake(answer)).find_async())
    await asyncio.sleep(0)
    think.set()
    assert (await searching).port == 5


async def test_searches_take_no_thread_from_others(fake) -> None:
    """The loop's own threads, which resolve names."""
    go = threading.Event()

    def answer(command: list[str]) -> bytes:
        go.wait(20)
        return names_master(5)

    finders = [finder_of(fake(answer)) for _ in range(40)]
    searches = [asyncio.create_task(finder.find_async()) for finder in finders]
    await asyncio.sleep(0)
    async with asyncio.timeout(1.0):  # a search ends later
        await asyncio.to_thread(go.set)
    assert {found.port for found in await asyncio.gather(*searches)} == {5}


async def test_a_search_outlives_its_callers_and_serves_the_next(fake) -> None:
    go = threading.Event()

    def answer(command: list[str]) -> bytes:
        go.wait(20)
        return names_master(5)

    seed = fake(answer)
    finder = finder_of(seed)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await finder.find_async()
    go.set()
    assert (await finder.find_async()).port == 5
    assert len(seed.named("SENTINEL")) == 1, "callers share a search"
    assert (await finder.find_async()).port == 5
    assert len(seed.named("SENTINEL")) == 2, "a server that was found is not believed twice"


async def test_a_search_that_nobody_awaited_is_too_old_after_a_while(fake, monkeypatch) -> None:
    seed = fake(says(names_master(5)))
    finder = finder_of(seed)
    searching = asyncio.create_task(finder.find_async())
    await asyncio.sleep(0)
    searching.cancel()
    finding = finder._finding
    assert finding is not None
    await finding
    monkeypatch.setattr(module, "FRESH_SECONDS", 0.0)
    await finder.find_async()
    assert len(seed.named("SENTINEL")) == 2


async def test_a_failed_search_is_made_again(fake) -> None:
    seed = fake(says(names_master(5, name="other")))
    finder = finder_of(seed)
    with pytest.raises(NotFoundError):
        await finder.find_async()
    seed.answer = says(names_master(5))
    assert (await finder.find_async()).port == 5


# --- connections ----------------------------------------------------------------------------------------------


def answering(first: bytes) -> Answer:
    return lambda command: first if command[0].upper().startswith("EVAL") else OK


async def test_the_pipelined_connection_asks_where_to_whenever_it_connects(fake) -> None:
    old, new = fake(answering(READONLY)), fake(answering(b":2\r\n"))
    sentinel = fake(says(names_master(old.port)))
    script = ScriptCall(f"redis+sentinel://{sentinel.address}/m?protocol=2", "return 1")
    try:
        with pytest.raises(FailoverError):
            await script([], [], 5.0)
        sentinel.answer = says(names_master(new.port, epoch=1))
        assert [await script([], [], 5.0) for _ in range(3)] == [2, 2, 2]
        assert new.connections == 1 and len(sentinel.named("SENTINEL")) == 2
    finally:
        await script.close()


async def test_a_moved_slot_is_found_in_the_same_call(fake) -> None:
    new = fake(answering(b":2\r\n"))
    old = fake(answering(b":1\r\n"))
    seed = fake(says(names_owner(old.port)))
    script = ScriptCall(f"redis+cluster://{seed.address}?hash_tag=ns&protocol=2", "return 1")
    try:
        assert await script([], [], 5.0) == 1
        old.answer = answering(f"-MOVED 9937 127.0.0.1:{new.port}\r\n".encode())
        seed.answer = says(names_owner(new.port))
        assert await script([], [], 5.0) == 2
    finally:
        await script.close()


async def test_a_slow_sentinel_delays_calls_and_fails_none_that_waits(fake) -> None:
    """The first calls end at their own deadlines; one after the search uses what it found."""
    server = fake(answering(b":2\r\n"))
    sentinel = fake(says(names_master(server.port), after=0.5))
    script = ScriptCall(f"redis+sentinel://{sentinel.address}/m?protocol=2", "return 1")
    try:
        late = 0
        while True:
            try:
                assert await script([], [], 0.2) == 2
                break
            except TimeoutError:
                late += 1
                assert late < 50
        assert late and len(sentinel.named("SENTINEL")) == 1
    finally:
        await script.close()


@pytest.mark.parametrize("tag", ["cluster", "sentinel"])
def test_a_blocking_client_asks_again_after_a_failover(fake, tag: str) -> None:
    old, new = fake(lambda command: READONLY), fake(lambda command: b"+PONG\r\n")
    seed = fake(says(names_owner(old.port) if tag == "cluster" else names_master(old.port)))
    end = "?hash_tag=ns&" if tag == "cluster" else "/m?"
    with connect(f"redis+{tag}://{seed.address}{end}protocol=2") as client:
        with pytest.raises(redis.ReadOnlyError):
            client.ping()
        client.connection_pool.disconnect()
        seed.answer = says(names_owner(new.port) if tag == "cluster" else names_master(new.port, epoch=1))
        assert client.ping()
        assert client.ping() and new.connections == 1, "a connection that is open is used"


async def test_a_client_of_the_loop_asks_again_too(fake) -> None:
    old, new = fake(lambda command: READONLY), fake(lambda command: b"+PONG\r\n")
    seed = fake(says(names_master(old.port)))
    client = connect_async(f"redis+sentinel://{seed.address}/m?protocol=2")
    try:
        with pytest.raises(redis.ReadOnlyError):
            await client.ping()
        await client.connection_pool.disconnect()
        seed.answer = says(names_master(new.port, epoch=1))
        assert await client.ping() and await client.ping() and new.connections == 1
    finally:
        await client.aclose()
