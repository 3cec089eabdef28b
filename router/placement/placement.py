"""The router's placement: asks the script, keeps this router's charges, goes on alone when Redis is gone."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
import time
from collections import Counter
from importlib import resources

import redis

from cluster.config.router import RouterConfig
from cluster.errors import OverloadedError, UnavailableError
from cluster.index import scripts
from cluster.membership import keys
from cluster.membership.reader import Members
from cluster.membership.topology import LEVELS
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import ROUTER_LEASE_SECONDS
from cluster.redis.connect import connect_async
from cluster.redis.memory import RedisMemory
from cluster.telemetry.metrics import router as metrics
from router.placement.calibration import Calibration
from router.placement.calls import Calls
from router.placement.candidates import Candidates
from router.placement.generations import Generations, usable
from router.placement.local_view import LocalView
from router.placement.memory_watch import MemoryWatch
from router.placement.redis_backoff import RedisBackoff
from router.placement.script_call import Argument, ScriptCall
from router.placement.types import Charge, Generation, Mode, Placed, PlacementRequest

log = logging.getLogger(__name__)
SETTLE_SECONDS = 0.05
PREDICT_SECONDS = 10.0
SCRIPT_SECONDS = 0.1  # a hung Redis must not delay a request more than this
RETRY_SECONDS = 0.5
MIN_RETRY_SECONDS = 1.0  # what a refused client is told to wait at least
_TERMS = ("cost", "prefill_wait", "prefill", "handoff", "decode_penalty", "first_token")
_TOO_LATE, _LEAVING, _VOID = -3, -4, -5
_LATER_RUN = -1  # settle.lua's answer if Redis has a later run of this router
MAX_CANDIDATES_KEPT = 8  # candidate lists, one per set of excluded workers
MAX_VIEWS = 3  # of the membership, for one placement
_DECISIONS = [(who, by) for who in ("prefill_worker", "decode_worker") for by in ("redis", "router")]
_REFUSALS = ("no_decode_worker", "no_prefill_worker", "too_late")


def _lua(name: str) -> str:
    return resources.files("router.placement").joinpath(name).read_text()


def script_source() -> str:
    """The placement script, whole."""
    return scripts.tree() + _lua("place.lua")


def settle_source() -> str:
    """The script that applies a router's table of charges."""
    return _lua("settle.lua")


