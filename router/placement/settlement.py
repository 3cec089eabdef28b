"""Reports to Redis which of this router's attempts have computed their prompt, and which have ended."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from importlib import resources
from typing import Any

import redis

from cluster.config.router import RouterConfig
from cluster.membership.scripts import SETS
from cluster.protocol.times import ROUTER_LEASE_SECONDS
from router.placement.charges import Charges
from router.placement.keys import PlacementKeys
from router.placement.script_call import Argument, RedisBackoff, ScriptCall
from router.placement.table_walk import TableWalk

log = logging.getLogger(__name__)
SETTLE_SECONDS = 0.05
SCRIPT_SECONDS = 0.1
# Of SCRIPT_SECONDS, for an answer: no request waits for it, and it must be longer than a placement's time. Where Redis
# answered placements in time and settlements too late, only the first changes would ever be sent, again and again, and
# attempts that have ended would stay load, for which later requests are refused.
ANSWER_MULTIPLE = 4
RETRY_SECONDS = 0.5  # at most, between two tries of a Redis that does not answer, or refuses
MAX_CLOSING_CALLS = 128  # a router that stops takes its charges off; what is left expires with its lease
# Changes and lost calls that are kept for a Redis that does not answer. Beyond them the router takes a new run when it
# does, to which it adds the charges that are left.
MAX_UNCONFIRMED = 16_384
WARN_SECONDS = 60.0  # between two warnings of another router with the same id, which each settling takes over
_LATER_RUN, _LOST_TABLE = -1, -2  # settle.lua's answers


def settle_source() -> str:
    """The script that applies changes of a router's charges."""
    files = resources.files("router.placement")
    return SETS + "".join(files.joinpath(name).read_text() for name in ("charges.lua", "settle.lua"))


class Calls:
    """Sequence numbers of a router's script calls in one run, with which Redis applies a repeated or late call only once.

    Redis assigns `run` at start (0 before that); calls of an earlier run of the same router name
    are void."""

    def __init__(self, run: int = 0) -> None:
        self.run = run
        self._next = 1
        self._awaited: dict[int, bytes] = {}
        self._unanswered: dict[int, bytes] = {}  # given up: Redis may have charged them, or may still
        self._settled = 0

    def restart(self, run: int) -> None:
        """Numbers go on: a placement of the run before may still be awaited."""
        self.run = run
        self._unanswered.clear()

    def begin(self, transfer_id: bytes) -> int:
        """Begin a placement; returns its number, to be passed to `end`."""
        number, self._next = self._next, self._next + 1
        self._awaited[number] = transfer_id
        return number

    def end(self, number: int, *, answered: bool) -> None:
        transfer_id = self._awaited.pop(number, None)
        if transfer_id is not None and not answered:
            self._unanswered[number] = transfer_id

    @property
    def in_flight(self) -> frozenset[bytes]:
        """Transfer ids of the placements whose answers are awaited."""
        return frozenset(self._awaited.values())

    @property
    def unanswered(self) -> list[bytes]:
        """Transfer ids of the placements that were given up and that Redis may still charge."""
        return list(self._unanswered.values())

    def settle(self) -> tuple[int, int, int]:
        """(run, number of the next call, oldest placement still awaited): Redis charges no older one that arrives late."""
        self._settled += 1
        return self.run, self._settled, min(self._awaited, default=self._next)

    def void_below(self, oldest: int) -> None:
        """Redis charges no placement before this one any more."""
        self._unanswered = {number: one for number, one in self._unanswered.items() if number >= oldest}


