"""Loads and unloads adapters while the worker serves, as Redis names them (cluster/membership/wanted_adapters.py).

wanted ──► read by all ranks beside the steps ──► written to a slot ──► registered: routers place its requests here
  gone ──► not registered; it stays for requests that began before, until another adapter needs its slot
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import redis

from cluster.config.adapters import MAX_ADAPTERS
from cluster.errors import AdapterSlotsError, BatonError, cut
from cluster.membership.wanted_adapters import Wanted
from engine.lora.loaded import ASK_SECONDS, READ_SECONDS, read_too_slowly
from worker.engine_host import EngineHost

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after an adapter could not be loaded
Pairs = tuple[tuple[str, str], ...]  # name, digest
_Key = tuple[str, Wanted]  # with the name


class _NotWantedError(Exception):
    """Its entry in Redis has gone or changed."""


class _Loaded(NamedTuple):
    wanted: Wanted
    digest: str


class AdapterChanges:
    """`follow` on the worker's loop, one call at a time."""

    def __init__(
        self,
        fixed: Pairs,
        directory: Path,
        host: EngineHost,
        *,
        served_model: str,
        wanted: Callable[[], Mapping[str, Wanted]],
        held: Callable[[], Collection[str]],
        publish: Callable[[Pairs], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`fixed`: those of the settings, which stay. `held`: digests that the worker's requests have, also those that are
        not in the engine. `wanted` and `publish` block and are called on threads; `publish` returns False if it has to be
        called again."""
        self._fixed, self._directory, self._host = dict(fixed), directory, host
        self._served_model = served_model
        self._wanted, self._held, self._publish = wanted, held, publish
        self._clock = clock
        self._now: Mapping[str, Wanted] = {}  # wanted when Redis was read last, without those of the settings
        self._loaded: dict[str, _Loaded] = {}
        self._retry_at: dict[_Key, float] = {}
        self._without_slot: dict[_Key, str] = {}  # digests of those that were read
        self._published: Pairs | None = fixed  # None: unknown, a registration failed
        self.refusals: dict[str, str] = {}  # by name, of those that could not be loaded

    @property
    def pairs(self) -> Pairs:
        return (*self._fixed.items(), *((name, one.digest) for name, one in self._loaded.items()))

    @property
    def refused_text(self) -> str | None:
        """For the worker's status. Any thread."""
        return cut("; ".join(f"{name}: {why}" for name, why in list(self.refusals.items()))) or None

    async def follow(self) -> None:
        """Take over what has changed in Redis."""
        if not await self._look():
            return
        for name, one in self._now.items():  # what is found meanwhile is another mapping
            if name not in self._loaded and self._now.get(name) == one:
                await self._try(name, one)
        now = self._now
        self.refusals = {name: why for name, why in self.refusals.items() if name in now}
        self._retry_at = {key: at for key, at in self._retry_at.items() if now.get(key[0]) == key[1]}
        self._without_slot = {
            key: one for key, one in self._without_slot.items() if now.get(key[0]) == key[1]
        }
        await self._announce()

    async def _look(self) -> bool:
        """Find out what is wanted, and give up at once what is not any more, which other adapters' files must not delay.
        False if Redis does not answer."""
        try:
            read = await asyncio.to_thread(self._wanted)
        except redis.RedisError as error:
            log.debug("the wanted adapters are unknown: %s", error)
            return False
        own = {name: one for name, one in read.items() if one.is_for(self._served_model)}
        self._now = {name: one for name, one in own.items() if name not in self._fixed}
        gone = [name for name, one in self._loaded.items() if self._now.get(name) != one.wanted]
        if gone:
            await self._release(gone)
            await self._announce()
        return True

    async def _announce(self) -> None:
        if self.pairs != self._published:
            pairs = self.pairs
            self._published = pairs if await asyncio.to_thread(self._publish, pairs) else None

    async def _release(self, names: Sequence[str]) -> None:
        """Give up these names; also that of one which is then not loaded: the name means another one now."""
        gone = {self._loaded.pop(name).digest for name in names}
        for digest in sorted(gone - {digest for _, digest in self.pairs}):
            await self._host.call(lambda engine, digest=digest: engine.adapters.release(digest))  # type: ignore[misc]

    async def _try(self, name: str, wanted: Wanted) -> None:
        key = name, wanted
        if self._clock() < self._retry_at.get(key, 0.0):
            return
        try:
            digest = await self._load(key)
        except _NotWantedError:
            return
        except Exception as error:  # of one adapter: the others are loaded and unloaded even so
            why = cut(error.message if isinstance(error, BatonError) else repr(error))
            if self.refusals.get(name) != why:
                log.warning("adapter %s is not loaded from %s: %s", name, wanted.path, why)
            self.refusals[name] = why
            if not isinstance(error, AdapterSlotsError):  # a slot may be free at the next look
                self._retry_at[key] = self._clock() + RETRY_SECONDS
                self._without_slot.pop(key, None)
            return
        self.refusals.pop(name, None)
        self._loaded[name] = _Loaded(wanted, digest)

    async def _load(self, key: _Key) -> str:
        """Returns the digest. Raises AdapterSlotsError, ModelError, DeadlineError, _NotWantedError."""
        if len(self.pairs) >= MAX_ADAPTERS:  # of a registration; several names may be of one adapter
            raise AdapterSlotsError(f"{MAX_ADAPTERS} names of adapters are loaded", limit=str(MAX_ADAPTERS))
        known = self._without_slot.get(key)
        if known is not None:
            held = frozenset(self._held())
            if not await self._host.call(lambda engine: engine.adapter_fits(known, held)):
                raise AdapterSlotsError(self.refusals[key[0]], field="max_loras")  # not read again for that
        digest = await self._read(key)
        held = frozenset(self._held())
        try:
            await self._host.call(lambda engine: engine.write_adapter(digest, held))
        except AdapterSlotsError:
            self._without_slot[key] = digest
            raise
        return digest

    async def _read(self, key: _Key) -> str:
        """Let all ranks read it, while steps go on; returns the digest. Raises _NotWantedError once it is not wanted:
        routers would take it for its successor of the same name."""
        root, directory = self._directory, self._directory / key[1].path
        await self._host.call(lambda engine: engine.adapters.begin(directory, below=root))
        began = looked = self._clock()
        while True:
            digest = await self._host.call(lambda engine: engine.adapters.read_digest())
            now = self._clock()
            if digest is not None or now - looked >= LOOK_SECONDS:
                await self._look()
                looked = now
                if self._now.get(key[0]) != key[1]:
                    await self._host.call(lambda engine: engine.adapters.drop())
                    raise _NotWantedError
            if digest is not None:
                return digest
            if now - began > READ_SECONDS:
                await self._host.call(lambda engine: engine.adapters.drop())
                raise read_too_slowly(READ_SECONDS)
            await asyncio.sleep(ASK_SECONDS)
