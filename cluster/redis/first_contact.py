"""What a process that starts can say about its Redis: whether its URL is one, and whether anything answers there."""

from __future__ import annotations

import redis
from redis.connection import parse_url

from cluster.errors import ConfigError
from cluster.redis.connect import connect, without_password


def check_url(url: str) -> None:
    """Raises ConfigError, which shows nothing of the URL: there may be a password in it."""
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigError(
            "redis_url is not a Redis URL; write for example redis://host:6379, rediss://host:6379 (TLS) or "
            "unix:///path/of/its.sock",
            field="redis_url",
        ) from None


def why_silent(url: str) -> str:
    """Asks once, for a second or two. Empty where it answers; otherwise where it was asked, and why there is no answer."""
    check_url(url)
    client = connect(url)
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return f"no Redis answers at {without_password(url)} ({error})"
    finally:
        client.close()
    return ""
