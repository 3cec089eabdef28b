"""The cluster on which the placement's scripts are tested, and a second Redis for the prefix index."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import redis

from cluster.config.router import RouterConfig
from cluster.membership import keys
from cluster.redis.connect import connect
from cluster.redis.embedded import EmbeddedRedis
from router.placement.placement import Placement
from router.placement.types import Mode
from tests.router.placement.fleets import fleet
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


@pytest.fixture
async def make(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Placement]]]:
    """Placements over fleets of so many pairs. They wait for Redis: a call that is late on a busy machine would be decided
    by the router, and the next ones with it."""
    for module in ("place_script", "placement", "settlement"):
        monkeypatch.setattr(f"router.placement.{module}.SCRIPT_SECONDS", 30.0)
    made = []

    async def one(pairs: int, mode: Mode = "never") -> Placement:
        config = RouterConfig(model="/m", redis_url=redis_url, namespace=namespace, local_prefill=mode)
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
