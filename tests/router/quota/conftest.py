"""Two routers over one Redis, and what their tenant's bucket holds."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.quota.quota import Quota


@pytest.fixture
async def routers(redis_url, namespace, monkeypatch):
    # What a busy machine lets wait must not count as an outage: a call given up may have been charged.
    monkeypatch.setattr("router.quota.scripts.CALL_SECONDS", 10.0)
    made = [Quota(redis_url, namespace, CollectorRegistry()) for _ in range(2)]
    yield made
    for one in made:
        await one.close()


@pytest.fixture
def bucket(redis_url, namespace):
    """(requests, thousands of tokens) in the tenant's bucket."""
    import redis

    client = redis.Redis.from_url(redis_url)

    def read() -> tuple[int, int]:
        used = client.hmget(f"{{{namespace}}}:quota:t", "requests", "tokens")
        return round(float(used[0] or 0)), round(float(used[1] or 0) / 1000)

    yield read
    client.close()


@pytest.fixture
def paused(redis_url):
    """Redis takes calls for so many milliseconds, and executes them afterwards."""
    import redis

    client = redis.Redis.from_url(redis_url)
    yield client.client_pause
    client.client_unpause()
    client.close()
