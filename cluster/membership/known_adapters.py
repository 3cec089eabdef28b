"""The wanted adapters as a process has last read them, and the changes among them that Redis has lost.

Workers and routers read the hash every second and remember the last change of each name, by its number. A name in Redis
with a lower number, or with none, was lost: Redis was emptied or rolled back. It counts as it is remembered, and is
written back unless a later change is there meanwhile. So removals are written back like entries: a worker that was cut
off when an adapter was unloaded does not bring it back.

An entry without a number is of a router of an earlier version: it counts as long as it is there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import redis

from cluster.config.adapters import MAX_ADAPTERS, is_adapter_name
from cluster.errors import InvalidRequestError
from cluster.membership import keys
from cluster.membership.wanted_adapters import Wanted, check_path, parse
from cluster.periodic import Periodic
from cluster.protocol.times import LEASE_DEAD_SECONDS
from cluster.redis.connect import connect, connect_async
from cluster.redis.failover import disconnect_after_failover, disconnect_after_failover_async

POLL_SECONDS = 1.0
MAX_REMOVED = 256  # names that are remembered as removed; the last ones
_MARK = b"~"  # in front of a name: no name begins so
log = logging.getLogger(__name__)
_HEAD = resources.files("cluster.membership").joinpath("adapters.lua").read_text()
# ARGV: name entry MAX_ADAPTERS → 1: added, 0: the name is taken, -1: there are so many others
ADD = (
    _HEAD
    + """
local found, entries = read()
if found[ARGV[1]] then return 0 end
if entries >= tonumber(ARGV[3]) then return -1 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], '~' .. ARGV[1], next_number(found['~' .. ARGV[1]]))
return 1
"""
)
# ARGV: name tag MAX_REMOVED; tag "": of whatever entry is there → 1: removed, 0: it was not there
REMOVE = (
    _HEAD
    + """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held or (ARGV[2] ~= '' and cjson.decode(held)[2] ~= ARGV[2]) then return 0 end
local number = next_number(redis.call('HGET', KEYS[1], '~' .. ARGV[1]))
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], '~' .. ARGV[1], number)
forget(tonumber(ARGV[3]))
return 1
"""
)
# ARGV: MAX_ADAPTERS MAX_REMOVED, then name number entry of each; entry "": it was removed. What is there without a number,
# or with this one or a later one, stays.
RESTORE = (
    _HEAD
    + """
local found, entries = read()
for i = 3, #ARGV, 3 do
  local name, mark, entry = ARGV[i], '~' .. ARGV[i], ARGV[i + 2]
  local there, last = found[name], tonumber(found[mark] or '')
  if (last or not there) and tonumber(ARGV[i + 1]) > (last or 0) then
    if entry == '' then
      redis.call('HDEL', KEYS[1], name)
      redis.call('HSET', KEYS[1], mark, ARGV[i + 1])
    elseif there or entries < tonumber(ARGV[1]) then
      if not there then entries = entries + 1 end
      redis.call('HSET', KEYS[1], name, entry, mark, ARGV[i + 1])
    end
  end
