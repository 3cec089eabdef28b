"""A stub of a Dynamo worker: a token each `--gap` seconds. Runs in Dynamo's environment; ends with its stdin."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from dynamo.common.utils.runtime import create_runtime  # type: ignore[import-not-found]
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model  # type: ignore[import-not-found]

TOKEN_ID = 300


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between two tokens of a request")
    given = parser.parse_args()

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        count = int(request["stop_conditions"].get("max_tokens") or 16)
        for number in range(count):
            if number:
                await asyncio.sleep(given.gap - time.monotonic() % given.gap)
            yield {
                "token_ids": [TOKEN_ID],
                "finish_reason": "length" if number + 1 == count else None,
            }

    runtime, _ = create_runtime("file", "tcp", "zmq")
    endpoint = runtime.endpoint("bench.backend.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        given.model,
        "bench",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=16,
        ignore_weights=True,
    )
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