class Placement:
    def __init__(self, config: RouterConfig, members: Members, rng: random.Random | None = None):
        self._config = config
        self._members = members
        self._rng = rng or random.Random()
        self._client = connect_async(config.redis_url, SCRIPT_SECONDS)
        self._dirty = asyncio.Event()  # Redis must be told what this router has charged
        # What a call charged that was given up, no request carries.
        self._place = ScriptCall(config.redis_url, script_source(), on_unheard=self._dirty.set)
        self._settle = ScriptCall(config.redis_url, settle_source())
        tag = f"{{{config.namespace}}}:"
        self._load_key, self._routers_key, self._calls_key = tag + "load", tag + "routers", tag + "calls"
        self._charges_key = tag + "chg:" + config.router_id
        answers = tag + "answers:" + config.router_id
        self._settle_keys = [self._load_key, self._routers_key, self._charges_key, answers, tag + "runs"]
        self._script_keys = [
            keys.slot_owners(config.namespace),
            *(self._load_key, self._routers_key, self._calls_key, self._charges_key),
            keys.drains(config.namespace),
            answers,
        ]
        self._numbers = Calls()
        self._watch = MemoryWatch(self._client, self._load_key)
        self.calibration = Calibration()
        self._local = LocalView(self._rng)
        self._charges: dict[bytes, Charge] = {}
        self._everybody: dict[tuple[Generation | None, frozenset[str]], Candidates] = {}
        self._generations = Generations([], [], self.mode)
        self._seen: list[WorkerInfo] | None = None  # the membership they were made of
        self._settlings = 0  # begun and ended: while it is odd, one is on its way
        self._rest = RedisBackoff(RETRY_SECONDS, self._rng)
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.calls = 0
        self.seconds = metrics.REDIS_CALLS.create()  # of the script, as a request waits for it
        self.cost_terms = {name: metrics.PLACEMENT_COST.create() for name in _TERMS}  # of the chosen pairs
        # By the role that prefills, and by the reason
        self.decided: Counter[tuple[str, ...]] = Counter(dict.fromkeys(_DECISIONS, 0))
        self.refused = Counter(dict.fromkeys(_REFUSALS, 0))  # by reason
        self.errors: Counter[str] = Counter()  # calls that Redis did not answer in time

    async def start(self) -> None:
        """A router that was killed and comes back under its name takes what it had charged off the load."""
        await self._settle_once()
        self._watch.start()
        self._task = asyncio.get_running_loop().create_task(self._settle_forever())

    async def close(self) -> None:
        # Not by cancelling alone: the Redis client may swallow a cancellation that meets its own deadline.
        self._closed = True
        self._dirty.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=ROUTER_LEASE_SECONDS)
        await self._watch.close()
        self._charges.clear()
        await self._settle_once()
        await self._place.close()
        await self._settle.close()
        await self._client.aclose()

    @property
    def memory(self) -> RedisMemory:
        """Redis' memory, at most a second old while Redis answers."""
        return self._watch.memory

    @property
    def mode(self) -> Mode:
        return self._config.local_prefill

    def generation(self, before: Generation | None) -> Generation:
        """Which workers a request is for; `before`: those that had it last. Raises UnavailableError."""
        self._look()
        return self._generations.choose(before, self._rng)

    def _look(self) -> None:
        """Forgets what was made of an older membership."""
        if self._seen is not self._members.all:
            self._everybody.clear()
            self._generations = Generations(self._members.prefill, self._members.decode, self.mode)
            self._seen = self._members.all

    async def place(self, request: PlacementRequest) -> Placed:
        """One script call. Raises UnavailableError when a role that is needed has nobody, OverloadedError when the
        first token would come too late; then nothing was charged."""
        candidates = self._candidates(request)
        self.calls += 1
        try:
            placed = await self._place_among(candidates, request)
        except OverloadedError:
            self.refused["too_late"] += 1
            raise
        where = "prefill_worker" if placed.prefill is not None else "decode_worker"
        self.decided[where, "redis" if placed.from_redis else "router"] += 1
        return placed

    async def _place_among(self, candidates: Candidates, request: PlacementRequest) -> Placed:
        for _ in range(MAX_VIEWS):
            if not self._numbers.run or not self._rest.may_ask():
                break
            try:
                placed = await self._ask(request, candidates)
            except (redis.RedisError, TimeoutError, OSError) as error:
                self.errors["place"] += 1
                log.warning("placing without Redis: %s", error)
                self._rest.failed()
                break
            if placed is not None:
                return placed
            await self._members.refresh()
            candidates = self._candidates(request)
        return self._alone(request, candidates)

    def _candidates(self, request: PlacementRequest) -> Candidates:
        """Raises UnavailableError when a role that is needed has nobody."""
        candidates = self._all_candidates(request)
        if not candidates.decode:
            self.refused["no_decode_worker"] += 1
            raise UnavailableError("no decode worker is there", retry_after_seconds=1.0)
        if not candidates.prefill and self.mode == "never":
            self.refused["no_prefill_worker"] += 1
            raise UnavailableError("no prefill worker is there", retry_after_seconds=1.0)
        return candidates

    def _all_candidates(self, request: PlacementRequest) -> Candidates:
        """All candidates except the workers that this request excludes.

        Built once per membership version and set of exclusions: while a worker is suspect, every request excludes it.
        """
        self._look()
        wanted = request.generation, request.excluded
        known = self._everybody.pop(wanted, None) or self._put_together(request)
        self._everybody[wanted] = known  # moves it to the end: the least recently used is dropped first
        if len(self._everybody) > MAX_CANDIDATES_KEPT:
            del self._everybody[next(iter(self._everybody))]
        return known

    def _put_together(self, request: PlacementRequest) -> Candidates:
        members = self._members
        prefill = [] if self.mode == "always" else usable(members.prefill, request)
        if self.mode in ("fallback", "auto") and prefill and all(request.excludes(w) for w in prefill):
            prefill = []  # every prefill worker left has failed this request
        return Candidates(prefill, usable(members.decode, request), self.mode)

    async def _ask(self, request: PlacementRequest, candidates: Candidates) -> Placed | None:
        """None: the best of them is leaving, or has left."""
        workers = candidates.workers
        began, settlings = time.monotonic(), self._settlings
        run, number = self._numbers.run, self._numbers.begin()
        try:
            identity = run, number, int(ROUTER_LEASE_SECONDS * 1000)
            answer = await self._place(
                self._script_keys,
                [*self._arguments(request, candidates.model_id), *identity, *candidates.arguments],
                2 * SCRIPT_SECONDS,
            )
        finally:
            self._numbers.end(number)
        self.seconds.observe(time.monotonic() - began)
        self._rest.answered()  # also where it refuses
        if int(answer[0]) == _VOID:
            raise TimeoutError(
                f"another router uses the id {self._config.router_id!r}: give each its own router_id"
            )
        if int(answer[0]) == _TOO_LATE:
            raise _too_late(request, float(answer[1]))
        if int(answer[0]) == _LEAVING:
            return None
        p_index, d_index, hit, decode_hit, uncached = (int(value) for value in answer[:5])
        p = workers[p_index - 1] if p_index else None
        d = workers[d_index - 1]
        terms = {name: float(value) for name, value in zip(_TERMS, answer[5:], strict=True)}
        for name, value in terms.items():
            self.cost_terms[name].observe(value)
        self._charge(request, p, d, uncached)
        if settlings % 2 or self._settlings != settlings:
            self._dirty.set()  # a settling on its way may take away what this has just charged
        return Placed(p, d, hit, decode_hit, True, terms)

    def _arguments(self, request: PlacementRequest, model_id: str) -> list[Argument]:
        c = self.calibration
        limits = (request.target_seconds, request.deadline_seconds) if c.known else (0.0, 0.0)
        return [
            scripts.prefix(self._config.namespace, model_id),
            self._config.router_id,
            request.chain,
            request.token_count,
            request.generation.page_size if request.generation is not None else self._config.page_size,
            request.output_tokens,
            self.mode,
            self._rng.random(),
            c.a,
            c.b,
            c.token_bytes,
            struct.pack(f">{len(LEVELS)}d", *c.rates()),
            c.decode_token_seconds,
            "reported" if self.memory.pressed else self._config.index_feeds,
            int(self.memory.shortened(scripts.NODE_TTL_SECONDS) * 1000),
            int(PREDICT_SECONDS * 1000),
            c.rate,
            request.priority_class,
            *limits,
        ]

    def _alone(self, request: PlacementRequest, candidates: Candidates) -> Placed:
        """Raises OverloadedError."""
        load = self._own_load()
        d = self._local.pick(candidates.decode, load, request.chain)
        p = self._local.pick(candidates.prefill, load, request.chain) if candidates.prefill else None
        if p is not None:
            self._refuse_late(request, load[p.name] / self.calibration.rate)
        self._charge(request, p, d, request.token_count)
        return Placed(p, d, 0, 0, False)

    def _refuse_late(self, request: PlacementRequest, ahead_seconds: float) -> None:
        """By what this router alone has sent: less than all is better than no limit at all."""
        compute = self.calibration.a * request.token_count
        target = request.target_seconds
        if self.calibration.known and 0 < target < ahead_seconds + compute and ahead_seconds > compute:
            raise _too_late(request, ahead_seconds + compute)

    def _charge(self, request: PlacementRequest, p: WorkerInfo | None, d: WorkerInfo, uncached: int) -> None:
        self._local.remember(request.chain, (p or d).worker_id)
        self._charges[request.transfer_id] = Charge(
            (p or d).name,
            d.name,
            uncached,
            request.token_count + request.output_tokens,
            request.priority_class,
        )

    def _own_load(self) -> Counter[str]:
        load: Counter[str] = Counter()
        for charge in self._charges.values():
            load[charge.prefill] += charge.prefill_tokens
            load[charge.decode] += charge.decode_tokens
        return load

    def charged_tokens(self) -> dict[str, float]:
        """What this router has placed and not yet seen done."""
        charges = list(self._charges.values())
        return {
            "prefill": sum(charge.prefill_tokens for charge in charges),
            "decode": sum(charge.decode_tokens for charge in charges),
        }

    def prefilled(self, transfer_id: bytes) -> None:
        """The first token came: its prompt no longer waits anywhere."""
        charge = self._charges.get(transfer_id)
        if charge is not None and charge.prefill_tokens:
            charge.prefill_tokens = 0
            self._dirty.set()

    def release(self, transfer_id: bytes) -> None:
        """The attempt is over."""
        if self._charges.pop(transfer_id, None) is not None:
            self._dirty.set()

    async def calls_in_redis(self) -> int | None:
        """The script's own count, over all routers. None while Redis is gone."""
        try:
            return int(await self._client.get(self._calls_key) or 0)
        except (redis.RedisError, TimeoutError, OSError):
            return None

    async def _settle_forever(self) -> None:
        renewed = 0.0
        while not self._closed:
            try:
                async with asyncio.timeout(ROUTER_LEASE_SECONDS / 5):
                    await self._dirty.wait()
            except TimeoutError:
                pass
            # An idle router is nearly quiet: it keeps its lease, so that nobody drops its charges between the next
            # placement and the settling after that, and sees to it that what a dead one has charged does not stay.
            quiet = time.monotonic() - renewed
            if self._dirty.is_set() or quiet > ROUTER_LEASE_SECONDS / (5 if self._charges else 2):
                self._dirty.clear()
                await self._settle_once()
                renewed = time.monotonic()
            await asyncio.sleep(SETTLE_SECONDS)

    def _table(self) -> list[Argument]:
        table: Counter[str] = Counter()
        for charge in self._charges.values():
            table["p:" + charge.prefill] += charge.prefill_tokens
            if charge.priority_class != "normal":
                table[f"{charge.priority_class}:p:{charge.prefill}"] += charge.prefill_tokens
            table["d:" + charge.decode] += charge.decode_tokens
        return [part for field, amount in table.items() if amount for part in (field, amount)]

    async def _settle_once(self) -> None:
        self._settlings += 1
        try:
            if not self._numbers.run:
                self._numbers.restart(await self._send_table(0, 0, 0))
            if await self._send_table(*self._numbers.settle(), *self._table()) == _LATER_RUN:
                log.warning(
                    "another router uses the id %r; taking it over, give each its own router_id",
                    self._config.router_id,
                )
                self._numbers.restart(0)
                self._dirty.set()
        except (redis.RedisError, TimeoutError, OSError) as error:
            self.errors["settle"] += 1
            log.debug("charges wait for Redis: %s", error)
            self._dirty.set()
        finally:
            self._settlings += 1

    async def _send_table(self, *arguments: Argument) -> int:
        identity = self._config.router_id, int(ROUTER_LEASE_SECONDS * 1000)
        return int(await self._settle(self._settle_keys, [*identity, *arguments], SCRIPT_SECONDS))


def _too_late(request: PlacementRequest, first_token_seconds: float) -> OverloadedError:
    limits = [limit for limit in (request.target_seconds, request.deadline_seconds) if limit > 0]
    limit = min(limits, default=0.0)  # only who has one is refused
    return OverloadedError(
        f"the first token would take about {first_token_seconds:.1f} s; a {request.priority_class} request here "
        f"waits at most {limit:.1f} s",
        field="ttft",
        limit=f"{limit:g}",
        retry_after_seconds=max(MIN_RETRY_SECONDS, first_token_seconds - limit),
    )
