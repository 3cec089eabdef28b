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


def without_password(url: str) -> str:
    """The URL as it may be shown: user and password are stars, wherever they stand in it."""
    scheme, mark, rest = url.partition("://")
    address, question, query = rest.partition("?")
    _, at, host = address.rpartition("@")
    shown = [name if "password" not in name else f"{name.partition('=')[0]}=***" for name in query.split("&")]
    return f"{scheme}{mark}{'***@' if at else ''}{host}{question}{'&'.join(shown)}"


def connect(url: str, seconds: float = COMMAND_SECONDS) -> redis.Redis:
    """For a thread of its own (registration)."""
    return redis.Redis.from_url(url, **_options(url, seconds))


def connect_async(url: str, seconds: float = COMMAND_SECONDS) -> redis.asyncio.Redis:
    """For an event loop (routers)."""
    return redis.asyncio.Redis.from_url(url, **_options(url, seconds))
