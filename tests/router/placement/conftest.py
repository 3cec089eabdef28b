"""The cluster on which the placement's scripts are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.router.placement.scripts import Cluster


@pytest.fixture
def cluster(redis_url: str, namespace: str) -> Iterator[Cluster]:
    with redis.Redis.from_url(redis_url) as client:
        made = Cluster(client, namespace)
        made.begin()
        yield made
