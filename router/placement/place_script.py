"""Calls the placement script with the numbers of the cost model, the request and the candidates."""

from __future__ import annotations

import logging
import math
import random
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from typing import Any, NamedTuple

import redis

from cluster.config.router import RouterConfig
from cluster.errors import OverloadedError
from cluster.index import scripts
from cluster.membership.scripts import SETS
from cluster.membership.topology import LEVELS
from cluster.protocol.times import LEASE_DEAD_SECONDS, LEASE_SUSPECT_SECONDS, ROUTER_LEASE_SECONDS
from cluster.redis.memory import RedisMemory
from cluster.telemetry.histogram import Histogram
from cluster.telemetry.metrics import router as metrics
from router.placement.calibration import Calibrations
from router.placement.candidates import Candidates, Heads
from router.placement.keys import PlacementKeys
from router.placement.memory_watch import MemoryWatch
from router.placement.script_call import Argument, RedisBackoff, ScriptCall
from router.placement.settlement import SCRIPT_SECONDS
from router.placement.types import PlacementRequest

log = logging.getLogger(__name__)
Match = Callable[[PlacementRequest, "Candidates | Heads", float], Awaitable[bytes]]
PREDICT_SECONDS = 10.0
RETRY_SECONDS = 0.5  # at most, between two tries of a Redis that does not answer
MIN_RETRY_SECONDS = 1.0  # what a refused client is told to wait at least
_TERMS = ("cost", "prefill_wait", "prefill", "handoff", "decode_penalty", "first_token")
_ANSWER = struct.Struct(">QIII6d")  # ANSWER in place.lua: number of the call, tokens, _TERMS
_TOO_LATE, _LATER_RUN = -3, -5


class Unplaced(IntEnum):
    """Why the script has placed nothing, where another call may succeed."""

    LEAVING = -4  # the best worker is leaving, or has left
    NOBODY = -6  # no live worker of a role is among the heads of the sets
    FEW = -8  # most workers are of a version that enters no set
    VOID = -7  # Redis takes the call for one that was given up, or has a charge of the attempt


@dataclass(frozen=True)
class Decision:
    """Workers by worker_id@epoch."""

    prefill: str  # "": the decode worker prefills
    decode: str
    cached_prefill_tokens: int
    cached_decode_tokens: int
    uncached_tokens: int
    terms: dict[str, float]  # seconds

    @classmethod
    def unpack(cls, answer: bytes) -> Decision:
        """The script's answer where it has placed."""
        _, cached, cached_decode, uncached, *seconds = _ANSWER.unpack_from(answer)
        prefill, decode = answer[_ANSWER.size :].decode().split("\0")
        return cls(prefill, decode, cached, cached_decode, uncached, dict(zip(_TERMS, seconds, strict=True)))


def _read(answer: Any) -> Decision | int | float:
    """The script's answer; a float: the first token would come after so many seconds. Raises redis.InvalidResponse."""
    try:
        if isinstance(answer, bytes):
            return Decision.unpack(answer)
        refused = int(answer[0])
        if refused == _TOO_LATE:
            return _finite(float(answer[1]))
        return refused if refused == _LATER_RUN else Unplaced(refused)
    except (struct.error, ValueError, TypeError, LookupError):
        raise redis.InvalidResponse("the answer to a placement is malformed") from None


def _finite(seconds: float) -> float:
    """The time, which a refusal passes on as a whole number. Raises ValueError."""
    if not math.isfinite(seconds):
        raise ValueError("no time")
    return seconds


class Matched(NamedTuple):
    """The prefix index's answer, for the placement call that follows."""

    chance: float  # the random number that both calls use
    held: bytes  # the answer of an index in a Redis of its own; else the prompt's chain, which the call itself matches


