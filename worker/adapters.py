"""Loads and unloads adapters while the worker serves, as Redis names them (cluster/membership/wanted_adapters.py).

wanted ──► read by all ranks beside the steps ──► written to a slot ──► registered: routers place its requests here
  gone ──► not registered; it stays for requests that began before, until another adapter needs its slot

Up to LANES adapters are read at the same time, each in a lane with its own deadline: files whose reads block (a mount
that hangs) delay their own adapter only. A thread that is still blocked keeps its lane, so such threads do not add up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import redis

from cluster.config.adapters import MAX_ADAPTERS
from cluster.errors import AdapterSlotsError, DrainingError, UnavailableError
from cluster.membership.adapter_refusals import Refusal, encode
from cluster.membership.wanted_adapters import Wanted
from engine.lora.loaded import ASK_SECONDS, READ_SECONDS, read_too_slowly
from engine.lora.message import LANES
from worker.engine_host import EngineHost

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after an adapter could not be loaded
START_SECONDS = 10.0  # for which a worker that starts waits for adapters
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
        self._unnamed: set[str] = set()  # digests whose slots are not given up yet
        self._published: Pairs | None = fixed  # None: unknown, a registration failed
        self._announcing: asyncio.Task[None] | None = None  # the last registration
        # Held while wanted, loaded or published change; not while files are read
        self._changing = asyncio.Lock()
        self._stopped = False
        self._followed = asyncio.Event()  # once
        self._loading: dict[asyncio.Task[None], tuple[_Key, int]] = {}  # with the lane
        # By lane, in the order in which they were found: readings that were given up while blocked
        self._blocked: dict[int, _Key] = {}
        self.refusals: dict[str, Refusal] = {}  # by name, of those that could not be loaded

    @property
    def pairs(self) -> Pairs:
        return (*self._fixed.items(), *((name, one.digest) for name, one in self._loaded.items()))

    @property
    def refused_text(self) -> str | None:
        """The refusals for the worker's status. Any thread."""
        return encode(dict(self.refusals))

    async def follow(self) -> None:
        """Load and unload as Redis says, and read it again every POLL_SECONDS; return once nothing is being loaded."""
        try:
            await self._follow()
        finally:
            self._followed.set()

    async def _follow(self) -> None:
        tried: set[_Key] = set()
        try:
            if not await self._look():
                return
            while not self._stopped:
                self._begin(tried)
                if not self._loading:
                    break
                done, _ = await asyncio.wait(
                    self._loading, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if self._stopped:
                    return
                for task in done:
                    del self._loading[task]
                    if not task.cancelled():  # with a former call of this
                        task.result()
                if done:
                    await self._announce()
                    continue
                await self._look()
                tried.clear()  # what waits for a slot does not wait for others' files
        finally:
            await self._give_up_all()
        if not self._stopped:
            await self._announce()

    async def wait_followed(self) -> None:
        """Wait until `follow` has ended once, for START_SECONDS at most: a worker that registered before would get
        requests for the model alone, and in a rolling update none might be left with the adapters."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._followed.wait()

    def stop(self) -> None:
        """Let `follow` return as soon as Redis has answered, whatever files are being read. It registers nothing more."""
        self._stopped = True
        for task in self._loading:
            task.cancel()

    async def _give_up_all(self) -> None:
        """Cancel what is being loaded; what was read is dropped. A registration that has begun is not cancelled: one that
        ended later than the worker leaves the registry would bring it back."""
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)
        self._loading.clear()
        if self._announcing is not None:
            await asyncio.wait([self._announcing])

    def _begin(self, tried: set[_Key]) -> None:
        """Begin to load adapters that are wanted, not loaded and not in `tried`, until all lanes are in use."""
        begun = {key[0] for key, _ in self._loading.values()}
        for key in self._now.items():
            if key[0] in self._loaded or key[0] in begun or key in tried:
                continue
            if self._clock() < self._retry_at.get(key, 0.0):
                continue
            lane = self._lane(key)
            if lane is None:
                return
            tried.add(key)
            self._loading[asyncio.create_task(self._try(key, lane))] = key, lane

    def _lane(self, key: _Key) -> int | None:
        """Return a lane that is not in use: the one in which this adapter's reading was blocked before, else one that is
        not blocked, else the one that was found blocked longest ago. None if all are in use."""
        used = {lane for _, lane in self._loading.values()}
        own = [lane for lane, of in self._blocked.items() if of == key]
        others = [lane for lane in range(LANES) if lane not in self._blocked]
        return next((lane for lane in (*own, *others, *self._blocked) if lane not in used), None)

    def _forget(self) -> None:
        """Drop refusals and retries of adapters that are not wanted any more."""
        now = self._now
        self.refusals = {name: why for name, why in self.refusals.items() if name in now}
        self._retry_at = {key: at for key, at in self._retry_at.items() if now.get(key[0]) == key[1]}
        self._without_slot = {
            key: one for key, one in self._without_slot.items() if now.get(key[0]) == key[1]
        }

    async def _look(self) -> bool:
        """Read from Redis what is wanted, and unload at once what is not any more: slow files of other adapters must not
        delay that. False if Redis does not answer."""
        async with self._changing:
            return await self._look_locked()

    async def _look_locked(self) -> bool:
        try:
            read = await asyncio.to_thread(self._wanted)
        except redis.RedisError as error:
            log.debug("the wanted adapters are unknown: %s", error)
            return False
        own = {name: one for name, one in read.items() if one.is_for(self._served_model)}
        self._now = {name: one for name, one in own.items() if name not in self._fixed}
        self._forget()
        gone = [name for name, one in self._loaded.items() if self._now.get(name) != one.wanted]
        if gone or (self._unnamed and self.pairs != self._published):
            self._unnamed.update(self._loaded.pop(name).digest for name in gone)
            # First, and to its end: nothing that is cancelled or fails delays it
            await self._announce_locked()
        if self.pairs == self._published:  # else routers may still place requests by the names
            await self._release()
        return True

    async def _announce(self) -> None:
        async with self._changing:
            await self._announce_locked()

    async def _announce_locked(self) -> None:
        """Register in a task that survives the caller's cancellation."""
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.create_task(self._register())
        await asyncio.shield(self._announcing)

    async def _register(self) -> None:
        """Publish until the registry has what is loaded, also what changes meanwhile."""
        while self.pairs != self._published:
            pairs, self._published = self.pairs, None  # unknown, if this fails
            if not await asyncio.to_thread(self._publish, pairs):
                return
            self._published = pairs
            if self._stopped:
                return

    async def _release(self) -> None:
        """Let other adapters have the slots of those without a name. What fails or is cancelled is repeated at the next
        look."""
        for digest in sorted(self._unnamed):
            if all(digest != named for _, named in self.pairs):
                await self._host.call(lambda engine, digest=digest: engine.adapters.release(digest))  # type: ignore[misc]
            self._unnamed.discard(digest)

    async def _try(self, key: _Key, lane: int) -> None:
        name, wanted = key
        try:
            await self._load(key, lane)
        except _NotWantedError:
            return
        except Exception as error:  # of one adapter: the others are loaded and unloaded even so
            refusal = Refusal.of(wanted.tag, error)
            if self.refusals.get(name) != refusal:
                log.warning("adapter %s is not loaded from %s: %s", name, wanted.path, refusal.message)
            self.refusals.pop(name, None)  # the last ones are shown
            self.refusals[name] = refusal
            if not isinstance(error, AdapterSlotsError):  # a slot may be free at the next look
                self._retry_at[key] = self._clock() + RETRY_SECONDS
                self._without_slot.pop(key, None)
            return
        self.refusals.pop(name, None)

    async def _load(self, key: _Key, lane: int) -> None:
        """Raises AdapterSlotsError, _NotWantedError, and what `_read` does."""
        self._check_names()
        known = self._without_slot.get(key)
        if known is not None:
            held = frozenset(self._held())
            if not await self._host.call(lambda engine: engine.adapter_fits(known, held)):
                raise self._refused_before(key)  # not read again for that
        try:
            digest = await self._read(key, lane)
            async with self._changing:
                await self._look_locked()  # routers would take it for its successor of the same name
                if self._now.get(key[0]) != key[1]:
                    raise _NotWantedError
                self._check_names()
                await self._write(key, digest, frozenset(self._held()), lane)
        except BaseException:  # however it ends, also if it is cancelled
            await self._undo(lambda engine: engine.adapters.drop(lane))
            raise

    async def _write(self, key: _Key, digest: str, held: frozenset[str], lane: int) -> None:
        """Raises AdapterSlotsError."""
        try:
            await self._host.call(lambda engine: engine.write_adapter(digest, held, lane))
        except AdapterSlotsError:
            self._without_slot[key] = digest
            raise
        except BaseException:  # the engine may have written it all the same
            if all(digest != loaded for _, loaded in self.pairs):
                await self._undo(lambda engine: engine.adapters.release(digest))
            raise
        self._loaded[key[0]] = _Loaded(key[1], digest)

    async def _undo(self, function: Callable[[Engine], None]) -> None:
        """The engine runs it even if this is cancelled meanwhile; one that has stopped has nothing to give back."""
        with contextlib.suppress(DrainingError):
            await self._host.call(function)

    def _check_names(self) -> None:
        """Raises AdapterSlotsError."""
        if len(self.pairs) >= MAX_ADAPTERS:  # of a registration; several names may be of one adapter
            raise AdapterSlotsError(f"{MAX_ADAPTERS} names of adapters are loaded", limit=str(MAX_ADAPTERS))

    def _refused_before(self, key: _Key) -> AdapterSlotsError:
        """Raises _NotWantedError."""
        former = self.refusals.get(key[0])
        if former is None:
            raise _NotWantedError  # since this was tried
        wait = 0.0 if former.final else POLL_SECONDS
        return AdapterSlotsError(former.message, field="max_loras", retry_after_seconds=wait)

    async def _read(self, key: _Key, lane: int) -> str:
        """Let all ranks read it, while steps go on; returns the digest. What was read stays in the lane. Raises
        _NotWantedError once it is not wanted, ModelError, DeadlineError, UnavailableError while an earlier reading blocks
        the lane."""
        root, directory = self._directory, self._directory / key[1].path
        await self._host.call(lambda engine: engine.adapters.begin(directory, below=root, lane=lane))
        began = self._clock()
        while True:
            try:
                digest = await self._host.call(lambda engine: engine.adapters.read_digest(lane))
            except UnavailableError:  # an earlier reading still blocks the lane: the next one has another
                self._blocked[lane] = self._blocked.pop(lane, ("", key[1]))
                raise
            if digest is not None:
                self._blocked.pop(lane, None)
                return digest
            late = self._clock() - began > READ_SECONDS
            if late or self._now.get(key[0]) != key[1]:
                self._blocked.pop(lane, None)
                self._blocked[lane] = key
                raise read_too_slowly(READ_SECONDS) if late else _NotWantedError
            await asyncio.sleep(ASK_SECONDS)