end
forget(tonumber(ARGV[2]))
return 1
"""
)


class Change(NamedTuple):
    number: int
    entry: Wanted | None  # None: it was removed


class KnownAdapters:
    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}  # of names with a number
        self.wanted: Mapping[str, Wanted] = {}  # by name; the same object while nothing changes

    def take(self, read: Mapping[bytes, bytes]) -> dict[str, Change]:
        """Take what Redis has. Returns what it has lost, for `arguments`."""
        entries = parse({name: entry for name, entry in read.items() if not name.startswith(_MARK)})
        there = _numbered(read, entries)
        unnumbered = {name: one for name, one in entries.items() if name not in there}
        lost = {
            name: change
            for name, change in self._changes.items()
            if (change.number > there[name].number if name in there else name.encode() not in read)
        }
        self._changes = _last_removed({**there, **lost})
        wanted = unnumbered | {name: one.entry for name, one in self._changes.items() if one.entry}
        if wanted != self.wanted:
            self.wanted = dict(sorted(wanted.items()))
        return {name: change for name, change in lost.items() if name in self._changes}


def arguments(lost: Mapping[str, Change]) -> list[str | int]:
    """ARGV of RESTORE."""
    found: list[str | int] = [MAX_ADAPTERS, MAX_REMOVED]
    for name, change in lost.items():
        found += [name, change.number, change.entry.encode() if change.entry else ""]
    return found


def _numbered(read: Mapping[bytes, bytes], entries: Mapping[str, Wanted]) -> dict[str, Change]:
    """Names that have a number, but for those whose entries are not understood."""
    found = {}
    for field, number in read.items():
        if not field.startswith(_MARK):
            continue
        name, digits = field[1:].decode(errors="replace"), number.decode(errors="replace")
        if not is_adapter_name(name) or not (digits.isascii() and digits.isdigit() and len(digits) <= 15):
            log.debug("the number of adapter %r is ignored: %r", name, number)
        elif name in entries or field[1:] not in read:
            found[name] = Change(int(digits), entries.get(name))
    return found


def _last_removed(changes: Mapping[str, Change]) -> dict[str, Change]:
    """The changes without removals beyond the last MAX_REMOVED: the same that RESTORE drops, or writing back would not
    end."""
    removed = sorted((change.number, name) for name, change in changes.items() if change.entry is None)
    dropped = {name for _, name in removed[:-MAX_REMOVED]}
    return {name: change for name, change in changes.items() if name not in dropped}


class WantedAdapters:
    """The wanted adapters as a router reads them: `wanted` is read every POLL_SECONDS from `start` on, and stays while
    Redis does not answer."""

    def __init__(self, redis_url: str, namespace: str):
        self._redis_url = redis_url
        self._key = keys.adapters(namespace)
        self._connected: Any = None  # at the first call
        self._known = KnownAdapters()
        self._looking = Periodic("reading the wanted adapters", POLL_SECONDS, self._look)

    @property
    def wanted(self) -> Mapping[str, Wanted]:
        """The wanted adapters by name; the same object while nothing changes."""
        return self._known.wanted

    @property
    def _client(self) -> Any:
        if self._connected is None:
            self._connected = connect_async(self._redis_url)
        return self._connected

    async def start(self) -> None:
        await self._look()
        self._looking.start()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(LEASE_DEAD_SECONDS / 5):
                await self.refresh()
        except (redis.RedisError, OSError) as error:
            log.debug("the wanted adapters are unknown: %s", error)

    async def refresh(self) -> None:
        """Read what Redis has, and write back what it has lost. Raises redis.RedisError."""
        try:
            if lost := self._known.take(await self._client.hgetall(self._key)):
                await self._client.eval(RESTORE, 1, self._key, *arguments(lost))
        except redis.RedisError as error:
            await disconnect_after_failover_async(self._client, error)
            raise

    async def add(self, name: str, path: str, serving: Sequence[str] = ()) -> Wanted:
        """Returns the entry. Raises InvalidRequestError if the name is taken or there are too many, redis.RedisError."""
        entry = Wanted.new(check_path(path), serving)
        await self.refresh()  # in an emptied Redis every name would be free
        # One script: routers that add at once would each see room for theirs.
        added = await self._client.eval(ADD, 1, self._key, name, entry.encode(), MAX_ADAPTERS)
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
        await self._look()
        return entry

    async def find(self, name: str) -> Wanted | None:
        """None if there is none, or one that is not understood. Raises redis.RedisError."""
        await self.refresh()
        return self.wanted.get(name)

    async def remove(self, name: str, entry: Wanted | None) -> bool:
        """Whether it was there: `entry`, and no other one that has come in its place; None: whatever is there, since
        `find` did not understand it. Raises redis.RedisError."""
        if name.startswith(_MARK.decode()):  # what is there is the number of another name
            return False
        tag = entry.tag if entry is not None else ""
        removed = await self._client.eval(REMOVE, 1, self._key, name, tag, MAX_REMOVED)
        await self._look()
        return bool(removed)

    async def close(self) -> None:
        await self._looking.close(LEASE_DEAD_SECONDS)
        if self._connected is not None:
            await self._connected.aclose()


class WantedReader:
    """The wanted adapters as a worker reads them. Its methods block."""

    def __init__(self, redis_url: str, namespace: str):
        self._client = connect(redis_url)
        self._key = keys.adapters(namespace)
        self._known = KnownAdapters()
        self._turn = threading.Lock()  # a call that was given up may still wait for Redis

    def read(self) -> Mapping[str, Wanted]:
        """Read what Redis has, and write back what it has lost. Raises redis.RedisError if it cannot be read."""
        with self._turn:
            return self._read()

    def _read(self) -> Mapping[str, Wanted]:
        try:
            entries: Any = self._client.hgetall(self._key)
        except redis.RedisError as error:
            disconnect_after_failover(self._client, error)
            raise
        if lost := self._known.take(entries):
            self._restore(lost)
        return self._known.wanted

    def _restore(self, lost: Mapping[str, Change]) -> None:
        """Write changes back. Where this fails, the next reading does it."""
        try:
            self._client.eval(RESTORE, 1, self._key, *arguments(lost))
        except redis.RedisError as error:
            log.debug("wanted adapters that Redis has lost are not written back: %s", error)
            disconnect_after_failover(self._client, error)

    def close(self) -> None:
        self._client.close()
