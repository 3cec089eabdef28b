"""The adapters that an administrator wants loaded besides those of the workers' settings: names and directories in Redis.

Each entry has a tag of its own, so that a directory that is loaded again under its name is read again.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from cluster.config.adapters import MAX_ADAPTERS, is_adapter_name
from cluster.errors import InvalidRequestError
from cluster.membership import keys
from cluster.redis.connect import connect, connect_async

MAX_PATH = 512
log = logging.getLogger(__name__)
# 1: added, 0: the name is taken, -1: there are ARGV[3] others
_ADD = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return -1 end
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""
_REMOVE = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held or cjson.decode(held)[2] ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


class Wanted(NamedTuple):
    path: str  # below the workers' lora_dir
    tag: str
    serving: tuple[str, ...] = ()  # names with which the workers of its model register; none: all workers

    @classmethod
    def new(cls, path: str, serving: Sequence[str] = ()) -> Wanted:
        return cls(path, secrets.token_hex(8), tuple(serving))

    def encode(self) -> str:
        return json.dumps(self if self.serving else self[:2])

    def is_for(self, served_model: str) -> bool:
        """Whether a worker that registers with this name is to load it."""
        return not self.serving or served_model in self.serving


def check_path(path: str) -> str:
    """Raises InvalidRequestError unless it leads to a directory below another one."""
    parts = PurePosixPath(path).parts
    if not parts or len(path) > MAX_PATH or path.startswith("/") or ".." in parts or not path.isprintable():
        raise InvalidRequestError(
            f"lora_path: a relative path below the workers' lora_dir, without .., of at most {MAX_PATH} characters",
            field="lora_path",
            limit=str(MAX_PATH),
        )
    return path


def parse(entries: Mapping[bytes, bytes]) -> dict[str, Wanted]:
    """By name. What is not understood is left out: one wrong entry must not keep others from being loaded."""
    found = {}
    for name, entry in sorted(entries.items())[:MAX_ADAPTERS]:
        try:
            path, tag, *rest = json.loads(entry)
            serving = rest[0] if rest else []
            if not is_adapter_name(name.decode()) or type(tag) is not str or type(serving) is not list:
                raise ValueError("no name, tag and models")
            found[name.decode()] = Wanted(check_path(path), tag, tuple(map(str, serving)))
        except (ValueError, TypeError, AttributeError, RecursionError, InvalidRequestError) as error:
            log.debug("the entry of adapter %r is ignored: %r", name, error)
    return found


class WantedWriter:
    """For a router; connects at its first call."""

    def __init__(self, redis_url: str, namespace: str):
        self._redis_url = redis_url
        self._key = keys.adapters(namespace)
        self._connected: Any = None

    @property
    def _client(self) -> Any:
        if self._connected is None:
            self._connected = connect_async(self._redis_url)
        return self._connected

    async def add(self, name: str, path: str, serving: Sequence[str] = ()) -> Wanted:
        """Returns the entry. Raises InvalidRequestError if the name is taken or there are too many, redis.RedisError."""
        entry = Wanted.new(check_path(path), serving)
        # One script: routers that add at once would each see room for theirs.
        added = await self._client.eval(_ADD, 1, self._key, name, entry.encode(), MAX_ADAPTERS)
        if added < 0:
            raise InvalidRequestError(
                f"lora_name: {MAX_ADAPTERS} adapters are wanted already; unload one",
                field="lora_name",
                limit=str(MAX_ADAPTERS),
            )
        if not added:
            raise InvalidRequestError(
                f"lora_name: {name!r} is wanted already; unload it first", field="lora_name"
            )
        return entry

    async def find(self, name: str) -> Wanted | None:
        """None if there is none, or one that is not understood. Raises redis.RedisError."""
        entry = await self._client.hget(self._key, name)
        return parse({name.encode(): entry}).get(name) if entry is not None else None

    async def remove(self, name: str, entry: Wanted | None) -> bool:
        """Whether it was there: `entry`, and no other one that has come in its place; None: whatever is there, since
        `find` did not understand it. Raises redis.RedisError."""
        if entry is None:
            return bool(await self._client.hdel(self._key, name))
        return bool(await self._client.eval(_REMOVE, 1, self._key, name, entry.tag))

    async def close(self) -> None:
        if self._connected is not None:
            await self._connected.aclose()


class WantedReader:
    """For a worker. Blocks."""

    def __init__(self, redis_url: str, namespace: str):
        self._client = connect(redis_url)
        self._key = keys.adapters(namespace)

    def read(self) -> dict[str, Wanted]:
        """Raises redis.RedisError."""
        entries: Any = self._client.hgetall(self._key)
        return parse(entries)

    def close(self) -> None:
        self._client.close()
