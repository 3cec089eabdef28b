"""Connections of the HTTP endpoint: small writes are sent at once."""

from __future__ import annotations

import asyncio
import socket

import httpx
import uvloop

from cluster.config.router import RouterConfig
from router.server import Router


def test_accepted_connections_do_not_wait_to_fill_segments(redis_url, namespace, checkpoint):
    """Nagle's algorithm and delayed acknowledgements together would hold a streamed token for 40 ms."""
    config = RouterConfig(
        model=checkpoint("llama"), redis_url=redis_url, namespace=namespace, http_port=0, grpc_port=0
    )

    async def options() -> list[int]:
        router = Router(config)
        await router.start()
        try:
            async with httpx.AsyncClient(base_url=router.http_url) as client:
                assert (await client.get("/health")).status_code == 200
                connections = router._http._server.server_state.connections
                sockets = [one.transport.get_extra_info("socket") for one in connections]
                return [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets]
        finally:
            await router.close()

    for run in (asyncio.run, uvloop.run):
        found = run(options())
        assert found
        assert all(found)
