"""The faults: what is done to whom, for how long, drawn from a seed and a number."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.target import Target
from tests.chaos.workload import Workload

KILL_BOUND_SECONDS = 1.5
STOP_BOUND_SECONDS = 6.5
IN_FLIGHT_SECONDS = 20.0


@dataclass(frozen=True)
class Row:
    """One row of the matrix. `bound_seconds`: the longest silence a Baton client may see; None: none is promised."""

    role: str  # router, prefill, decode, redis, or client
    act: str  # kill, stop, cancel, nothing
    everyone: bool = False
    weight: int = 2
    bound_seconds: float | None = KILL_BOUND_SECONDS


ROWS: dict[str, Row] = {
    "kill prefill": Row("prefill", "kill", weight=4),
    "kill decode": Row("decode", "kill", weight=4),
    "kill router": Row("router", "kill", weight=3),
    "stop prefill": Row("prefill", "stop", weight=3, bound_seconds=STOP_BOUND_SECONDS),
    "stop decode": Row("decode", "stop", weight=3, bound_seconds=STOP_BOUND_SECONDS),
    "stop router": Row("router", "stop", weight=1, bound_seconds=None),
    "kill redis": Row("redis", "kill"),
    "stop redis": Row("redis", "stop"),
    "kill all prefill": Row("prefill", "kill", everyone=True, weight=1),
    "kill all decode": Row("decode", "kill", everyone=True, weight=1, bound_seconds=None),
    "cancel": Row("client", "cancel", weight=3),
    # What the machine alone does to a stream: the other rows' recoveries hold this much of it.
    "nothing": Row("client", "nothing", weight=1, bound_seconds=None),
}


@dataclass(frozen=True)
class Fault:
    number: int
    name: str
    row: Row
    delay_seconds: float  # after a request was seen in flight
    hold_seconds: float  # of a stop
    rng: random.Random


def draw_fault(seed: str, number: int, names: Sequence[str]) -> Fault:
    rng = random.Random(f"{seed}:{number}")
    name = rng.choices(list(names), [ROWS[one].weight for one in names])[0]
    # Short ones go unnoticed, middling ones make suspect, long ones are lost and fenced.
    hold = rng.choice((rng.uniform(0.2, 1.5), rng.uniform(2.2, 4.0), rng.uniform(6.0, 9.0)))
    return Fault(number, name, ROWS[name], rng.uniform(0.0, 0.4), hold, rng)


@dataclass(frozen=True)
class Struck:
    """What was done. `in_flight` streams ran at that moment, `hit` of them through the victim."""

    began: float
    pids: tuple[int, ...]
    routers: tuple[str, ...]  # HTTP addresses of routers that were hit
    in_flight: int
    hit: int
    held_seconds: float


async def strike(fault: Fault, target: Target, workload: Workload) -> Struck | None:
    """Returns after the signal, for a stop after SIGCONT. None: nothing was in flight, nothing was done."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + IN_FLIGHT_SECONDS
    await asyncio.sleep(fault.delay_seconds)
    while not (victims := _victims(fault, target, workload)):
        if loop.time() > deadline:
            return None
        await asyncio.sleep(0.005)
    if fault.row.act == "cancel":
        return _cancel(fault, workload)
    if fault.row.act == "nothing":
        return Struck(loop.time(), (), (), len(workload.live), 0, 0.0)
    hit = sum(any(target.pid_of(worker) in victims for worker in stream.workers) for stream in workload.live)
    routers = tuple(one["http"] for one in target.state()["router"] if one["pid"] in victims)
    began, in_flight, held = loop.time(), len(workload.live), 0.0
    _signal(victims, signal.SIGKILL if fault.row.act == "kill" else signal.SIGSTOP)
    if fault.row.act == "stop":
        held = fault.hold_seconds
        try:
            await asyncio.sleep(held)
        finally:
            _signal(victims, signal.SIGCONT)
    return Struck(began, tuple(victims), routers, in_flight, hit, held)


def _victims(fault: Fault, target: Target, workload: Workload) -> list[int]:
    """Pids, or the indexes of the streams to cancel; empty while no request is in flight there."""
    if not workload.live:
        return []
    if fault.row.role == "client":
        return [i for i, stream in enumerate(workload.live) if not stream.cancel_asked]
    pids = sorted(target.pids(fault.row.role))
    if fault.row.everyone or fault.row.role == "redis":
        return pids
    if fault.row.role == "router":
        return [fault.rng.choice(pids)]
    busy = {target.pid_of(worker) for stream in workload.live for worker in stream.workers} & set(pids)
    return [fault.rng.choice(sorted(pid for pid in busy if pid is not None))] if busy else []


def _cancel(fault: Fault, workload: Workload) -> Struck:
    streams = list(workload.live)
    chosen = fault.rng.sample(streams, fault.rng.randint(1, len(streams)))
    began = asyncio.get_running_loop().time()
    for stream in chosen:
        workload.cancel(stream)
    return Struck(began, (), (), len(streams), len(chosen), 0.0)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # its parent was faster
            os.kill(pid, number)
