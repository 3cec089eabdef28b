"""Injects faults: signals, orders at named points, cuts of the network, faults of Redis and of clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.faults import orders
from tests.chaos.redis_faults import RedisFaults
from tests.chaos.rows import ANY_MOMENT, Fault
from tests.chaos.target import Target
from tests.chaos.workload import Workload
from tests.harness.fault_orders import give_orders, read_injected
from tests.harness.rank_processes import leader_of, rank_pids
from tests.harness.run_proxy import RunningProxy

OF_CANCELLED = frozenset({"message.abort", "message.aborted"})
IN_FLIGHT_SECONDS = 20.0
CROWD = 18
WITHDRAWN_SECONDS = 0.5  # from taking an order to saying that it was carried out


@dataclass(frozen=True)
class InjectedFault:
    """What was done. `in_flight` streams ran at that moment, `hit` of them through the victim."""

    began: float
    pids: tuple[int, ...]
    routers: tuple[str, ...]  # HTTP addresses of routers that were hit
    in_flight: int
    hit: int
    held_seconds: float


class FaultInjector:
    """Carries faults out on one cluster. `orders` is the directory that its processes take orders from."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        orders_directory: Path,
        network: RunningProxy,
        redis: RedisFaults | None = None,
    ):
        self._target = target
        self._workload = workload
        self._orders = orders_directory
        self._network = network
        self._redis = redis

    async def inject(self, fault: Fault) -> InjectedFault | None:
        """Return once the fault is injected; a stop or a cut, once it has ended. None: no request was at its point or
        victim, and nothing was done."""
        await asyncio.sleep(fault.delay_seconds)
        acts = {
            "attach": self._attach,
            "cancel": self._cancel,
            "crowd": self._crowd,
            "cut": self._cut_links if fault.row.role == "link" else self._cut,
            "nothing": self._nothing,
        }
        if fault.row.role == "redis servers":
            acts[fault.row.act] = self._redis_servers
        act = acts.get(fault.row.act) or (self._signal if fault.point == ANY_MOMENT else self._order)
        deadline = asyncio.get_running_loop().time() + IN_FLIGHT_SECONDS
        while not self._workload.live:
            if asyncio.get_running_loop().time() > deadline:
                return None
            await asyncio.sleep(0.005)
        return await act(fault, deadline)

    # --- at a point --------------------------------------------------------------------------------------

    async def _order(self, fault: Fault, deadline: float) -> InjectedFault | None:
        """The first process that passes the point for the `at`-th time fails."""
        name = f"{fault.number}-{fault.rng.getrandbits(32):08x}"
        order = orders.Order(name, fault.point, fault.row.act, fault.at, fault.hold_seconds)
        # Read now: a router that is killed there may have a successor before the record of it is read.
        before = self._target.state()["router"]
        (self._orders / "injected.jsonl").unlink(missing_ok=True)
        give_orders(self._orders, [order])
        try:
            done = await self._carried_out(name, deadline, fault)
        finally:
            give_orders(self._orders, [])
        if done is None:  # it may have been carried out while it was withdrawn
            await asyncio.sleep(WITHDRAWN_SECONDS)
            done = self._injected(name)
        if done is None or not done.whose:
            return None
        in_flight = len(self._workload.live)
        if fault.row.act == "stop":
            try:
                await asyncio.sleep(fault.hold_seconds)
            finally:
                _send([done.pid], signal.SIGCONT)
        held = fault.hold_seconds if fault.row.act in ("stop", "delay") else 0.0
        hit = sum(done.process in stream.workers for stream in self._workload.live)
        return InjectedFault(
            done.monotonic, (done.pid,), _endpoints(before, [done.pid]), in_flight, hit or 1, held
        )

    async def _carried_out(self, name: str, deadline: float, fault: Fault) -> orders.InjectedFault | None:
        """Wait for the record of the order. Requests are cancelled where only cancelled ones pass the point: too few
        others end during their hand-off."""
        while asyncio.get_running_loop().time() < deadline:
            if (done := self._injected(name)) is not None:
                return done
            if fault.point in OF_CANCELLED:
                await asyncio.sleep(fault.rng.uniform(0.02, 0.1))
                early = [one for one in self._workload.live if not one.tokens and not one.cancel_asked]
                if early:
                    self._workload.cancel(fault.rng.choice(early))
            await asyncio.sleep(0.005)
        return None

    def _injected(self, name: str) -> orders.InjectedFault | None:
        return next((one for one in read_injected(self._orders) if one.id == name), None)

    # --- by signal ---------------------------------------------------------------------------------------

    async def _signal(self, fault: Fault, deadline: float) -> InjectedFault | None:
        loop = asyncio.get_running_loop()
        while not (victims := self._victims(fault)):
            if loop.time() > deadline:
                return None
            await asyncio.sleep(0.005)
        live = self._workload.live
        workers = {*victims, *map(leader_of, victims)} if fault.row.rank else set(victims)
        hit = sum(any(self._target.pid_of(worker) in workers for worker in stream.workers) for stream in live)
        routers = _endpoints(self._target.state()["router"], victims)
        began, in_flight, held = loop.time(), len(live), 0.0
        _send(victims, signal.SIGKILL if fault.row.act == "kill" else signal.SIGSTOP)
        if fault.row.act == "stop":
            held = fault.hold_seconds
            try:
                await asyncio.sleep(held)
            finally:
                _send(victims, signal.SIGCONT)
        return InjectedFault(began, tuple(victims), routers, in_flight, hit, held)

    def _victims(self, fault: Fault) -> list[int]:
        """Empty while no request is in flight there."""
        live = self._workload.live
        pids = sorted(self._target.pids(fault.row.role))
        if not live or fault.row.all_of_role or fault.row.role == "redis":
            return pids if live else []
        if fault.row.role in ("router", "process"):
            return [fault.rng.choice(pids)]
        busy = {self._target.pid_of(worker) for stream in live for worker in stream.workers} & set(pids)
        leaders = sorted(pid for pid in busy if pid is not None)
        chosen = [rank for leader in leaders for rank in rank_pids(leader)] if fault.row.rank else leaders
        return [fault.rng.choice(chosen)] if chosen else []

    # --- the network -------------------------------------------------------------------------------------

    async def _cut(self, fault: Fault, deadline: float) -> InjectedFault | None:
        """Between one process of each role; what is on its way arrives when the cut heals."""
        loop = asyncio.get_running_loop()
        while (pair := self._pair(fault)) is None:
            if loop.time() > deadline:
                return None
            await asyncio.sleep(0.005)
        source, worker = pair
        began, in_flight = loop.time(), len(self._workload.live)
        hit = sum(worker["id"] in stream.workers for stream in self._workload.live)
        links = self._target.link_addresses()
        cut = self._network.cut([source], [worker["address"], links[worker["id"]]], fault.way)
        try:
            await asyncio.sleep(fault.hold_seconds)
        finally:
            self._network.heal()
        return InjectedFault(began, (), (), in_flight, hit, fault.hold_seconds) if cut else None

    async def _cut_links(self, fault: Fault, deadline: float) -> InjectedFault | None:
        """All links of one decode worker that serves requests in flight; its calls are not cut."""
        loop = asyncio.get_running_loop()
        while not (busy := self._decoding()):
            if loop.time() > deadline:
                return None
            await asyncio.sleep(0.005)
        worker = fault.rng.choice(sorted(busy))
        address = self._target.link_addresses()[worker]
        began, in_flight = loop.time(), len(self._workload.live)
        hit = sum(worker in stream.workers for stream in self._workload.live)
        cut = self._network.cut([], [address], fault.way)
        try:
            await asyncio.sleep(fault.hold_seconds)
        finally:
            self._network.heal()
        return InjectedFault(began, (), (), in_flight, hit, fault.hold_seconds) if cut else None

    def _decoding(self) -> set[str]:
        """Decode workers with streams that have had a token."""
        decode = {one["id"] for one in self._target.state()["decode"]}
        return decode & {w for stream in self._workload.live if stream.tokens for w in stream.workers}

    async def _attach(self, fault: Fault, deadline: float) -> InjectedFault | None:
        """A link is reset, and once more when it has attached its handles."""
        name = f"{fault.number}-{fault.rng.getrandbits(32):08x}"
        give_orders(self._orders, [orders.Order(name, fault.point, "reset")])
        try:
            injected = await self._cut_links(replace(fault, way="reset", hold_seconds=0.01), deadline)
            done = await self._carried_out(name, deadline, fault) if injected is not None else None
        finally:
            give_orders(self._orders, [])
        return injected if done is not None else None

    def _pair(self, fault: Fault) -> tuple[int, dict[str, Any]] | None:
        """A process, and a worker that it talks to for a request in flight."""
        source_role, target_role = fault.row.role.split(">")
        state = self._target.state()
        pairs = [
            (source["pid"], target)
            for source in state[source_role]
            for target in state[target_role]
            if any(
                target["id"] in stream.workers and (source_role == "router" or source["id"] in stream.workers)
                for stream in self._workload.live
            )
        ]
        return fault.rng.choice(pairs) if pairs else None

    # --- Redis ---------------------------------------------------------------------------------------------

    async def _redis_servers(self, fault: Fault, deadline: float) -> InjectedFault | None:
        assert self._redis is not None, "this cluster has the Redis of `baton up`"
        await asyncio.to_thread(self._redis.settle)
        if not (in_flight := len(self._workload.live)):
            return None
        began = asyncio.get_running_loop().time()
        held = await self._redis.inject(fault)
        return InjectedFault(began, (), (), in_flight, in_flight, held)

    # --- clients -----------------------------------------------------------------------------------------

    async def _cancel(self, fault: Fault, deadline: float) -> InjectedFault | None:
        streams = [stream for stream in self._workload.live if not stream.cancel_asked]
        chosen = fault.rng.sample(streams, fault.rng.randint(1, len(streams))) if streams else []
        began = asyncio.get_running_loop().time()
        for stream in chosen:
            self._workload.cancel(stream)
        return InjectedFault(began, (), (), len(streams), len(chosen), 0.0) if chosen else None

    async def _crowd(self, fault: Fault, deadline: float) -> InjectedFault | None:
        """More long answers at once than the decode workers have blocks for."""
        began, in_flight = asyncio.get_running_loop().time(), len(self._workload.live)
        await self._workload.crowd(fault.rng, CROWD)
        return InjectedFault(began, (), (), in_flight, CROWD, 0.0)

    async def _nothing(self, fault: Fault, deadline: float) -> InjectedFault | None:
        live = len(self._workload.live)
        return InjectedFault(asyncio.get_running_loop().time(), (), (), live, 0, 0.0)


def _endpoints(routers: Iterable[dict[str, Any]], pids: Sequence[int]) -> tuple[str, ...]:
    return tuple(one["http"] for one in routers if not {one["pid"], *one["processes"]}.isdisjoint(pids))


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # its parent was faster
            os.kill(pid, number)
