"""Redis's answers as text: of a client without `decode_responses`, and a client that returns text."""

from __future__ import annotations

import redis

from cluster.redis.connect import connect


def text_client(url: str, seconds: float = 2.0) -> redis.Redis:
    """Of one server, of Sentinels or of a cluster."""
    client = connect(url, seconds)
    client.connection_pool.connection_kwargs["decode_responses"] = True
    return client


def decoded(value: bytes | str) -> str:
    assert isinstance(value, bytes)
    return value.decode()