class Settlement:
    """Sends the changes 50 ms after the first one, and to renew the router's lease.

    A change is repeated until Redis confirms it. Lost answers, double charges and a Redis that was rolled back heal by a
    walk over Redis's table every two seconds. A call that failed is repeated after a random pause: a Redis that loads its
    data, or is no master any more, would get 20 new connections a second from each router.
    """

    def __init__(
        self, config: RouterConfig, keys: PlacementKeys, charges: Charges, rng: random.Random | None = None
    ):
        self._router_id = config.router_id
        self._keys = keys
        self._charges = charges
        self._script = ScriptCall(config.redis_url, settle_source())
        self._backoff = RedisBackoff(RETRY_SECONDS, rng)
        self._calls = Calls()
        self._walk = TableWalk(charges)
        self._dirty = asyncio.Event()  # there are changes that Redis has not confirmed
        self._closed = False
        self._warned = -WARN_SECONDS  # of another router with this id
        self._task: asyncio.Task[None] | None = None
        self.errors = 0  # calls that Redis did not answer in time
        self.skipped = 0  # fields of Redis's tables that are no charges

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
        for _ in range(MAX_CLOSING_CALLS):
            errors = self.errors
            await self.settle()
            if not self._charges.pending or self.errors > errors:
                break
        await self._script.close()

    def request(self) -> None:
        """Settle soon: the charges have changed, or Redis may have charged what no request holds."""
        self._dirty.set()

    def begin_placement(self, transfer_id: bytes) -> int:
        """Returns the number of the call, which goes to `end_placement`."""
        return self._calls.begin(transfer_id)

    def end_placement(self, number: int, *, answered: bool) -> None:
        """`answered`: Redis has answered. Otherwise it may have charged the placement, or may do so later."""
        self._calls.end(number, answered=answered)
        if not answered:
            self._dirty.set()

    async def settle(self) -> None:
        try:
            if not self._calls.run:
                await self._take_run()
            await self._settle()
            self._backoff.answered()
        except (redis.RedisError, TimeoutError, OSError) as error:
            self.errors += 1
            self._backoff.failed()
            log.debug("charges of router %s wait for Redis: %s", self._router_id, error)
            self._dirty.set()
            if self._charges.unconfirmed + len(self._calls.unanswered) > MAX_UNCONFIRMED:
                self._calls.restart(0)

    async def _take_run(self) -> None:
        """Get a run, to which all charges are added. What has ended before is in no table of it, so that is not kept while
        Redis does not answer."""
        self._charges.restore_all()
        given = await self._send(0, 0, 0, "", 0, 0)
        if type(given) is not int:
            raise redis.InvalidResponse("the answer to a router's first settlement is malformed")
        self._calls.restart(given)
        self._walk.abandon()
        self._charges.restore_all()

    async def _settle(self) -> None:
        for transfer_id in self._calls.unanswered:
            if transfer_id not in self._charges:
                self._charges.withdraw(transfer_id)
        changes = self._charges.changes()
        run, number, oldest = self._calls.settle()
        step = self._walk.next_step()
        answer = await self._send(run, number, oldest, step, *changes.arguments)
        if not _is_settlement(answer):  # another exception would end the task that settles
            raise redis.InvalidResponse("the answer to a settlement is malformed")
        status, skipped, more, cursor, *found = answer
        if status in (_LATER_RUN, _LOST_TABLE):
            self._take_new_run(int(status))
            return
        self._charges.confirmed(changes)
        self._calls.void_below(oldest)
        if step:
            self._walk.step(cursor, found, self._calls.in_flight)
        if skipped:
            self.skipped += int(skipped)
            log.warning(
                "%d charges in Redis could not be read; what they added to the load stays until the workers restart",
                skipped,
            )
        if more or self._charges.pending or self._calls.unanswered or self._walk.under_way:
            self._dirty.set()

    def _take_new_run(self, status: int) -> None:
        """All charges are added under the new run; a table under the old one is dropped as a dead router's."""
        if status == _LATER_RUN and time.monotonic() - self._warned > WARN_SECONDS:
            self._warned = time.monotonic()
            log.warning(
                "another router uses the id %r; this one takes it over. Give each router its own router_id",
                self._router_id,
            )
        self._calls.restart(0)
        self._dirty.set()

    async def _send(self, run: int, *arguments: Argument) -> Any:
        identity = self._router_id, int(ROUTER_LEASE_SECONDS * 1000), run
        return await self._script(
            self._keys.settle(run), [*identity, *arguments], ANSWER_MULTIPLE * SCRIPT_SECONDS
        )

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
            due = self._dirty.is_set() or quiet > ROUTER_LEASE_SECONDS / (5 if self._charges else 2)
            if due and self._backoff.may_ask():
                self._dirty.clear()
                try:
                    await self.settle()
                except Exception:  # the task goes on, or nothing of this router would be settled again
                    log.exception("charges could not be settled; retrying")
                    await asyncio.sleep(ROUTER_LEASE_SECONDS / 5)
                    self._dirty.set()
                renewed = time.monotonic()
            await asyncio.sleep(SETTLE_SECONDS)


def _is_settlement(answer: object) -> bool:
    """Whether it is a list of status, fields skipped, whether there is more, the walk's cursor, and transfer ids."""
    return (
        isinstance(answer, list)
        and len(answer) >= 4
        and all(type(one) is int for one in answer[:3])
        and all(isinstance(one, bytes) for one in answer[3:])
    )
