"""Redis connections. Every command has a deadline, so a hung Redis blocks no caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
from redis.connection import parse_url

from cluster.errors import ConfigError
from cluster.redis.urls import without_password

CONNECT_SECONDS = 1.0
COMMAND_SECONDS = 1.0
# No CLIENT SETINFO: Redis's users of components may not call it, and each refusal would stand in Redis's ACL LOG.
QUIET: Mapping[str, Any] = {"driver_info": None}


def _options(url: str, seconds: float) -> dict[str, Any]:
    options: dict[str, Any] = {"socket_timeout": seconds, "decode_responses": False, **QUIET}
    if not url.startswith("unix:"):
        options["socket_connect_timeout"] = CONNECT_SECONDS
    return options


def connect(url: str, seconds: float = COMMAND_SECONDS) -> redis.Redis:
    """A blocking client, for threads of their own."""
    return redis.Redis.from_url(url, **_options(url, seconds))


def connect_async(url: str, seconds: float = COMMAND_SECONDS) -> redis.asyncio.Redis:
    """A client for an event loop."""
    return redis.asyncio.Redis.from_url(url, **_options(url, seconds))


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
    """Ping once, for a second or two. Returns "" if Redis answers, a refusal included, else its address and the reason."""
    check_url(url)
    client = connect(url)
    try:
        client.ping()
    except redis.exceptions.NoPermissionError:
        return ""  # of the right to ping
    except (redis.RedisError, OSError) as error:
        return f"no Redis answers at {without_password(url)} ({error})"
    finally:
        client.close()
    return ""
