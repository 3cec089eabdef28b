"""Keeps Redis's table of this router's charges equal to the router's own."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib import resources

import redis

from cluster.config.router import RouterConfig
from cluster.protocol.times import ROUTER_LEASE_SECONDS
from router.placement.charges import Charges
from router.placement.keys import PlacementKeys
from router.placement.script_call import Argument, ScriptCall

log = logging.getLogger(__name__)
SETTLE_SECONDS = 0.05
SCRIPT_SECONDS = 0.1
_LATER_RUN = -1  # settle.lua's answer if Redis has a later run of this router


def settle_source() -> str:
    """The script that applies a router's table of charges."""
    return resources.files("router.placement").joinpath("settle.lua").read_text()


class Calls:
    """Sequence numbers of a router's script calls in one run, with which Redis applies a repeated or late call only once.

    Redis assigns `run` at start (0 before that); calls of an earlier run of the same router name
    are void."""

    def __init__(self, run: int = 0) -> None:
        self.restart(run)

    def restart(self, run: int) -> None:
        self.run = run
        self._next = 1
        self._awaited: set[int] = set()
        self._settled = 0

    def begin(self) -> int:
        """Begin a placement; returns its number, to be passed to `end`."""
        number, self._next = self._next, self._next + 1
        self._awaited.add(number)
        return number

    def end(self, number: int) -> None:
        self._awaited.discard(number)

    def settle(self) -> tuple[int, int, int]:
        """(run, number of the next table, oldest placement still awaited).

        The table contains every older placement that has not ended, so Redis charges no older one that arrives late.
        """
        self._settled += 1
        return self.run, self._settled, min(self._awaited, default=self._next)


class Settlement:
    """Sends the whole table 50 ms after a change, and to renew the router's lease.

    Lost answers, double charges and a Redis that was rolled back heal with the next table.
    """

    def __init__(self, config: RouterConfig, keys: PlacementKeys, charges: Charges):
        self._router_id = config.router_id
        self._keys = keys.settle
        self._charges = charges
        self._script = ScriptCall(config.redis_url, settle_source())
        self._calls = Calls()
        self._settlings = 0  # begun and ended: while it is odd, one is in flight
        self._dirty = asyncio.Event()  # the charges differ from what Redis was told
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.errors = 0  # calls that Redis did not answer in time

    @property
    def run(self) -> int:
        """The number that Redis gave this run; 0: none yet, and no placement may be charged there."""
        return self._calls.run

    async def start(self) -> None:
        """Settle once, which takes the charges of a killed router of this name off the load; then go on."""
        await self.settle()
        self._task = asyncio.get_running_loop().create_task(self._settle_forever())

    async def close(self) -> None:
        # Not by cancelling alone: the Redis client may swallow a cancellation that meets its own deadline.
        self._closed = True
        self._dirty.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=ROUTER_LEASE_SECONDS)
        self._charges.clear()
        await self.settle()
        await self._script.close()

    def request(self) -> None:
        """Settle soon: the charges have changed, or Redis may have charged what no request holds."""
        self._dirty.set()

    def begin_placement(self) -> tuple[int, int]:
        """The number of the call, and how many settlings have begun and ended; both go to `end_placement`."""
        return self._calls.begin(), self._settlings

    def end_placement(self, number: int, settlings: int, *, charged: bool) -> None:
        """`charged`: a settling at the same time may have taken the charge away; then settle again."""
        self._calls.end(number)
        if charged and (settlings % 2 or self._settlings != settlings):
            self._dirty.set()

    async def settle(self) -> None:
        self._settlings += 1
        try:
            if not self._calls.run:
                self._calls.restart(await self._send(0, 0, 0))
            if await self._send(*self._calls.settle(), *self._charges.table()) == _LATER_RUN:
                log.warning(
                    "another router uses the id %r; this one takes it over. Give each router its own router_id",
                    self._router_id,
                )
                self._calls.restart(0)
                self._dirty.set()
        except (redis.RedisError, TimeoutError, OSError) as error:
            self.errors += 1
            log.debug("charges of router %s wait for Redis: %s", self._router_id, error)
            self._dirty.set()
        finally:
            self._settlings += 1

    async def _send(self, *arguments: Argument) -> int:
        identity = self._router_id, int(ROUTER_LEASE_SECONDS * 1000)
        return int(await self._script(self._keys, [*identity, *arguments], SCRIPT_SECONDS))

    async def _settle_forever(self) -> None:
        renewed = 0.0
        while not self._closed:
            try:
                async with asyncio.timeout(ROUTER_LEASE_SECONDS / 5):
                    await self._dirty.wait()
            except TimeoutError:
                pass
            # An idle router keeps its lease, so that its next charges are not dropped before it has settled them, and
            # removes the charges of routers that died.
            quiet = time.monotonic() - renewed
            if self._dirty.is_set() or quiet > ROUTER_LEASE_SECONDS / (5 if self._charges else 2):
                self._dirty.clear()
                await self.settle()
                renewed = time.monotonic()
            await asyncio.sleep(SETTLE_SECONDS)
