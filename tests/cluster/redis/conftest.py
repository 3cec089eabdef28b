"""Servers that answer as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.harness.fake_redis import Answer, FakeRedis


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeRedis]]:
    made: list[FakeRedis] = []

    def make(answer: Answer, host: str = "127.0.0.1") -> FakeRedis:
        made.append(FakeRedis(answer, host))
        return made[-1]

    yield make
    for one in made:
        one.close()
