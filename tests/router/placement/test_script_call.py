"""Calls that are sent without waiting: in order, also the first on a connection, and reported where they fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis

from router.placement.script_call import ScriptCall, ScriptLine
from tests.harness.fake_redis import Answer, FakeRedis

APPEND = "return redis.call('RPUSH', KEYS[2], ARGV[1])"
READ = "return redis.call('LRANGE', KEYS[2], 0, -1)"
SECONDS = 5.0


class Calls:
    def __init__(self, url: str, namespace: str):
        self.line = ScriptLine(url)
        # A text that no server has: the first call is refused with NOSCRIPT, or sent whole.
        self._append = ScriptCall(self.line, f"{APPEND} -- {namespace}")
        self._read = ScriptCall(self.line, f"{READ} -- {namespace}")
        self._keys = [f"{{{namespace}}}:hash", f"{{{namespace}}}:list"]
        self.failed: list[BaseException] = []

    def append(self, what: str) -> bool:
        return self._append.send(self._keys, [what], SECONDS, self.failed.append)

    async def read(self) -> list[bytes]:
        return list(await self._read(self._keys, [], SECONDS))


@pytest.fixture
async def make(redis_url: str, namespace: str) -> AsyncIterator[Callable[[], Calls]]:
    made: list[Calls] = []

    def one() -> Calls:
        made.append(Calls(redis_url, namespace))
        return made[-1]

    yield one
    for calls in made:
        await calls.line.close()


async def test_what_is_sent_is_done_before_the_next_call(make):
    calls = make()
    assert not calls.append("lost"), "there is no connection yet"
    assert await calls.read() == []
    for number in range(5):
        assert calls.append(str(number))
        assert len(await calls.read()) == number + 1
    assert not calls.failed


async def test_scripts_that_the_server_has_forgotten_are_sent_again(make, redis_url):
    calls = make()
    await calls.read()
    calls.append("a")
    await calls.read()
    line = await calls.line.open()
    with redis.Redis.from_url(redis_url) as admin:
        admin.script_flush()
    calls.append("b")
    while len(await calls.read()) < 2:
        await asyncio.sleep(0)
    assert await calls.line.open() is line and not calls.failed


async def test_a_call_whose_connection_is_lost_is_reported(make):
    calls = make()
    await calls.read()
    calls.append("a")
    (await calls.line.open()).close()
    while not calls.failed:
        await asyncio.sleep(0)
    assert await calls.read() in ([], [b"a"]), "the next call connects again"


async def test_a_retired_connection_is_closed_when_its_last_call_is_cancelled():
    """A server that hangs would keep it open for ever."""
    hanging = FakeRedis(lambda command: None if command[0] == "EVALSHA" else b"+OK\r\n")
    line = ScriptLine(f"redis://{hanging.address}?protocol=2")
    script = ScriptCall(line, "return 1")
    calls = [asyncio.create_task(script([], [], 60.0)) for _ in range(2)]
    while len(hanging.named("EVALSHA")) < 2:
        await asyncio.sleep(0.001)
    connection = await line.open()
    connection.retire()
    for call, closing in zip(calls, (False, True), strict=True):
        call.cancel()
        await asyncio.wait([call])
        assert connection._transport.is_closing() is closing
    await line.close()
    hanging.close()


@pytest.mark.parametrize("reply", [b"*2000000000\r\n", b"HTTP/1.1 400\r\n", b":1\r\n:2\r\n"])
async def test_a_connection_without_replies_is_closed_and_opened_again(reply, caplog):
    """A list's header of a few bytes took 16 GB, and the event loop a minute; the others were tracebacks."""
    answers = [reply, b":7\r\n"]
    fake = FakeRedis(lambda command: answers.pop(0) if command[0] == "EVALSHA" else b"+OK\r\n")
    line = ScriptLine(f"redis://{fake.address}?protocol=2")
    script = ScriptCall(line, "return 1")
    first = (await asyncio.gather(script([], [], SECONDS), return_exceptions=True))[0]
    assert first == 1 if reply.startswith(b":") else isinstance(first, redis.ConnectionError)
    while line.current is not None:
        await asyncio.sleep(0.001)
    assert await script([], [], SECONDS) == 7
    (record,) = caplog.records
    assert "what it answers is not a reply" in record.message and record.exc_info is None
    await line.close()
    fake.close()


async def test_a_connection_with_a_late_answer_gets_no_further_call():
    """It may hang for ever, and each call would wait for its deadline."""
    answers: list[bytes | None] = [None, b":7\r\n"]
    fake = FakeRedis(lambda command: answers.pop(0) if command[0] == "EVALSHA" else b"+OK\r\n")
    line = ScriptLine(f"redis://{fake.address}?protocol=2")
    script = ScriptCall(line, "return 1")
    with pytest.raises(TimeoutError):
        await script([], [], 0.05)
    assert line.current is None
    assert await script([], [], SECONDS) == 7 and fake.connections == 2
    await line.close()
    fake.close()


async def test_a_connection_that_takes_longer_than_a_call_is_there_for_the_next_one():
    """With a name to resolve, TLS and a login. Each call opened a new one, and ended before that was open."""
    slow = FakeRedis(answers_login_after(0.2))
    line = ScriptLine(f"redis://:secret@{slow.address}?protocol=2")
    script = ScriptCall(line, "return 1")
    with pytest.raises(TimeoutError):
        await script([], [], 0.05)
    deadline = time.monotonic() + 10
    while line.current is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert await script([], [], SECONDS) == 7 and slow.connections == 1
    await line.close()
    slow.close()


async def test_a_line_that_closes_ends_the_connection_that_it_opens():
    go_on = threading.Event()
    slow = FakeRedis(answers_login_after(60.0, go_on))
    line = ScriptLine(f"redis://:secret@{slow.address}?protocol=2")
    with pytest.raises(TimeoutError):
        await ScriptCall(line, "return 1")([], [], 0.05)
    opening = line._opening
    assert opening is not None
    await line.close()
    assert opening.cancelled() and line._opening is None and line.current is None
    go_on.set()
    slow.close()


def answers_login_after(seconds: float, go_on: threading.Event | None = None) -> Answer:
    def answer(command: list[str]) -> bytes:
        if command[0] == "AUTH":
            (go_on or threading.Event()).wait(seconds)
        return b":7\r\n" if command[0] == "EVALSHA" else b"+OK\r\n"

    return answer
