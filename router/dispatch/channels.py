"""Connections to workers, one per address, reused by all requests."""

from __future__ import annotations

import asyncio

import grpc

from cluster.security.tls import Peers
from wire import decode_pb2_grpc, prefill_pb2_grpc

RETIRE_SECONDS = 600.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of gRPC's other pings, while which no keepalive is sent
]


class _Connection:
    """A channel with its stubs: making one costs as much as a call."""

    def __init__(self, channel: grpc.aio.Channel):
        self.channel = channel
        self.prefill: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(self.channel)
        self.decode: decode_pb2_grpc.DecodeAsyncStub = decode_pb2_grpc.DecodeStub(self.channel)


class Channels:
    def __init__(self, peers: Peers | None = None) -> None:
        """`peers` opens them; default: plain text."""
        self._peers = peers or Peers()
        self._version = self._peers.version
        self._retiring: set[asyncio.Task[None]] = set()
        self._open: dict[str, _Connection] = {}

    def prefill(self, address: str) -> prefill_pb2_grpc.PrefillAsyncStub:
        return self._connection(address).prefill

    def decode(self, address: str) -> decode_pb2_grpc.DecodeAsyncStub:
        return self._connection(address).decode

    def _connection(self, address: str) -> _Connection:
        if address not in self._open:
            self._open[address] = _Connection(self._peers.channel(address, _OPTIONS))
        return self._open[address]

    def keep_only(self, addresses: set[str]) -> None:
        """Retires connections to workers that are gone. A worker that only the registry has lost may still stream."""
        for address in [known for known in self._open if known not in addresses]:
            self._retire(self._open.pop(address))
        if self._peers.version != self._version:
            self._version = self._peers.version
            self._renew()

    def _renew(self) -> None:
        """A new certificate: new calls go over new connections, calls under way end on theirs."""
        for one in self._open.values():
            self._retire(one)
        self._open.clear()

    def _retire(self, connection: _Connection) -> None:
        """Closes it when its calls have ended."""
        task = asyncio.get_running_loop().create_task(connection.channel.close(RETIRE_SECONDS))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(one.channel.close(None) for one in self._open.values()))
        self._open.clear()
