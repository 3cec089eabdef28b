"""The prefix index in a Redis of its own (`index_url`): it is matched before a placement, and records it.

While it does not answer, or only late, placements go on by load alone; one of them per pause tries it, for at most
MATCH_SECONDS.
"""

from __future__ import annotations

import logging
import random
import struct
import time
from collections import Counter
from collections.abc import Callable

import redis

from cluster.config.router import RouterConfig
from cluster.index import scripts, slot_keys
from cluster.protocol.block_hash import INDEX_KEY_BYTES
from cluster.redis.connect import connect_async
from cluster.telemetry.metrics import router as metrics
from router.placement.candidates import Candidates, Heads
from router.placement.memory_watch import MemoryWatch
from router.placement.place_script import RETRY_SECONDS, feeds, parts, predict_ms, ttl_ms
from router.placement.redis_poll import RedisPoll
from router.placement.script_call import Argument, RedisBackoff, ScriptCall, ScriptLine
from router.placement.types import Placed, PlacementRequest

log = logging.getLogger(__name__)
MATCH_SECONDS = 0.1  # a match that takes longer is given up
# An index counts as down once no answer has come within LATE_SECONDS for LATE_FOR_SECONDS, because every placement waits
# for it. A shorter time would count pauses of this router's own event loop.
LATE_SECONDS = 0.05
LATE_FOR_SECONDS = 1.0
TENDED = 1 / 8  # of the placements refresh the time to live of their nodes (walked.lua)
_PAIR = struct.Struct(">dd")
MAX_ANSWER_BYTES = 4 + 32 * 8  # of holders that the index has found itself (held.lua)


def match_source() -> str:
    return scripts.walk() + parts("match.lua", "walked.lua", "held.lua")


def record_source() -> str:
    return scripts.tree() + parts("record.lua")


def _check(answer: object, slots: bytes, chain: bytes) -> None:
    """Raise redis.InvalidResponse if it is not an answer of held.lua about `chain`: the placement script reads it without
    checks, and charges by its numbers."""
    most = len(chain) // INDEX_KEY_BYTES
    if isinstance(answer, bytes) and len(answer) <= max(len(slots), MAX_ANSWER_BYTES):
        whole = len(answer) == len(slots) if slots else len(answer) % 8 == 4
        if whole and all(
            held <= most for held in struct.unpack(f">{len(answer) // 4}I", answer)[:: 1 if slots else 2]
        ):
            return
    raise redis.InvalidResponse("the index's answer to a match is malformed")


class PrefixIndex:
    """Calls of the index's Redis; while it does not answer, neither `match` nor `record` raises."""

    def __init__(self, config: RouterConfig, rng: random.Random, clock: Callable[[], float] = time.monotonic):
        self._config = config
        self._clock = clock
        self._late_since: float | None = None  # None: the last match was answered in time
        self._rng = rng
        self._keys = [slot_keys.owners(config.namespace)]
        self._line = ScriptLine(config.index_url)
        self._match, self._record = (
            ScriptCall(self._line, text) for text in (match_source(), record_source())
        )
        self._backoff = RedisBackoff(RETRY_SECONDS, rng, clock)
        self._client = connect_async(config.index_url, MATCH_SECONDS)
        self.watch = MemoryWatch(slot_keys.owners(config.namespace), index=True)
        self._poll = RedisPoll(self._client, (self.watch,))
        self.errors = Counter({"match": 0, "record": 0})  # calls that were not answered in time
        self.seconds = metrics.REDIS_CALLS.create()  # of matches, as a request waits for them

    def start(self) -> None:
        self._poll.start()

    async def close(self) -> None:
        await self._poll.close()
        await self._line.close()
        await self._client.aclose()

    @property
    def up(self) -> bool:
        """Whether matches are answered in time."""
        return not self._backoff.is_failing

    async def match(self, request: PlacementRequest, candidates: Candidates | Heads, chance: float) -> bytes:
        """The holders of the prompt's prefix and their covered lengths, packed for matched.lua; empty while the index does
        not answer. `chance`: the random number of the placement."""
        if not request.chain or not self._backoff.may_ask():
            return b""
        memory = self.watch.memory
        arguments: list[Argument] = [
            scripts.prefix(self._config.namespace, candidates.model_id),
            request.chain,
            feeds(self._config, memory),
            _PAIR.pack(chance, ttl_ms(memory)),
            candidates.slots,
        ]
        began = self._clock()
        try:
            answer = await self._match(self._keys, arguments, MATCH_SECONDS)
            _check(answer, candidates.slots, request.chain)
        except (redis.RedisError, TimeoutError, OSError) as error:
            self._late(began)
            self._failed(error)
            return b""
        self._answered(began, self._clock())
        return bytes(answer)

    def _answered(self, began: float, ended: float) -> None:
        self.seconds.observe(ended - began)
        if ended - began <= LATE_SECONDS:
            self._late_since = None
        elif ended - self._late(began) >= LATE_FOR_SECONDS:
            self._failed(TimeoutError(f"no answer within {LATE_SECONDS} s for {LATE_FOR_SECONDS} s"))
            return
        if not self.up:
            log.warning("router %s places with the prefix index again", self._config.router_id)
        self._backoff.answered()

    def _late(self, began: float) -> float:
        """Note a match whose answer was late or missing. Returns since when none came in time."""
        if self._late_since is None:
            self._late_since = began
        return self._late_since

    def record(self, request: PlacementRequest, placed: Placed) -> None:
        """Expect the prompt's blocks at the workers of the placement. Not awaited; what is lost costs cached tokens."""
        memory = self.watch.memory
        fed = feeds(self._config, memory)
        if not request.chain or not self.up or fed in ("reported", "kept"):
            return
        prefill = placed.prefill
        if prefill is None:
            workers = [placed.decode]
        else:
            workers = [prefill] if request.ends_at_prefill else [placed.decode, prefill]
        arguments: list[Argument] = [
            scripts.prefix(self._config.namespace, placed.decode.model_id),
            request.chain,
            _PAIR.pack(predict_ms(self._config, memory), ttl_ms(memory)),
            fed,
            b"0" if self._rng.random() < TENDED else b"1",
            *(str(one.slot) for one in workers),
        ]
        if not self._record.send(self._keys, arguments, MATCH_SECONDS, self._unrecorded):
            self.errors["record"] += 1

    def _unrecorded(self, error: BaseException) -> None:
        self.errors["record"] += 1
        log.debug("a placement is not in the prefix index: %s", error)

    def _failed(self, error: Exception) -> None:
        self.errors["match"] += 1
        if self.up:
            reason = str(error) or type(error).__name__
            log.warning(
                "router %s places by load alone, without the prefix index: %s", self._config.router_id, reason
            )
        self._backoff.failed()