def script_source(*, apart: bool = False) -> str:
    """The placement script, whole; `apart`: without the walk, for a prefix index in a Redis of its own."""
    index, match = (scripts.tree(), "matched.lua") if apart else (scripts.walk(), "walked.lua")
    return index + SETS + parts("charges.lua", "place.lua", match, *_CHOOSE)


_CHOOSE = "rate.lua", "candidates.lua", "choose.lua", "charge.lua"


def parts(*names: str) -> str:
    """Files of this folder, one after the other."""
    files = resources.files("router.placement")
    return "".join(files.joinpath(name).read_text() for name in names)


def feeds(config: RouterConfig, memory: RedisMemory) -> str:
    """The feeds of the index: without new predictions while its Redis is nearly full. Where reports do not count, those
    that were made before are `kept`."""
    if not memory.pressed:
        return config.index_feeds
    return "kept" if config.index_feeds == "predicted" else "reported"


def ttl_ms(memory: RedisMemory) -> int:
    """The time to live of index entries."""
    return int(memory.shortened(scripts.NODE_TTL_SECONDS) * 1000)


def predict_ms(config: RouterConfig, memory: RedisMemory) -> int:
    """How long a prediction counts: until a report must have come; where reports do not count, as long as its entry."""
    return ttl_ms(memory) if config.index_feeds == "predicted" else int(PREDICT_SECONDS * 1000)


class Numbers(NamedTuple):
    """The numbers of a call, in the order of NUMBERS in place.lua, which describes them. Seconds, tokens and bytes."""

    tokens: int
    page_size: int
    output_tokens: int
    random: float
    a: float
    b: float
    token_bytes: float
    per_token: float
    rate: float
    ttl_ms: int
    target_seconds: float
    deadline_seconds: float
    run: int
    number: int
    predict_ms: int = int(PREDICT_SECONDS * 1000)
    lease_ms: int = int(ROUTER_LEASE_SECONDS * 1000)
    suspect_ms: int = int(LEASE_SUSPECT_SECONDS * 1000)
    dead_ms: int = int(LEASE_DEAD_SECONDS * 1000)
    whole: bool = False
    alone: bool = False

    def packed(self, bandwidths: Sequence[float]) -> bytes:
        return _NUMBERS.pack(*self, *bandwidths)


_NUMBERS = struct.Struct(f">{len(Numbers._fields) + len(LEVELS)}d")


