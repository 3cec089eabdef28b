"""Redis connections. Every command has a deadline, so a hung Redis blocks no caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio

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
