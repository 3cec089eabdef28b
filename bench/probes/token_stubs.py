"""Stub workers that send a token of every running request each `--gap` seconds, as a decode worker's steps do.

Runs in this tree and in older ones, whose stub workers stream attempts by `attach` instead of `decode`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.harness import stub_workers
from tests.harness.stub_workers import StubWorkers, serve


class Stepping(StubWorkers):
    def __init__(self, gap_seconds: float) -> None:
        super().__init__()
        self._gap = gap_seconds

    async def _step(self) -> None:
        """Until the next step: all requests of a step get their token in one turn of the loop."""
        await asyncio.sleep(self._gap - time.monotonic() % self._gap)

    async def decode(self, spec: Any, log: Any) -> Any:
        for token in stub_workers.tokens_of(spec, spec.sampling.max_tokens):
            await self._step()
            stub_workers.add(log, token)
        return stub_workers.common_pb2.WorkReport(worker_id="stub-decode")

    async def attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for event in super().attach(request, context):  # type: ignore[misc]
            await self._step()
            yield event


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, default=1, help="workers of each role")
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between two tokens of a request")
    given = parser.parse_args()
    asyncio.run(serve(given.redis_url, given.namespace, given.pairs, lambda: Stepping(given.gap)))
