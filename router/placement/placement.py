"""Chooses a request's workers: by Redis's script, or by this router alone while Redis does not answer."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import redis

from cluster.config.router import RouterConfig
from cluster.config.worker import Role
from cluster.errors import OverloadedError, UnavailableError
from cluster.membership.reader import Members
from cluster.redis.connect import connect_async
from router.placement.calibration import Calibration, Calibrations
from router.placement.call_slots import CallSlots
from router.placement.candidates import Candidates, Heads
from router.placement.charges import AttemptCharge, Charges
from router.placement.eligibility import Eligibility
from router.placement.keys import PlacementKeys
from router.placement.last_loads import LastLoads
from router.placement.memory_watch import MemoryWatch
from router.placement.place_script import Decision, Matched, PlaceScript, Unplaced
from router.placement.prefix_index import PrefixIndex
from router.placement.redis_poll import RedisPoll
from router.placement.settlement import SCRIPT_SECONDS, Settlement
from router.placement.standalone_placement import StandalonePlacement
from router.placement.types import KvGroup, Mode, Placed, PlacementRequest

MAX_VIEWS = 3  # of the membership, for one placement
_DECISIONS = [
    (prefills, by) for prefills in ("prefill_worker", "decode_worker") for by in ("redis", "router")
]
_REFUSALS = ("no_decode_worker", "no_prefill_worker", "too_late")


class Placement:
    def __init__(self, config: RouterConfig, members: Members, rng: random.Random | None = None):
        self._rng = rng or random.Random()
        self._members = members
        self.mode: Mode = config.local_prefill
        self._models = config.model_names
        self.calibrations = Calibrations(self._models)
        self._eligibility = Eligibility([], self.mode, models=self._models)
        self._seeing = (
            threading.Lock()
        )  # scrapes and probes, on threads of their own, see the same as requests
        self._keys = PlacementKeys(config.namespace, config.router_id)
        self._client = connect_async(config.redis_url, SCRIPT_SECONDS)
        self.watch = MemoryWatch(self._keys.load)
        self.index = PrefixIndex(config, self._rng) if config.index_url else None
        self.charges = Charges()
        self.settlement = Settlement(config, self._keys, self.charges, self._rng)
        self.script = PlaceScript(
            *(config, self._keys, self.calibrations, self.index_watch, self._rng),
            on_unanswered=self.settlement.request,
            match=self.index.match if self.index is not None else None,
        )
        self.last_loads = LastLoads(self._keys, self.charges, lambda: self.eligibility)
        self.poll = RedisPoll(self._client, (self.watch, self.last_loads))
        self._standalone = StandalonePlacement(self.calibrations, self.charges, self.last_loads, self._rng)
        self._slots = CallSlots()
        self.calls = 0
        # By the role that prefills and where it was decided; by reason
        self.decided: Counter[tuple[str, ...]] = Counter(dict.fromkeys(_DECISIONS, 0))
        self.refused = Counter(dict.fromkeys(_REFUSALS, 0))

    async def start(self) -> None:
        await self.settlement.start()
        self.poll.start()
        if self.index is not None:
            self.index.start()

    async def close(self) -> None:
        await self.poll.close()
        await self.settlement.close()
        await self.script.close()
        if self.index is not None:
            await self.index.close()
        await self._client.aclose()

    @property
    def calibration(self) -> Calibration:
        """The calibration of the first model."""
        return self.calibrations.first

    @property
    def index_watch(self) -> MemoryWatch:
        """The memory of the Redis with the prefix index."""
        return self.watch if self.index is None else self.index.watch

    @property
    def eligibility(self) -> Eligibility:
        """Eligibility by the latest membership. Any thread; only the event loop changes it."""
        with self._seeing:
            workers = self._members.all
            if self._eligibility.workers is not workers:
                self._eligibility = Eligibility(workers, self.mode, self._eligibility.unknown, self._models)
            return self._eligibility

    def kv_group(self, before: KvGroup | None, model: str = "", failed: Collection[KvGroup] = ()) -> KvGroup:
        """Which workers a request for the model is for; `before`: those that its tokens are from; `failed`: those that
        gave it none. Raises UnavailableError."""
        return self.eligibility.kv_groups(model).choose(before, self._rng, failed)

    async def place(self, request: PlacementRequest) -> Placed:
        """One script call, or two where the prefix index has a Redis of its own. Raises UnavailableError when a role
        that is needed has no worker, OverloadedError when the first token would come too late: nothing was charged."""
        self._check_roles(request)
        self.calls += 1
        may_ask = await self._slots.take(request.priority_class, request.tenant, request.weight)
        try:
            placed = await self._place(request, ask=may_ask)
        except OverloadedError:
            self.refused["too_late"] += 1
            raise
        finally:
            if may_ask:
                self._slots.give()
        where = "prefill_worker" if placed.prefill is not None else "decode_worker"
        self.decided[where, "redis" if placed.from_redis else "router"] += 1
        if request.explain:
            placed = replace(placed, why_not=self.eligibility.explain(request))
        return placed

    async def _place(self, request: PlacementRequest, *, ask: bool) -> Placed:
        """`ask`: whether Redis is called, if it answers."""
        listed, replaces = False, b""
        unheld: list[int] = []
        try:
            for _ in range(MAX_VIEWS):
                if not ask or not self.settlement.run or not self.script.may_ask():
                    break
                candidates = self.eligibility.for_script(request, listed=listed)
                matched = await self.script.match(request, candidates)
                if not self.settlement.run:  # Redis lost it meanwhile
                    break
                try:
                    placed = await self._ask(request, candidates, matched, replaces, unheld)
                except (redis.RedisError, TimeoutError, OSError):
                    break
                if isinstance(placed, Placed):
                    return placed
                if placed is Unplaced.VOID:
                    break
                if isinstance(placed, Decision):
                    replaces = _charge_of(request, placed).packed
                    continue
                listed = listed or placed in (Unplaced.NOBODY, Unplaced.FEW)
                self.eligibility.listed = self.eligibility.listed or placed is Unplaced.FEW
                await self._members.refresh()
                self._check_roles(request)
            self._check_roles(request)  # the membership may have changed while Redis was waited for
            placed = self._standalone.place(request, self.eligibility.candidates(request))
            self._charge(request, placed, in_redis=False)
            return placed
        finally:
            # What no later call has replaced, and this router does not add by itself, is taken off.
            for number in unheld:
                self.settlement.end_placement(number, answered=False)

    def _check_roles(self, request: PlacementRequest) -> None:
        """Raises UnavailableError when a role that is needed has no worker."""
        pool = self.eligibility.pool(request.kv_group, request.model)
        missing = "decode" if not pool.decode else ""
        if not pool.prefill and self.mode == "never":
            missing = missing or "prefill"
        if missing:
            self.refused[f"no_{missing}_worker"] += 1
            raise UnavailableError(f"no {missing} worker is available", retry_after_seconds=1.0)

    async def _ask(
        self,
        request: PlacementRequest,
        candidates: Candidates | Heads,
        matched: Matched,
        replaces: bytes,
        unheld: list[int],
    ) -> Placed | Unplaced | Decision:
        """A Decision: it is charged at a worker that this router cannot read, or may not use. Then the call's number is
        added to `unheld`: until it ends, the settlement leaves the charge to the next call for this placement."""
        number, answered = self.settlement.begin_placement(request.transfer_id), False
        run, ended = self.settlement.run, True
        try:
            decision = await self.script(request, candidates, matched, run, number, replaces)
            placed = decision if isinstance(decision, Unplaced) else await self._placed(decision, request)
            answered, ended = True, not isinstance(placed, Decision)
            if isinstance(placed, Placed):
                # A run that was lost meanwhile is not the one that the charge is in.
                self._charge(request, placed, in_redis=run == self.settlement.run)
                if self.index is not None:
                    self.index.record(request, placed)
        except OverloadedError:
            answered = True
            raise
        finally:
            if ended:
                self.settlement.end_placement(number, answered=answered)
            else:
                unheld.append(number)
        return placed

    async def _placed(self, decision: Decision, request: PlacementRequest) -> Placed | Decision:
        """The sets name a worker before this router has read its registration, or one whose registration it cannot read:
        then the decision, and that worker is passed over from now on. Also where the registration is of another model of
        the same checkpoint: from now on candidates are named one by one."""
        names: list[tuple[str, Role]] = [(decision.decode, "decode")]
        if decision.prefill:
            names.append((decision.prefill, "prefill"))
        if any(name not in self.eligibility.by_name for name, _ in names):
            await self._members.refresh()
        found = self.eligibility.by_name
        unknown = {name: role for name, role in names if name not in found}
        if unknown:
            self.eligibility.pass_over(unknown)
            return decision
        if not all(self.eligibility.serves(found[name], request.model) for name, _ in names):
            return decision
        return Placed(
            found[decision.prefill] if decision.prefill else None,
            found[decision.decode],
            decision.cached_prefill_tokens,
            decision.cached_decode_tokens,
            from_redis=True,
            terms=decision.terms,
            uncached_tokens=decision.uncached_tokens,
        )

    def _charge(self, request: PlacementRequest, placed: Placed, *, in_redis: bool) -> None:
        computes = placed.prefill or placed.decode
        self._standalone.remember(request.chain, computes.worker_id)
        uncached = placed.uncached_tokens
        self.charges.add(request, computes, placed.decode, uncached, in_redis=in_redis)
        if not in_redis:
            self.settlement.request()

    def prefilled(self, transfer_id: bytes) -> None:
        """The first token came: the attempt's prompt waits at no worker any more."""
        if self.charges.prefilled(transfer_id):
            self.settlement.request()

    def release(self, transfer_id: bytes) -> None:
        """The attempt has ended."""
        if self.charges.release(transfer_id):
            self.settlement.request()

    async def calls_in_redis(self) -> int | None:
        """The script's own count, over all routers. None while Redis does not answer, or has something else there."""
        try:
            return int(await self._client.get(self._keys.calls) or 0)
        except (redis.RedisError, TimeoutError, OSError, ValueError):
            return None


def _charge_of(request: PlacementRequest, decision: Decision) -> AttemptCharge:
    """The load that the script has charged for the request."""
    return AttemptCharge(
        *(decision.prefill or decision.decode, decision.decode, decision.uncached_tokens),
        request.decode_tokens(local=not decision.prefill),
        request.priority_class,
    )
