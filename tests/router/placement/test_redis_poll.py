"""Readings of Redis share a round trip, and the failure of one is not another's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import redis
import redis.asyncio
from redis.asyncio.client import Pipeline

from router.placement.redis_poll import Answers, RedisPoll


class Reading:
    def __init__(self, *command: str):
        self.command = command
        self.taken: list[Answers] = []
        self.errors: list[redis.RedisError] = []

    def ask(self, pipeline: Pipeline) -> Callable[[Answers], None]:
        if self.command:
            pipeline.execute_command(*self.command)
        return self.taken.append

    def refused(self, error: redis.RedisError) -> None:
        self.errors.append(error)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    made = redis.asyncio.Redis.from_url(redis_url)
    yield made
    await made.aclose()


async def test_each_reading_gets_its_own_answers(client, namespace):
    await client.set(namespace, "x")
    first, none, last = Reading("GET", namespace), Reading(), Reading("EXISTS", namespace)
    await RedisPoll(client, [first, none, last]).read()
    assert (first.taken, none.taken, last.taken) == ([[b"x"]], [[]], [[1]])


@pytest.mark.parametrize("at", [0, 1])
async def test_a_reading_that_redis_refuses_stops_no_other(client, namespace, at):
    readings = [Reading("GET", namespace), Reading("GET", namespace)]
    readings[at].command = ("HGETALL",)
    await RedisPoll(client, readings).read()
    assert readings[1 - at].taken == [[None]] and not readings[1 - at].errors
    assert not readings[at].taken and len(readings[at].errors) == 1


async def test_a_value_that_a_reading_cannot_read_stops_no_other(client, namespace):
    await client.set(namespace, "no number")
    wrong, other = Reading("GET", namespace), Reading("EXISTS", namespace)

    def take_number(answers: Answers) -> None:
        wrong.taken.append([int(answers[0])])

    wrong.ask = lambda pipeline: (Reading.ask(wrong, pipeline), take_number)[1]  # type: ignore[method-assign]
    await RedisPoll(client, [wrong, other]).read()
    assert other.taken == [[1]] and not wrong.taken
    assert [type(one) for one in wrong.errors] == [redis.InvalidResponse]


async def test_without_an_answer_nothing_is_taken(tmp_path):
    away = redis.asyncio.Redis(unix_socket_path=str(tmp_path / "nothing"))
    reading = Reading("GET", "x")
    await RedisPoll(away, [reading]).read()
    assert not reading.taken and not reading.errors
    await away.aclose()


async def test_an_answer_that_names_another_server_closes_the_connection(client):
    """The next reading resolves the address again."""
    reading = Reading(
        "EVAL", "return redis.error_reply('READONLY You cannot write against a read only replica.')", "0"
    )
    await client.ping()
    before = await client.client_id()
    await RedisPoll(client, [reading]).read()
    assert len(reading.errors) == 1
    assert await client.client_id() != before
