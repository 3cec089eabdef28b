"""The cluster on which the placement's scripts are tested, and a second Redis for the prefix index."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from cluster.redis.embedded import EmbeddedRedis
from tests.router.placement.scripts import Cluster


@pytest.fixture(scope="session")
def index_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("index"))
    yield server
    server.stop()


@pytest.fixture
def cluster(redis_url: str, namespace: str) -> Iterator[Cluster]:
    with redis.Redis.from_url(redis_url) as client:
        made = Cluster(client, namespace)
        made.begin()
        yield made
