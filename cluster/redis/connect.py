"""Redis connections. Every command has a deadline, so a hung Redis blocks no caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
from redis.connection import parse_url

from cluster.errors import ConfigError
from cluster.redis.finder import Finder
from cluster.redis.replies import BoundedAsyncParser, BoundedParser
from cluster.redis.urls import Address, seeds_of, without_password

CONNECT_SECONDS = 1.0
COMMAND_SECONDS = 1.0
# No CLIENT SETINFO: Redis's users of components may not call it, and each refusal would stand in Redis's ACL LOG.
QUIET: Mapping[str, Any] = {"driver_info": None}


class _Found(redis.Connection):
    """A connection to the server that `finder` names when it connects. Its pool calls `connect` before each use."""

    def __init__(self, *, finder: Finder, **options: Any):
        self._finder = finder
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def connect(self) -> None:
        if self.is_connected and self._finder.replaced(Address(self.host, self.port)):
            self.disconnect()  # type: ignore[no-untyped-call]
        if not self.is_connected:
            self.host, self.port = self._finder.find()
        super().connect()  # type: ignore[no-untyped-call]


class _FoundTls(_Found, redis.SSLConnection):
    pass


class _FoundAsync(redis.asyncio.Connection):
    def __init__(self, *, finder: Finder, **options: Any):
        self._finder = finder
        super().__init__(**options)

    @property
    def replaced(self) -> bool:
        """Whether another server has taken over the keys since this connection was opened."""
        return self._finder.replaced(Address(self.host, self.port))

    async def connect(self) -> None:
        if self.is_connected and self.replaced:
            await self.disconnect(nowait=True)
        if not self.is_connected:
            self.host, self.port = await self._finder.find_async()
        await super().connect()  # type: ignore[no-untyped-call]


class _FoundTlsAsync(_FoundAsync, redis.asyncio.SSLConnection):
    pass


def _options(url: str, seconds: float | None) -> dict[str, Any]:
    options: dict[str, Any] = {"socket_timeout": seconds, "decode_responses": False, **QUIET}
    if seconds is not None and not url.startswith("unix:"):
        options["socket_connect_timeout"] = CONNECT_SECONDS
    return options


def connect(url: str, seconds: float = COMMAND_SECONDS) -> redis.Redis:
    """A blocking client, for threads of their own."""
    seeds, options = seeds_of(url), {**_options(url, seconds), "parser_class": BoundedParser}
    if seeds is None:
        return redis.Redis.from_url(url, **options)
    connection = _FoundTls if seeds.tls else _Found
    pool = redis.ConnectionPool(connection, finder=Finder(seeds), **{**seeds.options, **options})
    return redis.Redis.from_pool(pool)


def connect_async(url: str, seconds: float = COMMAND_SECONDS) -> redis.asyncio.Redis:
    """A client for an event loop."""
    return redis.asyncio.Redis.from_pool(pool_async(url, seconds))


def pool_async(url: str, seconds: float | None) -> redis.asyncio.ConnectionPool:
    """Connections for an event loop. `seconds` None: without deadlines, which its user then sets."""
    seeds, options = seeds_of(url), {**_options(url, seconds), "parser_class": BoundedAsyncParser}
    if seeds is None:
        return redis.asyncio.ConnectionPool.from_url(url, **options)
    connection = _FoundTlsAsync if seeds.tls else _FoundAsync
    return redis.asyncio.ConnectionPool(connection, finder=Finder(seeds), **{**seeds.options, **options})


def check_url(url: str) -> None:
    """Raise ConfigError if `url` is not a Redis URL. The message leaves the URL out, which may hold a password."""
    if seeds_of(url) is not None:
        return
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigError(
            "redis_url is not a Redis URL; write for example redis://host:6379, rediss://host:6379 (TLS), "
            "redis+sentinel://host:26379,host:26379/master, redis+cluster://host:6379,host:6379 or "
            "unix:///path/of/its.sock",
            field="redis_url",
        ) from None


def why_silent(url: str, advice: str = "") -> str:
    """Ping once, for a second or two. Returns "" if Redis answers, also without the right to ping; else its address, the
    reason and what to do, which is `advice` where nothing answers."""
    check_url(url)
    client, shown = connect(url), without_password(url)
    try:
        client.ping()
    except redis.exceptions.NoPermissionError:
        return ""
    except redis.exceptions.AuthenticationError as error:
        # Redis' own sentence on a missing password explains its HELLO command.
        reason = "it requires a password" if str(error).startswith("HELLO ") else str(error).rstrip(".")
        return f"Redis at {shown} refuses the login ({reason}): write redis://USER:PASSWORD@host, USER may be empty"
    except redis.exceptions.InvalidResponse as error:
        return f"what answers at {shown} is no Redis ({error}): check host and port"
    except (redis.RedisError, OSError) as error:
        found = f"no Redis answers at {shown} ({error}{_other_scheme(url, error)})"
        return f"{found}; {advice}" if advice else found
    finally:
        client.close()
    return ""


def _other_scheme(url: str, error: Exception) -> str:
    """The hint where one side may use TLS and the other not: a connection is there, and an answer is not."""
    refused = "refused" in str(error) or "resolve" in str(error) or "not known" in str(error)
    if refused or url.startswith("unix:"):
        return ""
    return "; rediss:// is for TLS only" if url.startswith("rediss") else "; with TLS write rediss://"
