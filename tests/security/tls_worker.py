"""A worker's port with TLS, and the answer of each of its methods."""

from __future__ import annotations

from typing import Any

import grpc

from cluster.security.tls import Peers


class Worker:
    """A worker's port with one method for routers and one for workers, as a role would add them."""

    def __init__(self, peers: Peers):
        self._server = grpc.aio.server(interceptors=peers.interceptors)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", self._methods()),))
        self.address = f"127.0.0.1:{peers.listen(self._server, '127.0.0.1:0')}"

    @staticmethod
    def _methods():
        async def run(request, context):
            yield b"token"

        async def cancel(request, context):
            return b"cancelled"

        async def handoff(requests, context):
            async for _ in requests:
                yield b"welcome"

        return {
            "Run": grpc.unary_stream_rpc_method_handler(run),
            "Cancel": grpc.unary_unary_rpc_method_handler(cancel),
            "Handoff": grpc.stream_stream_rpc_method_handler(handoff),
        }

    async def __aenter__(self):
        await self._server.start()
        return self

    async def __aexit__(self, *_):
        await self._server.stop(None)


async def calls(channel: grpc.aio.Channel) -> dict[str, object]:
    """What each method answers: its first message, or the status."""
    answers: dict[str, object] = {}
    async with channel:
        calls_by_name: tuple[tuple[str, Any], ...] = (
            ("Run", channel.unary_stream("/t.T/Run", None, None)),
            ("Cancel", channel.unary_unary("/t.T/Cancel", None, None)),
            ("Handoff", channel.stream_stream("/t.T/Handoff", None, None)),
        )
        for name, call in calls_by_name:
            try:
                if name == "Cancel":
                    answers[name] = await call(b"", timeout=60)
                else:
                    given = iter([b""]) if name == "Handoff" else b""
                    stream = call(given, timeout=60)
                    answers[name] = [message async for message in stream].pop()
            except grpc.aio.AioRpcError as error:
                answers[name] = error.code().name
    return answers
