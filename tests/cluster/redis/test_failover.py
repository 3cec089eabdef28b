"""Failover between two real Redis servers behind one address, a link to a unix socket. A client that gets READONLY or the
like closes its connection and reaches the new master."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import ReadOnlyError

from cluster.index.reporter import ChainReporter
from cluster.membership.reader import Members, read_workers
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import hash_blocks, make_salt, pack_tokens
from cluster.redis.embedded import EmbeddedRedis
from cluster.redis.failover import FailoverError, disconnect_after_failover
from router.placement.script_call import ScriptCall
from tests.harness.waiting import until, wait_for

SECONDS = 30.0
WRITES = "return redis.call('INCR', KEYS[1])"
INFO = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


class Pair:
    """Two servers; the shared address leads to one of them."""

    def __init__(self, directory: Path):
        self.servers = [EmbeddedRedis.start(directory / name) for name in ("a", "b")]
        self._link = directory / "current.sock"
        self.url = f"unix://{self._link}"
        self.lead_to(0)

    def lead_to(self, number: int) -> None:
        """Demote the other server to a replica without a reachable master; its connections stay open."""
        there, fresh = self.servers[number], self._link.with_suffix(".new")
        fresh.symlink_to(there.url.removeprefix("unix://"))
        os.replace(fresh, self._link)
        self._told(number, "NO", "ONE")
        self._told(1 - number, "127.0.0.1", "1")

    def _told(self, number: int, *master: str) -> None:
        with redis.Redis.from_url(self.servers[number].url) as client:
            client.execute_command("REPLICAOF", *master)

    def workers_of(self, number: int, namespace: str) -> list[str]:
        return [one.worker_id for one in read_workers(self.servers[number].url, namespace)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for server in made.servers:
        server.stop()


async def test_a_script_finds_the_new_master_and_the_old_one_again(pair: Pair, namespace: str) -> None:
    script = ScriptCall(pair.url, WRITES)
    key = f"{{{namespace}}}:count"
    try:
        for number in (0, 1, 0, 1):
            pair.lead_to(number)
            before = int(await _get(pair, number, key) or 0)
            for _ in range(3):
                await script([key], [], 5.0)
            assert int(await _get(pair, number, key)) == before + 3
    finally:
        await script.close()


async def _get(pair: Pair, number: int, key: str) -> bytes:
    def get() -> bytes:
        with redis.Redis.from_url(pair.servers[number].url) as client:
            return client.get(key)  # type: ignore[return-value]

    return await asyncio.to_thread(get)


async def test_a_replica_alone_is_an_error_until_it_is_promoted(pair: Pair, namespace: str) -> None:
    script = ScriptCall(pair.servers[1].url, WRITES)
    members = Members(pair.servers[1].url, namespace)
    try:
        for _ in range(3):
            with pytest.raises(FailoverError):
                await script([f"{{{namespace}}}:count"], [], 5.0)
        await members.refresh()
        assert not members.redis_ok, "a replica's word is an old one"
        with redis.Redis.from_url(pair.servers[1].url) as client:
            client.config_set("replica-serve-stale-data", "no")
        with pytest.raises(FailoverError, match="MASTERDOWN"):
            await script([f"{{{namespace}}}:count"], [], 5.0)
        pair.lead_to(1)
        assert await script([f"{{{namespace}}}:count"], [], 5.0) == 1
        await members.refresh()
        assert members.redis_ok
    finally:
        await script.close()
        await members.close()


async def test_routers_and_workers_follow(pair: Pair, namespace: str) -> None:
    registration = Registration(pair.url, namespace, INFO)
    hashes = hash_blocks(pack_tokens([1] * 64), 16, secret=b"s", salt=make_salt("m"))
    reporter = ChainReporter(pair.url, namespace, "m", registration, lambda: [(hashes, 4)])
    members = Members(pair.url, namespace)
    await members.start()
    registration.start()
    reporter.start()
    try:
        for number in (0, 1, 0):
            await asyncio.to_thread(pair.lead_to, number)
            await asyncio.to_thread(
                wait_for,
                lambda n=number: pair.workers_of(n, namespace) == ["w"],
                SECONDS,
                f"registered at {number}",
            )

            def known(number: int = number) -> bool:
                with redis.Redis.from_url(pair.servers[number].url) as client:
                    return bool(client.keys(f"{{{namespace}}}:index:m:n:*"))

            await asyncio.to_thread(wait_for, known, SECONDS, f"its cache is in the index of {number}")
            await until(lambda: members.redis_ok, "the router reads there", SECONDS)
            await until(lambda: [one.worker_id for one in members.all] == ["w"], "and sees it", SECONDS)
    finally:
        await asyncio.to_thread(reporter.stop)
        await asyncio.to_thread(registration.stop)
        await members.close()


# --- each by itself, without threads --------------------------------------------------------------------------


HELD = [(hash_blocks(pack_tokens([1] * 64), 16, secret=b"s", salt=make_salt("m")), 4)]


def in_index(pair: Pair, number: int, namespace: str) -> bool:
    with redis.Redis.from_url(pair.servers[number].url) as client:
        return bool(client.keys(f"{{{namespace}}}:index:m:n:*"))


def test_a_registration_follows(pair: Pair, namespace: str) -> None:
    registration = Registration(pair.url, namespace, INFO)
    registration.register_again()
    pair.lead_to(1)
    registration._calls.attempt(registration._do_renew)
    assert registration.errors == 1 and registration.unreachable
    registration._calls.attempt(registration._do_renew)
    assert registration.errors == 1 and pair.workers_of(1, namespace) == ["w"]
    registration.stop()


async def test_a_membership_follows(pair: Pair, namespace: str) -> None:
    members = Members(pair.url, namespace)
    await members.refresh()
    pair.lead_to(1)
    await members.refresh()
    assert not members.redis_ok and members.errors == 1
    await members.refresh()
    assert members.redis_ok and members.errors == 1
    await members.close()


def test_a_report_is_not_lost_to_a_replica(pair: Pair, namespace: str) -> None:
    """The replica has the slot, with a later sequence number."""
    registration = Registration(pair.url, namespace, INFO)
    reporter = ChainReporter(pair.url, namespace, "m", registration, lambda: HELD)
    registration.register_again()
    assert reporter._resync_if_new_slot()
    reporter._send_batch()
    assert in_index(pair, 0, namespace)
    pair.lead_to(1)
    for _ in range(2):
        registration.register_again()
    assert reporter._resync_if_new_slot() and registration.slot == 1, "the slot that it had at the other one"
    with pytest.raises(redis.ResponseError, match="READONLY"):
        reporter._send_batch()
    disconnect_after_failover(reporter._client, ReadOnlyError())
    reporter._send_batch()
    assert in_index(pair, 1, namespace) and reporter.waiting == 0
    reporter.stop()
    registration.stop()


def test_a_cache_is_published_after_every_registration(redis_url: str, namespace: str) -> None:
    """An emptied Redis assigns the same slot again."""
    registration = Registration(redis_url, namespace, INFO)
    reporter = ChainReporter(redis_url, namespace, "m", registration, lambda: HELD)
    with redis.Redis.from_url(redis_url) as client:
        for _ in range(2):
            registration.register_again()
            assert registration.slot == 1 and reporter._wait()
            assert reporter._resync_if_new_slot()
            reporter._send_batch()
            known = list(client.scan_iter(f"{{{namespace}}}:index:m:n:*"))
            assert len(known) == 1
            client.delete(*client.scan_iter(f"{{{namespace}}}:*"))
    reporter.stop()
    registration.stop()


# --- answers that only a cluster gives ----------------------------------------------------------------------


ANSWERS = [
    "READONLY You can't write against a read only replica.",
    "READONLY You can't write against a read only replica. script: 1f, on @user_script:1.",
    "ERR Error running script (call to f_1f): @user_script:1: @user_script: 1: -READONLY You can't write.",
    "MOVED 3999 127.0.0.1:6381",
    "ASK 3999 127.0.0.1:6381",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "LOADING Redis is loading the dataset in memory",
    "CLUSTERDOWN Hash slot not served",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
]
OTHERS = [
    "OOM command not allowed when used memory > 'maxmemory'.",
    "ERR my READONLY table is not a list",
    "BUSY x",
]


@contextlib.asynccontextmanager
async def server(path: Path, first: str) -> AsyncIterator[list[int]]:
    """A server whose first connection always answers `first`; later connections work."""
    connections: list[int] = []
    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(connections)
        connections.append(0)
        ended.append(asyncio.Event())
        while data := await reader.read(65536):
            for command in data.split(b"*")[1:]:
                if b"EVAL" in command:
                    connections[number] += 1
                    writer.write(f"-{first}\r\n".encode() if number == 0 else b":1\r\n")
                else:
                    writer.write(b"+OK\r\n")
        writer.close()
        await writer.wait_closed()
        ended[number].set()

    listening = await asyncio.start_unix_server(serve, path)
    yield connections
    listening.close()
    for one in ended:
        await one.wait()


@pytest.mark.parametrize("answer", ANSWERS)
async def test_such_an_answer_closes_the_connection_and_the_call_is_made_again(
    tmp_path: Path, answer: str
) -> None:
    async with server(tmp_path / "s.sock", answer) as asked:
        script = ScriptCall(f"unix://{tmp_path}/s.sock?protocol=2", "return 1")
        with pytest.raises(FailoverError):
            await script([], [], 5.0)  # on a fresh connection: no third one is tried
        assert [await script([], [], 5.0) for _ in range(2)] == [1, 1]
        assert asked == [1, 2]
        await script.close()


@pytest.mark.parametrize("answer", OTHERS)
async def test_another_error_keeps_the_connection(tmp_path: Path, answer: str) -> None:
    async with server(tmp_path / "s.sock", answer) as asked:
        script = ScriptCall(f"unix://{tmp_path}/s.sock?protocol=2", "return 1")
        for _ in range(2):
            with pytest.raises(redis.ResponseError) as caught:
                await script([], [], 5.0)
            assert not isinstance(caught.value, ReadOnlyError)
        assert asked == [2]
        await script.close()


async def test_a_request_waiting_on_a_closing_connection_gets_an_answer_there(tmp_path: Path) -> None:
    """It is left because of one call that was given up; others may have more time."""
    answer, connections = asyncio.Event(), 0
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        serving.append(asyncio.current_task())
        while data := await reader.read(65536):
            for command in data.split(b"*")[1:]:
                if b"EVAL" in command:
                    await answer.wait()
                writer.write(b":1\r\n" if b"EVAL" in command else b"+OK\r\n")
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "s.sock"):
        script = ScriptCall(f"unix://{tmp_path}/s.sock?protocol=2", "return 1")
        patient = asyncio.create_task(script([], [], 20.0))
        await until(lambda: connections, "it is connected")
        with pytest.raises(TimeoutError):
            await script([], [], 0.05)
        answer.set()
        assert await patient == 1
        assert connections == 1
        assert await script([], [], 20.0) == 1
        assert connections == 2
        await script.close()
        async with asyncio.timeout(20):
            await asyncio.gather(*(one for one in serving if one is not None))
