"""Of too many calls that wait for their clients, one of the address with the most ends."""

from __future__ import annotations

import asyncio

from cluster.errors import OverloadedError
from router.frontends.grpc.health_calls import _Waits
from tests.harness.waiting import turns


async def test_a_flood_of_calls_ends_none_of_another_address() -> None:
    waits = _Waits(3, 60.0, "something")
    arrives = asyncio.get_running_loop().create_future()

    async def wait(peer: str) -> int:
        return await waits.result(asyncio.shield(arrives), peer)

    peers = ("ipv4:10.0.0.1:5", "ipv4:10.0.0.2:6", "ipv4:10.0.0.2:7", "ipv4:10.0.0.2:8")
    calls = [asyncio.create_task(wait(peer)) for peer in peers]
    await turns()
    arrives.set_result(7)
    client, *flood = await asyncio.gather(*calls, return_exceptions=True)
    assert client == 7 and flood[1:] == [7, 7]
    assert isinstance(flood[0], OverloadedError) and "more than 3 calls" in flood[0].message
