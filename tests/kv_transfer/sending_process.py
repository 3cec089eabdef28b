"""A prefill worker's sender in a process of its own: opens one hand-off, reports it, and stays until it is killed."""

from __future__ import annotations

import asyncio
import sys

from tests.kv_transfer.pair import DECODE_EPOCH, config, prefill_side
from wire import common_pb2


async def main(transport: str, address: str, tokens: int) -> None:
    decode = common_pb2.WorkerRef(worker_id="decode", epoch=DECODE_EPOCH, address=address)
    async with prefill_side(config(transport), worker_id="doomed") as prefill:
        await prefill.open(decode, tokens)
        print("opened", flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
