"""Routers exchange their counts through Redis, so that each can show the whole cluster.

Without it, a page behind a load balancer would show the counts of another router at each refresh.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis

from cluster.membership import keys
from cluster.redis.reasons import reason
from router.observe.live.report import RouterReport, decode, encode
from router.placement.script_call import ScriptCall

log = logging.getLogger(__name__)
CALL_SECONDS = 0.5
FORGET_SECONDS = 30.0


@dataclass(frozen=True)
class RouterCounts:
    """A router's report, and how long ago (by Redis's clock) it was made."""

    report: RouterReport
    age_seconds: float


class Exchange:
    def __init__(self, redis_url: str, namespace: str, router_id: str):
        script = resources.files("router.observe.live").joinpath("exchange.lua").read_text()
        self._call = ScriptCall(redis_url, script)
        self._keys = [keys.router_reports(namespace)]
        self._router_id = router_id
        self._down = False

    async def swap(self, own: RouterReport) -> dict[str, RouterCounts]:
        """All routers' reports by id; only the own one while Redis does not answer."""
        others = await self._ask(encode(own)) or {}
        return {**others, self._router_id: RouterCounts(own, 0.0)}

    async def leave(self) -> None:
        await self._ask(b"")
        await self._call.close()

    async def _ask(self, report: bytes) -> dict[str, RouterCounts] | None:
        arguments = (self._router_id, report, int(FORGET_SECONDS * 1000))
        try:
            read = await _read(await self._call(self._keys, arguments, CALL_SECONDS))
        except (redis.RedisError, TimeoutError, OSError) as error:
            if not self._down:
                log.warning("the live view shows this router alone: %s", reason(error))
            self._down = True
            return None
        self._down = False
        return read


async def _read(answer: Any) -> dict[str, RouterCounts]:
    """Without what is no router's report. One in a turn of the event loop: a report has thousands of numbers. Raises
    redis.InvalidResponse."""
    found = {}
    try:
        for name, age, raw in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
            report = decode(raw)
            if report is not None and (known := _name(name)) is not None:
                found[known] = RouterCounts(report, int(age) / 1000)
            await asyncio.sleep(0)
    except (TypeError, ValueError, LookupError, AttributeError):
        raise redis.InvalidResponse("the answer about the routers' reports is malformed") from None
    return found


def _name(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
