"""Stub workers with a given speed: each prefill worker takes so many prompt tokens per second, one prompt at a time,
behind the real admission queue. They show the behaviour of a cluster under overload without computing anything.

`python -m bench.paced --redis-url … --namespace … --rate 20000`
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict

from tests.harness.stub_workers import StubWorkers, serve
from wire import common_pb2, prefill_pb2
from worker.admission import Admission

BATCH_TOKENS = 2048


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

    async def prefill(self, request: prefill_pb2.PrefillRunRequest) -> common_pb2.WorkReport:
        report = common_pb2.WorkReport(worker_id="paced-prefill", transport="stub")
        await self._compute(request, report)
        return report

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, default=2, help="workers of each role")
    parser.add_argument("--rate", type=float, default=20_000.0, help="prompt tokens per second of one worker")
    parser.add_argument(
        "--models", nargs="*", default=[""], help="as many workers of each role for each model"
    )
    given = parser.parse_args()
    asyncio.run(
        serve(given.redis_url, given.namespace, given.pairs, lambda: PacedWorkers(given.rate), given.models)
    )
