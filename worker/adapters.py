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
from cluster.errors import AdapterSlotsError, BatonError, ModelError, cut
from cluster.membership.wanted_adapters import Wanted
from engine.lora.loaded import ASK_SECONDS, READ_SECONDS, read_too_slowly
from worker.engine_host import EngineHost

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after an adapter could not be loaded
Pairs = tuple[tuple[str, str], ...]  # name, digest
_Key = tuple[str, Wanted]  # with the name


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
        try:
            read = await asyncio.to_thread(self._wanted)
        except redis.RedisError as error:
            log.debug("the wanted adapters are unknown: %s", error)
            return
        own = {name: one for name, one in read.items() if one.is_for(self._served_model)}
        wanted = {name: one for name, one in own.items() if name not in self._fixed}
        await self._release([name for name, one in self._loaded.items() if wanted.get(name) != one.wanted])
        for name, one in wanted.items():
            if name not in self._loaded:
                await self._try(name, one)
        self.refusals = {name: why for name, why in self.refusals.items() if name in wanted}
        self._retry_at = {key: at for key, at in self._retry_at.items() if wanted.get(key[0]) == key[1]}
        self._without_slot = {
            key: one for key, one in self._without_slot.items() if wanted.get(key[0]) == key[1]
        }
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
        except Exception as error:  # of one adapter: the others are loaded and unloaded even so
            why = cut(error.message if isinstance(error, BatonError) else repr(error))
            if self.refusals.get(name) != why:
                log.warning("adapter %s is not loaded from %s: %s", name, wanted.path, why)
            self.refusals[name] = why
            if not isinstance(error, AdapterSlotsError):  # a slot may be free at the next look
                self._retry_at[key] = self._clock() + RETRY_SECONDS
            return
        self.refusals.pop(name, None)
        self._loaded[name] = _Loaded(wanted, digest)

    async def _load(self, key: _Key) -> str:
        """Returns the digest. Raises AdapterSlotsError, ModelError, DeadlineError and whatever the directory raises."""
        if len(self.pairs) >= MAX_ADAPTERS:  # of a registration; several names may be of one adapter
            raise AdapterSlotsError(f"{MAX_ADAPTERS} names of adapters are loaded", limit=str(MAX_ADAPTERS))
        known = self._without_slot.get(key)
        if known is not None:
            held = frozenset(self._held())
            if not await self._host.call(lambda engine: engine.adapter_fits(known, held)):
                raise AdapterSlotsError(self.refusals[key[0]], field="max_loras")  # not read again for that
        digest = await self._read(await asyncio.to_thread(self._inside, key[1].path))
        held = frozenset(self._held())
        try:
            await self._host.call(lambda engine: engine.write_adapter(digest, held))
        except AdapterSlotsError:
            self._without_slot[key] = digest
            raise
        return digest

    async def _read(self, directory: Path) -> str:
        """Let all ranks read it, while steps go on; returns the digest."""
        await self._host.call(lambda engine: engine.adapters.begin(directory))
        deadline = self._clock() + READ_SECONDS
        while (digest := await self._host.call(lambda engine: engine.adapters.read_digest())) is None:
            if self._clock() > deadline:
                await self._host.call(lambda engine: engine.adapters.drop())
                raise read_too_slowly(READ_SECONDS)
            await asyncio.sleep(ASK_SECONDS)
        return digest

    def _inside(self, path: str) -> Path:
        """Blocks, as links are followed in a directory that may be mounted. Raises ModelError if links lead out of the
        directory, RuntimeError, OSError."""
        root = self._directory.resolve()
        found = (root / path).resolve()
        if not found.is_relative_to(root) or found == root:
            raise ModelError(f"{path} is not below lora_dir", field="lora_dir")
        return found
