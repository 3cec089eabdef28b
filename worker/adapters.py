"""Loads and unloads adapters while the worker serves, as Redis names them (cluster/membership/wanted_adapters.py).

wanted ──► read and written to a slot ──► registered: routers place its requests here
  gone ──► not registered, new requests are refused ──► its last request has ended ──► the slot is free
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import redis

from cluster.config.adapters import MAX_ADAPTERS
from cluster.errors import AdapterSlotsError, BatonError, InvalidRequestError, ModelError, cut
from cluster.membership.wanted_adapters import Wanted
from engine.lora.adapter_files import Adapter
from worker.engine_host import EngineHost

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after an adapter could not be loaded
Pairs = tuple[tuple[str, str], ...]  # name, digest


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
        wanted: Callable[[], Mapping[str, Wanted]],
        read_adapter: Callable[[Path], Adapter],
        publish: Callable[[Pairs], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`fixed`: those of the settings, which stay. `wanted`, `read_adapter` and `publish` block and are called on
        threads; `publish` returns False if it has to be called again."""
        self._fixed, self._directory, self._host = dict(fixed), directory, host
        self._wanted, self._read, self._publish = wanted, read_adapter, publish
        self._clock = clock
        self._loaded: dict[str, _Loaded] = {}
        self._leaving: set[str] = set()  # digests
        self._retry_at: dict[tuple[str, Wanted], float] = {}
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
        wanted = {name: one for name, one in read.items() if name not in self._fixed}
        for name in [name for name in self._loaded if name not in wanted]:
            self._leaving.add(self._loaded.pop(name).digest)
        for name, one in wanted.items():
            if name not in self._loaded or self._loaded[name].wanted != one:
                await self._load(name, one)
        self.refusals = {name: why for name, why in self.refusals.items() if name in wanted}
        self._retry_at = {key: at for key, at in self._retry_at.items() if wanted.get(key[0]) == key[1]}
        if self.pairs != self._published:
            pairs = self.pairs
            self._published = pairs if await asyncio.to_thread(self._publish, pairs) else None
        await self._unload()

    async def _load(self, name: str, wanted: Wanted) -> None:
        if self._clock() < self._retry_at.get((name, wanted), 0.0):
            return
        before = self._loaded.pop(
            name, None
        )  # also if the new one can't be loaded: the name means another one now
        if before is not None:
            self._leaving.add(before.digest)
        try:
            if len(self.pairs) >= MAX_ADAPTERS:  # of a registration; several names may be of one adapter
                raise AdapterSlotsError(
                    f"{MAX_ADAPTERS} names of adapters are loaded", limit=str(MAX_ADAPTERS)
                )
            adapter = await asyncio.to_thread(self._read_inside, wanted.path)
            await self._host.call(lambda engine: engine.adapters.load(adapter))
        except Exception as error:  # of one adapter: the others are loaded and unloaded even so
            why = cut(error.message if isinstance(error, BatonError) else repr(error))
            log.warning("adapter %s is not loaded from %s: %s", name, wanted.path, why)
            self.refusals[name] = why
            self._retry_at[name, wanted] = self._clock() + RETRY_SECONDS
            return
        self.refusals.pop(name, None)
        self._loaded[name] = _Loaded(wanted, adapter.digest)

    def _read_inside(self, path: str) -> Adapter:
        """Blocks, as links are followed in a directory that may be mounted. Raises ModelError, RuntimeError, OSError."""
        return self._read(self._inside(path))

    def _inside(self, path: str) -> Path:
        """Raises ModelError if links lead out of the directory."""
        root = self._directory.resolve()
        found = (root / path).resolve()
        if not found.is_relative_to(root) or found == root:
            raise ModelError(f"{path} is not below lora_dir", field="lora_dir")
        return found

    async def _unload(self) -> None:
        self._leaving -= {digest for _, digest in self.pairs}
        for digest in sorted(self._leaving):
            try:
                await self._host.call(lambda engine, digest=digest: engine.unload_adapter(digest))  # type: ignore[misc]
            except InvalidRequestError:
                continue  # in use; `request_seconds` of the routers bounds how long
            self._leaving.discard(digest)
