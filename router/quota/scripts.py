"""Calls of the quota scripts, which give up on a Redis that is away or slow: a limit is not worth a failed request."""

from __future__ import annotations

import logging
import time
from importlib import resources

import redis

from cluster.redis.reasons import reason
from cluster.telemetry.metrics import router as metrics
from router.placement.script_call import Argument, RedisBackoff, ScriptCall

log = logging.getLogger(__name__)
CALL_SECONDS = 0.1
RETRY_SECONDS = 0.5  # at most, between two tries of a Redis that does not answer


def script_source(name: str) -> str:
    """Source of a script with records.lua in front."""
    folder = resources.files("router.quota")
    return folder.joinpath("records.lua").read_text() + folder.joinpath(name).read_text()


def script_keys(namespace: str, tenant: str, record: str) -> list[str]:
    """KEYS of both scripts."""
    names = f"quota:{tenant}", f"quota-request:{record}", "quota-expiry", "quota-applied"
    return [f"{{{namespace}}}:{name}" for name in names]


class QuotaScripts:
    def __init__(self, redis_url: str, namespace: str):
        self._charge = ScriptCall(redis_url, script_source("charge.lua"))
        self._settle = ScriptCall(redis_url, script_source("settle.lua"))
        self._namespace = namespace
        self._backoff = RedisBackoff(RETRY_SECONDS)
        self.seconds = metrics.REDIS_CALLS.create()
        self.errors = 0  # calls that Redis did not answer in time

    def may_ask(self) -> bool:
        """Whether to call Redis now; while it does not answer, true for one call per pause."""
        return self._backoff.may_ask()

    async def charge(self, tenant: str, record: str, arguments: tuple[Argument, ...]) -> list[int] | None:
        """The answer of charge.lua; None: Redis did not answer in time."""
        return await self._call(self._charge, 3, tenant, record, arguments)

    async def settle(self, tenant: str, record: str, arguments: tuple[Argument, ...]) -> bool:
        """False: Redis did not answer in time."""
        return await self._call(self._settle, 0, tenant, record, arguments) is not None

    async def close(self) -> None:
        await self._charge.close()
        await self._settle.close()

    async def _call(
        self, script: ScriptCall, size: int, tenant: str, record: str, arguments: tuple[Argument, ...]
    ) -> list[int] | None:
        """`size`: numbers in the script's answer."""
        began = time.monotonic()
        try:
            answer = await script(script_keys(self._namespace, tenant, record), arguments, CALL_SECONDS)
            if not (
                isinstance(answer, list) and len(answer) == size and all(type(one) is int for one in answer)
            ):
                raise redis.InvalidResponse("the answer about a quota is malformed")
        except (redis.RedisError, TimeoutError, OSError) as error:
            self.errors += 1
            if not self._backoff.is_failing:
                log.warning("quotas are not checked: %s", reason(error))
            self._backoff.failed()
            return None
        self.seconds.observe(time.monotonic() - began)
        if self._backoff.is_failing:
            log.info("quotas are checked again")
        self._backoff.answered()
        return answer
