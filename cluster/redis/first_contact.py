"""Checks of Redis at process start: the URL is valid, and a server answers there."""

from __future__ import annotations

import redis
from redis.connection import parse_url

from cluster.errors import ConfigError
from cluster.redis.connect import connect
from cluster.redis.urls import without_password


def check_url(url: str) -> None:
    """Raise ConfigError if `url` is not a Redis URL. The message leaves the URL out, which may hold a password."""
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigError(
            "redis_url is not a Redis URL; write for example redis://host:6379, rediss://host:6379 (TLS) or "
            "unix:///path/of/its.sock",
            field="redis_url",
        ) from None


def why_silent(url: str) -> str:
    """Ping once, for a second or two. Returns "" if Redis answers, else its address and the reason."""
    check_url(url)
    client = connect(url)
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return f"no Redis answers at {without_password(url)} ({error})"
    finally:
        client.close()
    return ""
