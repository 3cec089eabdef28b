"""Reads the registry, once or continuously for a router."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, get_args

import redis
from google.protobuf.message import DecodeError

from cluster.config import adapters
from cluster.config.worker import Role
from cluster.errors import InvalidRequestError
from cluster.kubernetes.pod import Pod
from cluster.membership import keys, scripts
from cluster.membership.status import WorkerStatus
from cluster.membership.topology import Location
from cluster.membership.types import WorkerInfo, lease_of
from cluster.periodic import Periodic
from cluster.protocol.names import ADAPTER_DIGEST, check_name
from cluster.protocol.times import (
    FORGET_SECONDS,
    LEASE_DEAD_SECONDS,
    LEASE_SUSPECT_SECONDS,
    REFRESH_SECONDS,
    REGISTER_AGAIN_SECONDS,
    RENEW_SECONDS,
)
from cluster.redis.connect import connect, connect_async
from cluster.redis.failover import disconnect_after_failover_async
from cluster.redis.reasons import reason
from wire import common_pb2

_FIELDS = frozenset(field.name for field in fields(WorkerInfo))
_LOCATION = frozenset(field.name for field in fields(Location))
_POD = frozenset(field.name for field in fields(Pod))
_NUMBERS = {
    "epoch": (0, 2**64 - 1),
    "slot": (0, 2**32 - 1),
    "max_model_len": (0, 2**53),
    "blocks_total": (0, 2**32),
    "page_size": (1, 2**20),
    "link_min_version": (0, 2**31),
    "link_max_version": (0, 2**31),
}
_TEXTS = (
    "worker_id",
    "model_id",
    "address",
    "metrics_address",
    "link_address",
    "place",
    "host",
    "process",
    "served_model",
)
STATUS_SECONDS = 1.0  # between two reads of the statuses while they are shown
SHOWN_SECONDS = 5.0  # so long after they were shown last
SLICE = 16  # registrations that are read in one run of the event loop
WHOLE_SECONDS = 10.0  # workers of earlier versions change no generation
log = logging.getLogger(__name__)


def decode(answer: Sequence[Any]) -> list[WorkerInfo]:
    """Parse the answer of the READ script."""
    return _sorted(_each(answer))


async def _decode_in_slices(answer: Sequence[Any]) -> list[WorkerInfo]:
    """`decode` while the event loop goes on: thousands of new registrations take more than a second."""
    workers = []
    for number, worker in enumerate(_each(answer), 1):
        workers.append(worker)
        if number % SLICE == 0:
            await asyncio.sleep(0)
    return _sorted(workers)


def _each(answer: Sequence[Any]) -> Iterator[WorkerInfo | None]:
    now = int(answer[0])
    for index in range(2, len(answer), 5):
        yield _readable(now, answer[index : index + 5])


def _sorted(workers: Iterable[WorkerInfo | None]) -> list[WorkerInfo]:
    return sorted((one for one in workers if one is not None), key=lambda worker: worker.worker_id)


def _readable(now: int, values: Sequence[Any]) -> WorkerInfo | None:
    """One worker's values. None: of another version, or no worker at all; the other workers are used."""
    try:
        return _worker(now, *values[1:])
    except (
        *(KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
        *(DecodeError, InvalidRequestError),
    ) as error:
        log.debug("the registration of worker %r is ignored: %r", values[0], error)
        return None


def _worker(now: int, registration: bytes, renewed: bytes, status: bytes, drains: bytes) -> WorkerInfo:
    facts = dict(_registered(registration))
    facts["lease"] = lease_of((now - int(renewed)) / 1000)
    facts["status"] = _status(status)
    facts["state"] = "draining" if drains else "ready"
    return WorkerInfo(**facts)


@lru_cache(maxsize=4096)
def _status(status: bytes) -> WorkerStatus:
    """Cached, because reads are twice as frequent as renewals. A status is only shown: a worker is used without it."""
    try:
        return WorkerStatus.decode(json.loads(status))
    except (TypeError, ValueError, RecursionError) as error:
        log.debug("a status is ignored: %r", error)
        return WorkerStatus()


@lru_cache(maxsize=4096)
def _registered(registration: bytes) -> Mapping[str, Any]:
    """Cached, because it does not change while the worker is registered."""
    facts: dict[str, Any] = json.loads(registration)
    facts["layout"] = bytes.fromhex(facts["layout"])
    facts["epoch"] = int(facts["epoch"], 16)
    for name in ("link_min_version", "link_max_version"):
        facts.setdefault(name, 0)  # a worker from before the link has none
    facts["location"] = Location(**_known(facts.get("location", {}), _LOCATION))
    facts["adapters"] = _adapters(facts.get("adapters", ()))
    facts["pod"] = Pod(**_known(facts.get("pod", {}), _POD))
    _check(facts)
    return _known(facts, _FIELDS)


def _adapters(given: Any) -> tuple[tuple[str, str], ...]:
    """Raises ValueError or TypeError."""
    if len(given) > adapters.MAX_ADAPTERS:
        raise ValueError(f"adapters: more than {adapters.MAX_ADAPTERS}")
    found = tuple((name, digest) for name, digest in given)
    if not all(adapters.is_adapter_name(name) and ADAPTER_DIGEST.match(digest) for name, digest in found):
        raise ValueError("adapters: no names and digests")
    return _one_of_equal(found)


@lru_cache(maxsize=1024)
def _one_of_equal(found: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The same tuple for all equal ones (grouped_by_adapters)."""
    return found


def _check(facts: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError: one bad registration must not break the use of all others."""
    for name, (least, most) in _NUMBERS.items():
        if name in facts and not (type(facts[name]) is int and least <= facts[name] <= most):
            raise ValueError(f"{name}: {facts[name]!r} is not a number in {least} … {most}")
    for name in _TEXTS:
        if name in facts:
            facts[name].encode()
    for name in vars(facts["location"]).values():
        name.encode()
    check_name("worker_id", facts["worker_id"])
    if not facts["worker_id"].isprintable() or not facts["worker_id"]:
        raise ValueError("worker_id: not printable")  # a zero byte ends names in the placement script
    if facts["role"] not in get_args(Role):
        raise ValueError(f"role: {facts['role']!r}")
    common_pb2.KvLayout.FromString(facts["layout"])


def _known(facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Drop fields that only later versions have."""
    return {name: value for name, value in facts.items() if name in names}


def read_workers(redis_url: str, namespace: str) -> list[WorkerInfo]:
    """Return the workers registered now. Raises redis.RedisError."""
    client, registry = connect(redis_url), keys.registry(namespace)
    try:
        forget = int(FORGET_SECONDS * 1000)
        return decode(client.eval(scripts.READ, len(registry), *registry, forget))
    finally:
        client.close()


def look_at_workers(redis_url: str, namespace: str) -> list[WorkerInfo]:
    """`read_workers` for a user that may only read: dead workers are left to the routers to delete.

    Plain commands, because Redis requires the right to write every key that is declared for a script. Raises
    redis.RedisError.
    """
    client = connect(redis_url)
    try:
        with client.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.members(namespace))
            pipe.zrange(keys.leases(namespace), 0, -1, withscores=True)
            pipe.hgetall(keys.status(namespace))
            pipe.hgetall(keys.drains(namespace))
            pipe.time()  # last: no renewal that was read is later
            members, leases, status, drains, (seconds, micros) = pipe.execute()
    finally:
        client.close()
    now, renewed = seconds * 1000 + micros // 1000, dict(leases)
    answer: list[Any] = [now, 0]
    for worker_id, registration in members.items():
        if now - renewed.get(worker_id, 0) <= FORGET_SECONDS * 1000:
            drain = drains.get(worker_id, b"").rpartition(b":")[2]
            answer += [
                *(worker_id, registration, renewed[worker_id]),
                *(status.get(worker_id, b"{}"), drain),
            ]
    return decode(answer)


def with_leases(workers: list[WorkerInfo], now_ms: int, overdue: Sequence[Any]) -> list[WorkerInfo]:
    """The workers with the leases of now; the same list if these are the same. The arguments are LOOK's answer."""
    ages = {bytes(name): int(now_ms) - float(at) for name, at in zip(*[iter(overdue)] * 2, strict=True)}
    leases = [lease_of(ages.get(one.worker_id.encode(), 0.0) / 1000) for one in workers]
    if all(one.lease == lease for one, lease in zip(workers, leases, strict=True)):
        return workers
    return [replace(one, lease=lease) for one, lease in zip(workers, leases, strict=True)]


class Members:
    """A router's view of the workers, refreshed every REFRESH_SECONDS; the last one is kept while Redis does not answer.

    Facts and states are read when the registry's generation is another one, and otherwise only which leases are overdue.
    Statuses are read with them, and every STATUS_SECONDS while they are shown. `all` is the same list while nothing
    changes.

    If Redis has lost a slot that it had assigned, it was emptied or rolled back: workers that it no longer names stay in
    the view until they have had time to register again. Likewise where its clock has jumped ahead.
    """

    def __init__(self, redis_url: str, namespace: str):
        self._client = connect_async(redis_url)
        self._read = self._client.register_script(scripts.LOOK)
        self._keys = keys.registry(namespace)
        self._workers: list[WorkerInfo] = []
        self._named: list[WorkerInfo] = []  # as Redis names them
        self._generation: str | bytes = ""
        self._read_whole = self._shown = -math.inf  # when all was read, and when a status was asked for
        self._refreshing = Periodic("reading the registry", REFRESH_SECONDS, self.refresh)
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None  # a read that has not begun
        self._reads: set[asyncio.Task[None]] = set()
        self.redis_ok = False
        self.errors = 0  # reads that Redis did not answer
        self._slots = 0  # assigned so far, by Redis's own count
        self._back_since = 0.0
        self._redis_ms = 0  # Redis's time at the last reading
        self.refreshed = 0.0

    @property
    def all(self) -> list[WorkerInfo]:
        return self._workers

    async def start(self) -> None:
        await self.refresh()
        self._refreshing.start()

    async def refresh(self) -> None:
        """Read once; keep the last view if Redis does not answer.

        Reads run one at a time, so that an older answer never replaces a newer one. All calls that arrive while a read
        is in flight share the next one: Redis may have answered the current read before the change that caused them.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._read_in_turn())
            self._reads.add(self._next)
            self._next.add_done_callback(self._reads.discard)
        await asyncio.shield(self._next)

    async def _read_in_turn(self) -> None:
        async with self._turn:
            self._next = None
            await self._read_once()

    def show_status(self) -> None:
        """The statuses are being shown: read them every STATUS_SECONDS, for SHOWN_SECONDS."""
        self._shown = time.monotonic()

    async def refresh_status(self) -> None:
        """Read the statuses if those in the view are older than a renewal."""
        self.show_status()
        if time.monotonic() - self._read_whole > RENEW_SECONDS:
            self._generation = ""
            await self.refresh()

    async def _read_once(self) -> None:
        now = time.monotonic()
        whole = now - self._read_whole
        if whole > WHOLE_SECONDS or (whole > STATUS_SECONDS and now - self._shown < SHOWN_SECONDS):
            self._generation = ""
        seen, overdue_ms = self._generation, int(LEASE_SUSPECT_SECONDS * 1000)
        try:
            async with asyncio.timeout(LEASE_DEAD_SECONDS / 5):
                answer = await self._read(
                    keys=self._keys, args=[int(FORGET_SECONDS * 1000), seen, overdue_ms]
                )
            await self._take_checked(answer, time.monotonic())
        except (redis.RedisError, TimeoutError, OSError) as error:
            self.errors += 1
            if self.redis_ok:
                log.warning("%s; the last membership stays in use", reason(error))
            self.redis_ok = False
            await disconnect_after_failover_async(self._client, error)

    async def _take_checked(self, answer: Any, now: float) -> None:
        """Raises redis.InvalidResponse: requests wait for a reading, and would fail by another exception."""
        try:
            await self._take(answer, now)
        except (TypeError, ValueError, LookupError):
            self._generation = ""
            raise redis.InvalidResponse("the answer to a reading of the registry is malformed") from None

    async def _take(self, answer: Sequence[Any], now: float) -> None:
        generation, everything, *overdue = answer
        slots = int(everything[1]) if everything else self._slots
        read = await _decode_in_slices(everything) if everything else None
        jumped = self._clock_jumped(int(everything[0] if everything else overdue[0]), now)
        # Emptied or rolled back, perhaps between two reads
        if not self.redis_ok or slots < self._slots or jumped:
            self._back_since = now
        self.redis_ok, self._slots, self._generation, self.refreshed = True, slots, generation, now
        named = self._with_leases(*overdue) if read is None else read
        if everything:
            self._read_whole = now
        if named is not self._named or len(self._workers) != len(named):
            self._named = named
            self._workers = self._merge(named, now)

    def _clock_jumped(self, redis_ms: int, now: float) -> bool:
        """Whether Redis's clock has gone so far ahead since the last reading that leases of workers that live look long
        dead: it may have deleted these, and they need a moment to register again."""
        before, self._redis_ms = self._redis_ms, redis_ms
        ahead = (redis_ms - before) / 1000 - (now - self.refreshed)
        return bool(before) and ahead > FORGET_SECONDS / 2

    def _with_leases(self, now_ms: int, overdue: Sequence[Any]) -> list[WorkerInfo]:
        """The workers that Redis named last, with the leases of now."""
        if any(int(now_ms) - float(at) > FORGET_SECONDS * 1000 for at in overdue[1::2]):
            self._generation = ""  # a whole read deletes it
        return with_leases(self._named, now_ms, overdue)

    def _merge(self, workers: list[WorkerInfo], now: float) -> list[WorkerInfo]:
        """Return the workers that Redis names, and those of the last view that may not have registered again yet. A
        worker that Redis names has the epoch named there: an earlier one would refuse every request."""
        if now - self._back_since > REGISTER_AGAIN_SECONDS:
            return workers
        known = {worker.worker_id for worker in workers}
        return workers + [worker for worker in self._workers if worker.worker_id not in known]

    async def close(self) -> None:
        await self._refreshing.close(LEASE_DEAD_SECONDS)
        if self._reads:
            await asyncio.wait(self._reads, timeout=LEASE_DEAD_SECONDS)
        await self._client.aclose()
