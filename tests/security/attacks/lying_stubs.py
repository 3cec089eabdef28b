"""Stub workers whose reports of work are false: each request gets the next of LIES, those after the last are honest."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
from typing import Any

from tests.harness.stub_workers import StubWorkers, serve
from wire import common_pb2, prefill_pb2
from worker.attempt_log import AttemptLog

MOST = 2**64 - 1
LIES: tuple[dict[str, Any], ...] = (
    *({"prompt_compute_seconds": value} for value in (math.inf, math.nan, 1e308, -1.0)),
    *(
        {"handoff_exposed_seconds": value, "kv_bytes_shipped": 1 << 30}
        for value in (math.inf, math.nan, 1e308, -math.inf)
    ),
    {"kv_bytes_shipped": MOST},
    {"kv_bytes_shipped": MOST, "handoff_exposed_seconds": 1e-3},
    {"cached_tokens": MOST, "computed_prompt_tokens": MOST, "not_shipped_tokens": MOST},
    {"computed_prompt_tokens": MOST, "prompt_compute_seconds": 1e-300},
    {"prefill_seconds": math.nan, "prefill_queue_seconds": -math.inf, "decode_seconds": math.inf},
    {"decode_queue_seconds": math.nan, "first_step_seconds": math.nan},
    {"worker_id": "x" * 20_000, "transport": "y" * 20_000},
    {"worker_id": "x\r\nset-cookie: a=b"},
    {"transport": "\x1b[2J"},
)


class LyingStubs(StubWorkers):
    def __init__(self) -> None:
        super().__init__()
        self._lies = itertools.chain(LIES, itertools.repeat({}))

    async def prefill(self, request: prefill_pb2.PrefillRunRequest) -> common_pb2.WorkReport:
        self._lie = next(self._lies)
        return self._false(await super().prefill(request))

    async def decode(self, spec: common_pb2.GenerateSpec, log: AttemptLog) -> common_pb2.WorkReport:
        return self._false(await super().decode(spec, log))

    def _false(self, report: common_pb2.WorkReport) -> common_pb2.WorkReport:
        report.MergeFrom(common_pb2.WorkReport(**self._lie))
        return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pairs", type=int, required=True, help="workers of each role")
    given = parser.parse_args()
    asyncio.run(serve(given.redis_url, given.namespace, given.pairs, LyingStubs))
