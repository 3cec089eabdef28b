"""Slow stub workers: a prompt waits before its first token, tokens come one by one.

`python -m tests.security.dripping --redis-url … --namespace … --first-seconds 1 --token-seconds 0.02`
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.harness.stub_workers import WAIT_SECONDS, Event, StubWorkers, end_event, serve, token_events
from wire import common_pb2, decode_pb2, prefill_pb2


class DrippingWorkers(StubWorkers):
    def __init__(self, first_seconds: float, token_seconds: float):
        super().__init__()
        self._first_seconds = first_seconds
        self._token_seconds = token_seconds

    async def run(self, request: prefill_pb2.PrefillRunRequest, context: Any) -> AsyncIterator[Event]:
        await asyncio.sleep(self._first_seconds)
        async for event in super().run(request, context):
            yield event

    async def attach(self, request: decode_pb2.AttachRequest, context: Any) -> AsyncIterator[Event]:
        spec = await asyncio.wait_for(self._spec(request.transfer_id), WAIT_SECONDS)
        self._specs.pop(request.transfer_id, None)
        for event in token_events(spec, spec.sampling.max_tokens):
            yield event
            await asyncio.sleep(self._token_seconds)
        yield end_event(common_pb2.WorkReport(worker_id="stub-decode"))


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
