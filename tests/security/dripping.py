"""Slow stub workers: a prompt waits before its first token, tokens come one by one.

`python -m tests.security.dripping --redis-url … --namespace … --first-seconds 1 --token-seconds 0.02`
"""

from __future__ import annotations

import argparse
import asyncio

from tests.harness.stub_workers import StubWorkers, add, serve, tokens_of
from wire import common_pb2, prefill_pb2
from worker.attempt_log import AttemptLog


class DrippingWorkers(StubWorkers):
    def __init__(self, first_seconds: float, token_seconds: float):
        super().__init__()
        self._first_seconds = first_seconds
        self._token_seconds = token_seconds

    async def prefill(self, request: prefill_pb2.PrefillRunRequest) -> common_pb2.WorkReport:
        await asyncio.sleep(self._first_seconds)
        return await super().prefill(request)

    async def decode(self, spec: common_pb2.GenerateSpec, log: AttemptLog) -> common_pb2.WorkReport:
        for token in tokens_of(spec, spec.sampling.max_tokens):
            add(log, token)
            await asyncio.sleep(self._token_seconds)
        return common_pb2.WorkReport(worker_id="stub-decode")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--first-seconds", type=float, default=0.0)
    parser.add_argument("--token-seconds", type=float, default=0.02)
    given = parser.parse_args()
    asyncio.run(
        serve(
            given.redis_url,
            given.namespace,
            given.pairs,
            lambda: DrippingWorkers(given.first_seconds, given.token_seconds),
        )
    )
