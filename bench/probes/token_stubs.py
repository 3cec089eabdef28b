"""Stub workers that send a token of every running request each `--gap` seconds, as a decode worker's steps do.

Runs in this tree and in older ones, whose stub workers stream attempts by `attach` instead of `decode`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from tests.harness import stub_workers
from tests.harness.stub_workers import StubWorkers, serve


@dataclass
class Decoding:
    """A request that gets a token at each step."""

    log: Any
    tokens: Iterator[Any]
    next: Any  # the one of the next step
    done: asyncio.Future[None]


class Stepping(StubWorkers):
    """One callback of the loop makes a step for all requests, as it takes in the results of an engine's step."""

    def __init__(self, gap_seconds: float) -> None:
        super().__init__()
        self._gap = gap_seconds
        self._decoding: dict[int, Decoding] = {}
        self._stepped: asyncio.Future[None] | None = None  # by the next step, while something waits for it
        self._scheduled = False

    async def decode(self, spec: Any, log: Any) -> Any:
        tokens = stub_workers.tokens_of(spec, spec.sampling.max_tokens)
        if (first := next(tokens, None)) is not None:
            decoding = Decoding(log, tokens, first, asyncio.get_running_loop().create_future())
            self._decoding[id(decoding)] = decoding
            self._schedule()
            try:
                await decoding.done
            finally:
                self._decoding.pop(id(decoding), None)
        return stub_workers.common_pb2.WorkReport(worker_id="stub-decode")

    async def attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for event in super().attach(request, context):  # type: ignore[misc]
            if self._stepped is None:
                self._stepped = asyncio.get_running_loop().create_future()
            self._schedule()
            await asyncio.shield(self._stepped)  # all attached wait for it, and one of them may leave
            yield event

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(self._gap - time.monotonic() % self._gap, self._step)

    def _step(self) -> None:
        self._scheduled = False
        if self._stepped is not None:
            self._stepped.set_result(None)
            self._stepped = None
        for key, one in list(self._decoding.items()):
            stub_workers.add(one.log, one.next)
            one.next = next(one.tokens, None)
            if one.next is None:
                del self._decoding[key]
                if not one.done.done():  # its request may have just been cancelled
                    one.done.set_result(None)
        if self._decoding:
            self._schedule()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, default=1, help="workers of each role")
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between two tokens of a request")
    given = parser.parse_args()
    asyncio.run(serve(given.redis_url, given.namespace, given.pairs, lambda: Stepping(given.gap)))
