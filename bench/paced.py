"""Stub workers with a given speed: each prefill worker takes so many prompt tokens per second, one prompt at a time,
behind the real admission queue. They show the behaviour of a cluster under overload without computing anything.

`python -m bench.paced --redis-url … --namespace … --rate 20000`
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from cluster.errors import BatonError
from tests.harness.stub_workers import WAIT_SECONDS, Event, StubWorkers, end_event, serve, token_events
from wire import common_pb2, decode_pb2, prefill_pb2
from worker.admission import Admission

BATCH_TOKENS = 2048
BEAT_SECONDS = 0.5
T = TypeVar("T")


class Lane:
    """One prefill worker."""

    def __init__(self) -> None:
        self.admission = Admission(2 * BATCH_TOKENS)
        self.busy = asyncio.Lock()


class PacedWorkers(StubWorkers):
    """`rate`: prompt tokens per second of one worker. Decoding takes no time."""

    def __init__(self, rate: float):
        super().__init__()
        self._rate = rate
        self._lanes: dict[int, Lane] = defaultdict(Lane)

    async def run(self, request: prefill_pb2.PrefillRunRequest, context: Any) -> AsyncIterator[Event]:
        report = common_pb2.WorkReport(worker_id="paced-prefill", transport="stub")
        computing = asyncio.ensure_future(self._compute(request, report))
        try:
            async for beat in _beats(computing):
                yield beat
            computing.result()
        except BatonError as error:
            end = end_event(report)
            end.end.outcome = common_pb2.ATTEMPT_OUTCOME_ABORTED
            end.end.error.CopyFrom(error.to_wire())
            yield end
            return
        finally:
            computing.cancel()
        self._spec(request.transfer_id).set_result(request.spec)
        for event in token_events(request.spec, 1):
            yield event
        yield end_event(report)

    async def _compute(self, request: prefill_pb2.PrefillRunRequest, report: common_pb2.WorkReport) -> None:
        """Wait for its turn, then for its service time. Raises DeadlineError."""
        lane, spec = self._lanes[request.worker_epoch], request.spec
        tokens = len(spec.prompt_tokens) // 4
        received = time.monotonic()
        deadline_seconds = request.admission_deadline_ms / 1000
        await lane.admission.enter(tokens, spec.priority, deadline_seconds, spec.tenant, spec.weight)
        try:
            began = time.monotonic()
            async with lane.busy:
                alone = time.monotonic()
                await asyncio.sleep(tokens / self._rate)
                report.prompt_compute_seconds = time.monotonic() - alone
            report.prefill_queue_seconds = began - received
            report.prefill_seconds = time.monotonic() - began
            report.computed_prompt_tokens = tokens
        finally:
            lane.admission.leave(tokens)

    async def attach(self, request: decode_pb2.AttachRequest, context: Any) -> AsyncIterator[Event]:
        waiting = self._spec(request.transfer_id)
        async for beat in _beats(waiting):
            yield beat
        self._specs.pop(request.transfer_id, None)
        spec = waiting.result()
        for event in token_events(spec, spec.sampling.max_tokens):
            yield event
        yield end_event(common_pb2.WorkReport(worker_id="paced-decode"))


async def _beats(waited_for: Awaitable[T]) -> AsyncIterator[Event]:
    """Beats until it is there, up to a generous limit."""
    future = asyncio.ensure_future(waited_for)
    deadline = time.monotonic() + 4 * WAIT_SECONDS
    while not future.done() and time.monotonic() < deadline:
        await asyncio.wait([future], timeout=BEAT_SECONDS)
        if not future.done():
            yield Event(beat=common_pb2.Beat(engine_step=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, default=2, help="workers of each role")
    parser.add_argument("--rate", type=float, default=20_000.0, help="prompt tokens per second of one worker")
    given = parser.parse_args()
    asyncio.run(serve(given.redis_url, given.namespace, given.pairs, lambda: PacedWorkers(given.rate)))
