"""Calls the placement script, whose arguments are the cost model's, the request's and the candidates'."""

from __future__ import annotations

import logging
import random
import struct
import time
from collections.abc import Callable
from importlib import resources

import redis

from cluster.config.router import RouterConfig
from cluster.errors import OverloadedError
from cluster.index import scripts
from cluster.membership.topology import LEVELS
from cluster.protocol.times import ROUTER_LEASE_SECONDS
from cluster.telemetry.metrics import router as metrics
from router.placement.calibration import Calibration
from router.placement.candidates import Candidates
from router.placement.keys import PlacementKeys
from router.placement.memory_watch import MemoryWatch
from router.placement.script_call import Argument, RedisBackoff, ScriptCall
from router.placement.settlement import SCRIPT_SECONDS
from router.placement.types import Placed, PlacementRequest

log = logging.getLogger(__name__)
PREDICT_SECONDS = 10.0
RETRY_SECONDS = 0.5  # at most, between two tries of a Redis that does not answer
MIN_RETRY_SECONDS = 1.0  # what a refused client is told to wait at least
_TERMS = ("cost", "prefill_wait", "prefill", "handoff", "decode_penalty", "first_token")
_TOO_LATE, _LEAVING, _VOID = -3, -4, -5


def script_source() -> str:
    """The placement script, whole."""
    files = resources.files("router.placement")
    return scripts.tree() + "".join(files.joinpath(name).read_text() for name in ("charges.lua", "place.lua"))


class PlaceScript:
    def __init__(
        self,
        config: RouterConfig,
        keys: PlacementKeys,
        calibration: Calibration,
        memory: MemoryWatch,
        rng: random.Random,
        on_unanswered: Callable[[], None],
    ):
        """`on_unanswered`: a call was given up, so no request holds what it may have charged."""
        self._config = config
        self._keys = keys
        self._calibration = calibration
        self._memory = memory
        self._rng = rng
        self._script = ScriptCall(config.redis_url, script_source(), on_unanswered=on_unanswered)
        self._backoff = RedisBackoff(RETRY_SECONDS, rng)
        self.errors = 0  # calls that Redis did not answer in time
        self.seconds = metrics.REDIS_CALLS.create()  # as a request waits for it
        self.cost_terms = {name: metrics.PLACEMENT_COST.create() for name in _TERMS}  # of the chosen pairs

    def may_ask(self) -> bool:
        """Whether to call Redis now; while it does not answer, true for one call per pause."""
        return self._backoff.may_ask()

    async def __call__(
        self, request: PlacementRequest, candidates: Candidates, run: int, number: int
    ) -> Placed | None:
        """`run`, `number`: of this call (router/placement/settlement.py). None: the best worker is leaving, or has left.

        Raises OverloadedError where the first token would come too late, and TimeoutError, redis.RedisError or OSError.
        """
        arguments = [
            *self._arguments(request, candidates.model_id),
            *(run, number, int(ROUTER_LEASE_SECONDS * 1000), request.transfer_id),
            *candidates.arguments,
        ]
        began = time.monotonic()
        try:
            answer = await self._script(self._keys.place(run), arguments, 2 * SCRIPT_SECONDS)
            if int(answer[0]) == _VOID:
                raise TimeoutError(
                    f"another router uses the id {self._config.router_id!r}: give each its own router_id"
                )
        except (redis.RedisError, TimeoutError, OSError) as error:
            self._failed(error)
            raise
        self.seconds.observe(time.monotonic() - began)
        self._answered()  # also where it refuses
        if int(answer[0]) == _TOO_LATE:
            raise too_late(request, float(answer[1]))
        if int(answer[0]) == _LEAVING:
            return None
        p, d, hit, decode_hit, uncached = map(int, answer[:5])
        terms = {name: float(value) for name, value in zip(_TERMS, answer[5:], strict=True)}
        for name, value in terms.items():
            self.cost_terms[name].observe(value)
        workers = candidates.workers
        prefill = workers[p - 1] if p else None
        return Placed(prefill, workers[d - 1], hit, decode_hit, True, terms, uncached)

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

    def _arguments(self, request: PlacementRequest, model_id: str) -> list[Argument]:
        c, config, memory = self._calibration, self._config, self._memory.memory
        limits = (request.target_seconds, request.deadline_seconds) if c.known else (0.0, 0.0)
        return [
            scripts.prefix(config.namespace, model_id),
            config.router_id,
            request.chain,
            request.token_count,
            request.kv_group.page_size if request.kv_group is not None else config.page_size,
            request.output_tokens,
            config.local_prefill,
            self._rng.random(),
            c.a,
            c.b,
            c.token_bytes,
            struct.pack(f">{len(LEVELS)}d", *c.rates()),
            c.decode_token_seconds,
            "reported" if memory.pressed else config.index_feeds,
            int(memory.shortened(scripts.NODE_TTL_SECONDS) * 1000),
            int(PREDICT_SECONDS * 1000),
            c.rate,
            request.priority_class,
            *limits,
        ]


def too_late(request: PlacementRequest, first_token_seconds: float) -> OverloadedError:
    limits = [limit for limit in (request.target_seconds, request.deadline_seconds) if limit > 0]
    limit = min(limits, default=0.0)  # a request without a limit is not refused
    return OverloadedError(
        f"the first token would take about {first_token_seconds:.1f} s; a {request.priority_class} request here "
        f"waits at most {limit:.1f} s",
        field="ttft",
        limit=f"{limit:g}",
        retry_after_seconds=max(MIN_RETRY_SECONDS, first_token_seconds - limit),
    )
