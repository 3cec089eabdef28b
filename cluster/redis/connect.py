"""Connections. Every command has a deadline: a hung Redis must not hang us."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

CONNECT_SECONDS = 1.0
COMMAND_SECONDS = 1.0


def _options(url: str, seconds: float) -> dict[str, Any]:
    options: dict[str, Any] = {"socket_timeout": seconds, "decode_responses": False}
    if not url.startswith("unix:"):
        options["socket_connect_timeout"] = CONNECT_SECONDS
    return options


def connect(url: str, seconds: float = COMMAND_SECONDS) -> redis.Redis:
    """For a thread of its own (registration)."""
    return redis.Redis.from_url(url, **_options(url, seconds))


def connect_async(url: str, seconds: float = COMMAND_SECONDS) -> redis.asyncio.Redis:
    """For an event loop (routers)."""
    return redis.asyncio.Redis.from_url(url, **_options(url, seconds))