class PlaceScript:
    def __init__(
        self,
        config: RouterConfig,
        keys: PlacementKeys,
        calibrations: Calibrations,
        memory: MemoryWatch,
        rng: random.Random,
        on_unanswered: Callable[[], None],
        match: Match | None = None,
    ):
        """`memory`: of the Redis with the prefix index. `on_unanswered`: a call was given up, so no request holds what it
        may have charged. `match`: asks the prefix index, where it has a Redis of its own."""
        self._config = config
        self._keys = keys
        self._calibrations = calibrations
        self._memory = memory
        self._rng = rng
        self._match = match
        source = script_source(apart=match is not None)
        self._script = ScriptCall(config.redis_url, source, on_unanswered=on_unanswered)
        self._backoff = RedisBackoff(RETRY_SECONDS, rng)
        self.errors = 0  # calls that Redis did not answer in time
        self.seconds = metrics.REDIS_CALLS.create()  # as a request waits for it
        self.cost_terms = {name: metrics.PLACEMENT_COST.create() for name in _TERMS}  # of the chosen pairs

    def may_ask(self) -> bool:
        """Whether to call Redis now; while it does not answer, true for one call per pause."""
        return self._backoff.may_ask()

    @property
    def redis_up(self) -> bool:
        """Whether the last call was answered."""
        return not self._backoff.is_failing

    async def match(self, request: PlacementRequest, candidates: Candidates | Heads) -> Matched:
        """Ask a prefix index that has a Redis of its own. The router's run may end while this waits for the answer."""
        chance, held = self._rng.random(), request.chain
        if self._match is not None:
            held = await self._match(request, candidates, chance)
        return Matched(chance, held)

    async def __call__(
        self,
        request: PlacementRequest,
        candidates: Candidates | Heads,
        matched: Matched,
        run: int,
        number: int,
        replaces: bytes,
    ) -> Decision | Unplaced:
        """`run`, `number`: of this call (router/placement/settlement.py). `replaces`: the packed charge of a former call
        for the same placement; b"": none.

        Raises OverloadedError where the first token would come too late, and TimeoutError, redis.RedisError or OSError.
        """
        arguments = self._arguments(request, candidates, matched, run, number, replaces)
        began = time.monotonic()
        try:
            answer = await self._script(self._keys.place(run), arguments, 2 * SCRIPT_SECONDS)
            decision = _read(answer)
            if decision == _LATER_RUN:
                raise TimeoutError(
                    f"another router uses the id {self._config.router_id!r}: give each its own router_id"
                )
        except (redis.RedisError, TimeoutError, OSError) as error:
            self._failed(error)
            raise
        self.seconds.observe(time.monotonic() - began)
        self._answered()  # also where it refuses
        if isinstance(decision, float):
            raise too_late(request, decision)
        if not isinstance(decision, Decision):
            return Unplaced(decision)
        Histogram.observe_each(zip(self.cost_terms.values(), decision.terms.values(), strict=True))
        return decision

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        if not self._backoff.is_failing:
            reason = str(error) or type(error).__name__
            log.warning("router %s places without Redis: %s", self._config.router_id, reason)
        self._backoff.failed()

    def _answered(self) -> None:
        if self._backoff.is_failing:
            log.warning("router %s places with Redis again", self._config.router_id)
        self._backoff.answered()

    async def close(self) -> None:
        await self._script.close()

    def _arguments(
        self,
        request: PlacementRequest,
        candidates: Candidates | Heads,
        matched: Matched,
        run: int,
        number: int,
        replaces: bytes,
    ) -> list[Argument]:
        c, config, memory = self._calibrations.of(request.model), self._config, self._memory.memory
        target, deadline = (request.target_seconds, request.deadline_seconds) if c.known else (0.0, 0.0)
        numbers = Numbers(
            tokens=request.token_count,
            page_size=request.kv_group.page_size if request.kv_group is not None else config.page_size,
            output_tokens=request.output_tokens,
            random=matched.chance,
            a=c.a,
            b=c.b,
            token_bytes=c.token_bytes,
            per_token=c.decode_token_seconds,
            rate=c.rate,
            ttl_ms=ttl_ms(memory),
            target_seconds=target,
            deadline_seconds=deadline,
            run=run,
            number=number,
            predict_ms=predict_ms(config, memory),
            whole=request.whole_prompt,
            alone=request.ends_at_prefill,
        )
        return [
            scripts.prefix(config.namespace, candidates.model_id),
            config.router_id,
            matched.held,
            numbers.packed(c.rates()),
            config.local_prefill,
            feeds(config, memory),
            request.priority_class,
            request.transfer_id,
            replaces,
            *candidates.arguments,
        ]


def too_late(request: PlacementRequest, first_token_seconds: float) -> OverloadedError:
    """Its field is the limit: the router's setting for the request's class, or the request's own deadline. No request has
    a field for the time to the first token, and embeddings have no such token."""
    target, deadline = request.target_seconds, request.deadline_seconds
    of_request = deadline > 0 and not 0 < target <= deadline
    limit = deadline if of_request else target  # 0: a request without a limit is not refused
    field = "deadline" if of_request else f"ttft_target_seconds_{request.priority_class}"
    return OverloadedError(
        f"the answer would begin in about {first_token_seconds:.1f} s; a {request.priority_class} request here "
        f"waits at most {limit:.1f} s ({field})",
        field=field,
        limit=f"{limit:g}",
        retry_after_seconds=max(MIN_RETRY_SECONDS, first_token_seconds - limit),
    )
