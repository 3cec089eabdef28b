"""One fault after another on one cluster under load, each followed by quiet and a look at everything.

load runs ─► fault ─► all whole again ─► no new requests ─► streams end ─► judged ─► nothing left behind ─► next
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.chaos.evidence import keep
from tests.chaos.faults import FaultInjector, InjectedFault
from tests.chaos.invariants import leaks
from tests.chaos.redispatch import lost_attempts, redispatch_seconds
from tests.chaos.results import Result
from tests.chaos.rows import Fault
from tests.chaos.streams import Stream
from tests.chaos.target import Target
from tests.chaos.workload import Workload

END_SECONDS = 60.0
SETTLE_SECONDS = 0.7  # new requests still meet what is broken
MAX_TRIES = 10
WINDOW_SECONDS = 3.0  # silences that begin this long after a fault belong to it
_POSITIONS = re.compile(r"token at position (\d+), expected (\d+)")


class Campaign:
    """Tells `on_result` of every fault that counted; streams with wrong tokens go to the file `evidence`."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        injector: FaultInjector,
        seed: str,
        on_result: Callable[[Result], None],
        evidence: Path,
    ):
        self._target = target
        self._workload = workload
        self._injector = injector
        self._seed = seed
        self._on_result = on_result
        self._evidence = evidence
        self._known_leaks: list[str] = []

    async def run(self, schedule: Iterable[Fault]) -> None:
        """Each fault until it counted: one that meets no request is tried again. Raises RuntimeError if its point is
        never reached."""
        self._workload.start()
        try:
            for fault in schedule:
                for _ in range(MAX_TRIES):
                    if await self._one(fault):
                        break
                else:
                    raise RuntimeError(f"fault {fault.number}: {fault.point or fault.name} was never reached")
        finally:
            await self._workload.stop()

    async def _one(self, fault: Fault) -> bool:
        loop, workload = asyncio.get_running_loop(), self._workload
        missing = await self._target.whole()
        if missing:
            raise RuntimeError(f"before fault {fault.number}: {missing}")
        preempted = await self._target.total("preemptions")
        workload.resume()
        injected = await self._injector.inject(fault)
        if injected is None:  # what ended meanwhile is judged with what follows
            return False
        back = asyncio.create_task(self._placement_back(fault))
        await asyncio.sleep(SETTLE_SECONDS)
        # What has to start again gets the processors; the streams that run go on meanwhile.
        workload.pause()
        missing = await self._target.whole()
        whole_again = loop.time() - injected.began
        ended = await workload.idle(END_SECONDS)
        found = [f"stuck: {stream}" for stream in workload.live] if not ended else []
        streams = [*workload.finished, *workload.live]
        for stream in list(workload.live):
            workload.cancel(stream)
        await workload.idle(5.0)
        idle_since = loop.time()
        left = await leaks(self._target)
        quiet = loop.time() - idle_since
        await workload.checked()
        unjudged = sum(bool(stream.tokens) and stream.verdict is None for stream in workload.finished)
        found += [f"{unjudged} streams not judged"] if unjudged else []
        found += ([f"not whole: {missing}"] if missing else []) + left
        fresh = [leak for leak in found if leak not in self._known_leaks]
        self._known_leaks = found
        for stream in streams:
            if stream.verdict is not None and stream.verdict.wrong:
                keep(self._evidence, self._seed, fault.number, stream)
        preempted = max(0, await self._target.total("preemptions") - preempted)
        seconds = (whole_again, quiet, await back)
        workload.finished.clear()
        self._on_result(self._result(fault, injected, streams, fresh, seconds, preempted))
        return True

    async def _placement_back(self, fault: Fault) -> float:
        return await self._target.placement_back() if fault.row.role.startswith("redis") else 0.0

    def _result(
        self,
        fault: Fault,
        injected: InjectedFault,
        streams: list[Stream],
        leaks: list[str],
        seconds: tuple[float, float, float],
        preempted: int,
    ) -> Result:
        baton = [stream for stream in streams if stream.kind == "baton"]
        errors, broken = failed_streams(streams, injected.routers)
        until = injected.began + max(WINDOW_SECONDS, injected.held_seconds)
        lost, doubled = 0, 0
        for stream in streams:
            missing, surplus = _miscounted(stream)
            lost, doubled = lost + missing, doubled + surplus
        lost_until = injected.began + injected.held_seconds + WINDOW_SECONDS
        lost_then = self._lost_attempts(injected.began, lost_until, baton)
        verdicts = [stream.verdict for stream in streams if stream.verdict is not None]
        return Result(
            seed=self._seed,
            number=fault.number,
            fault=fault.name,
            point=fault.point,
            way=fault.way,
            preempted=preempted,
            hold=injected.held_seconds,
            in_flight=injected.in_flight,
            hit=injected.hit,
            requests=len(streams),
            tokens=sum(verdict.checked for verdict in verdicts),
            lost=lost,
            doubled=doubled,
            wrong=sum(len(verdict.wrong) for verdict in verdicts),
            near_ties=sum(verdict.near_ties for verdict in verdicts),
            errors=[f"{s.kind} after {len(s.tokens)} tokens: {s.problem}" for s in errors],
            openai_broken=len(broken),
            recovery=max((s.longest_silence(injected.began, until) for s in baton), default=0.0),
            whole_again=seconds[0],
            quiet=seconds[1],
            placement_back=seconds[2],
            leaks=leaks,
            redispatch=self._redispatch(injected.began, baton),
            lost_attempts=sum(map(len, lost_then.values())),
            lost_after=max((times[0] for times in lost_then.values()), default=0.0),
        )

    def _lost_attempts(self, began: float, until: float, streams: Iterable[Stream]) -> dict[str, list[float]]:
        """Of requests that ran at the fault."""
        running = {stream.request_id for stream in streams if stream.started < began < stream.ended}
        wall = time.time() - asyncio.get_running_loop().time()
        return lost_attempts(self._target.logs, began + wall, until + wall, running)

    def _redispatch(self, began: float, streams: Iterable[Stream]) -> float:
        running = {stream.request_id for stream in streams if stream.started < began}
        wall = time.time() - asyncio.get_running_loop().time()
        return redispatch_seconds(self._target.logs, began + wall, running)


def failed_streams(streams: Iterable[Stream], routers: Sequence[str]) -> tuple[list[Stream], list[Stream]]:
    """Streams with an error; those of OpenAI clients whose router was hit, one of `routers`, apart. A stream that was
    cancelled and that no client has cancelled was broken off as well."""
    ended = [
        one
        for one in streams
        if one.outcome == "error" or (one.outcome == "cancelled" and not one.cancel_asked)
    ]
    broken = [one for one in ended if one.router and one.router in routers]
    return [one for one in ended if one not in broken], broken


def _miscounted(stream: Stream) -> tuple[int, int]:
    """Tokens lost and doubled: by their number at the end, or by the position at which the client refused."""
    if stream.outcome == "done":
        surplus = len(stream.tokens) - stream.request.max_tokens
        return max(0, -surplus), max(0, surplus)
    refused = _POSITIONS.search(stream.problem)
    if refused is None:
        return 0, 0
    came, expected = int(refused[1]), int(refused[2])
    return max(0, came - expected), max(0, expected - came)
