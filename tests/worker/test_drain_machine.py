"""A draining worker under events in any order: marks in Redis, signals and repetitions, requests that come, finish or
never end, a successor that comes and goes, an engine that hangs. Nothing is given back too early or twice, no request
is admitted, and it always ends; its probes report its state."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.errors import DrainingError
from tests.harness.virtual_time import VirtualLoop
from worker.drain import END_SECONDS, POLL_SECONDS, SUCCESSOR_SECONDS, drain
from worker.health import TICK_SECONDS, Health, Phase
from worker.shutdown import Shutdown

MIGRATE, LIMIT, STALL = 3.0, 8.0, 4.0
SLACK = 3 * POLL_SECONDS
FORWARD = list(Phase)


class Role:
    """Its requests; a router reads the end of each one only after `reads_after` seconds."""

    def __init__(self, machine: LeavingMachine):
        self._machine = machine
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.unread: set[int] = set()
        self.returned: list[int] = []

    def idle(self) -> bool:
        return not (self.waiting or self.running or self.unread)

    def adapters_held(self) -> set[str]:
        return {"adapter"}

    async def return_waiting(self) -> None:
        assert self._machine.saw_successor, "given back, and no worker was there to take it"
        self._end(self.waiting)

    async def return_all(self) -> None:
        elapsed = self._machine.loop.time() - self._machine.began
        assert elapsed >= MIGRATE - 1e-6, "given back before it had its time"
        assert self._machine.saw_successor or elapsed >= LIMIT - 1e-6, "no worker could go on with it"
        assert self._machine.engine_moves, "a hung engine gives nothing back"
        self._end(self.waiting)
        self._end(self.running)

    def closers(self) -> list[Any]:
        return []

    def _end(self, which: set[int]) -> None:
        self.returned += which
        self.unread |= which
        which.clear()


class LeavingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.patch = pytest.MonkeyPatch()
        defaults = drain.__kwdefaults__
        assert defaults is not None
        self.patch.setitem(defaults, "clock", self.loop.time)
        self.engine_moves = self.registered = True
        self.successor = self.saw_successor = self.blocked = False
        self.began = float("inf")  # draining
        self.stood_still = 0.0  # the loop, in seconds
        self.stops: list[asyncio.Task[None]] = []
        self.stopped = 0
        self.numbers = 0
        self.phases = [Phase.LOADING]

    @initialize(serves=st.sampled_from([True, True, True, False]))
    def build(self, serves: bool) -> None:
        async def make() -> None:
            self.health = Health("w", STALL, self.loop.time)
            self.role = Role(self)
            host = SimpleNamespace(healthy=lambda: self.engine_moves)
            engine: Any = SimpleNamespace(host=host, end_silent_ranks=self.nothing)
            membership: Any = SimpleNamespace(
                set_draining=self.set_draining, has_successor=self.has_successor
            )
            server: Any = SimpleNamespace(set_serving=self.nothing)
            ending: Any = SimpleNamespace(has_failed=False, then="exit")
            self.health.watch(engine_moves=host.healthy, registered=lambda: self.registered)
            self.ticking = self.loop.create_task(self.health.tick())
            config: Any = SimpleNamespace(worker_id="w", drain_migrate_seconds=MIGRATE, drain_seconds=LIMIT)
            role: Any = self.role
            self.worker = Shutdown(
                config,
                role,
                health=self.health,
                ending=ending,
                server=server,
                membership=membership,
                engine=engine,
                close=self.close,
            )

        self.loop.run(make())
        for phase in (Phase.WARMING_UP, Phase.STARTING, Phase.SERVING) if serves else ():
            self.starts(phase)
            self.phases.append(phase)

    async def nothing(self, *_: object) -> None:
        """Of no interest here."""

    async def set_draining(self, then: str) -> None:
        assert self.health.phase is Phase.DRAINING
        self.began = min(self.began, self.loop.time())

    async def has_successor(self, adapters: set[str]) -> bool:
        """The mark in Redis takes a moment to arrive."""
        assert adapters == self.role.adapters_held()
        now = self.successor
        await asyncio.sleep(0.01)
        self.saw_successor = self.saw_successor or now
        return now

    async def close(self) -> None:
        self.health.to(Phase.LEAVING)
        self.stopped += 1
        elapsed = self.loop.time() - self.began
        if self.engine_moves and (self.role.waiting or self.role.running):
            pytest.fail("it left with requests that were not given back")
        assert elapsed <= self.longest(), "it takes for ever"

    def longest(self) -> float:
        return LIMIT + END_SECONDS + SLACK + 0.05 + self.stood_still

    @rule(phase=st.sampled_from([Phase.WARMING_UP, Phase.STARTING, Phase.SERVING]))
    def starts(self, phase: Phase) -> None:
        """A step of its start, also late or repeated: when it drains already, that changes nothing."""
        if FORWARD.index(phase) == FORWARD.index(self.health.phase) + 1 or self.health.draining:
            before = self.health.phase
            self.health.to(phase)
            assert not (before in (Phase.DRAINING, Phase.LEAVING) and self.health.phase is not before)

    @rule(waits=st.booleans())
    def a_request_comes(self, waits: bool) -> None:
        if self.health.phase is not Phase.SERVING:
            if self.health.draining:
                with pytest.raises(DrainingError):
                    self.health.check_accepting()
            return
        self.health.check_accepting()
        self.numbers += 1
        (self.role.waiting if waits else self.role.running).add(self.numbers)

    @rule()
    def one_begins(self) -> None:
        if self.role.waiting:
            self.role.running.add(self.role.waiting.pop())

    @rule()
    def one_finishes(self) -> None:
        if self.role.running:
            self.role.running.pop()

    @rule()
    def a_router_reads_the_ends(self) -> None:
        self.role.unread.clear()

    @rule(there=st.booleans())
    def another_worker(self, there: bool) -> None:
        self.successor = there

    @rule(there=st.booleans())
    def redis(self, there: bool) -> None:
        self.registered = there

    @rule(moves=st.sampled_from([True, True, False]))
    def the_engine(self, moves: bool) -> None:
        self.engine_moves = moves

    @rule(how=st.sampled_from(["drain", "stop", "stop"]))
    def is_told_again(self, how: str) -> None:
        """By Redis, by a signal, and both; sometimes that is the first time."""
        if self.stops or self.numbers > 4:
            self.is_told_to_leave(how)

    def is_told_to_leave(self, how: str) -> None:
        call = self.worker.stop if how == "stop" else self.worker.drain

        async def tell() -> None:
            self.stops.append(self.loop.create_task(call()))
            await asyncio.sleep(0)

        self.loop.run(tell())
        self.loop.settle()

    @rule(successor=st.booleans(), moves=st.sampled_from([True, True, True, False]), waits=st.booleans())
    def is_told_to_leave_at_work(self, successor: bool, moves: bool, waits: bool) -> None:
        """With requests that run, and perhaps one that waits: by chance alone few orders come to that."""
        if self.stops:
            return
        for waiting in (False, False, True)[: 2 + waits]:
            self.a_request_comes(waiting)
        self.another_worker(successor)
        self.the_engine(moves)
        self.is_told_to_leave("stop")

    @rule(seconds=st.sampled_from([POLL_SECONDS, SUCCESSOR_SECONDS, 2.0, LIMIT + END_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        hangs = not self.engine_moves and not self.role.unread  # those are waited for in any case
        idle = self.role.idle()
        self.loop.pass_time(seconds + SLACK)
        if not self.stops:
            return
        if idle or hangs or self.loop.time() - self.began > self.longest():
            assert all(task.done() for task in self.stops), "nothing keeps it, and it is still there"

    @rule(seconds=st.sampled_from([1.0, STALL + 0.1]))
    def the_loop_stands_still(self, seconds: float) -> None:
        """Seen from the probes' threads."""
        running = self.health.phase in (Phase.SERVING, Phase.DRAINING)
        self.loop._virtual.now += seconds
        self.stood_still += seconds
        if running and seconds > STALL:
            assert any("event loop" in why for why in self.health.why_not_live())
        self.loop.pass_time(TICK_SECONDS + SLACK)

    @invariant()
    def one_way_and_the_probes_say_so(self) -> None:
        if not hasattr(self, "worker"):
            return
        phase = self.health.phase
        if phase is not self.phases[-1]:
            assert FORWARD.index(phase) > FORWARD.index(self.phases[-1]), "back to where it was"
            self.phases.append(phase)
        assert len(self.role.returned) == len(set(self.role.returned)), "given back twice"
        assert self.stopped <= 1, "it left twice"
        ready, live = not self.health.why_not_ready(), not self.health.why_not_live()
        assert not ready or (phase is Phase.SERVING and self.registered and self.engine_moves)
        if phase is Phase.SERVING and self.registered and self.engine_moves:
            assert ready, "Kubernetes would send it nothing"
        if phase in (Phase.SERVING, Phase.DRAINING):
            assert live == self.engine_moves, "killed while it drains well, or kept while it hangs"
        else:
            assert live
        for task in self.stops:
            if task.done():
                task.result()

    def teardown(self) -> None:
        if hasattr(self, "worker"):
            self.is_told_to_leave_whatever()
        self.patch.undo()
        self.loop.close()

    def is_told_to_leave_whatever(self) -> None:
        self.loop.run(self.worker.stop())
        assert self.stopped == 1 and self.health.phase is Phase.LEAVING
        self.ticking.cancel()
        self.loop.settle()


LeavingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLeaving = LeavingMachine.TestCase
