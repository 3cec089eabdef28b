"""Connections to workers, two per address, reused by all requests: one for requests, one for what ends them."""

from __future__ import annotations

import asyncio

import grpc

from cluster.rpc.message_size import MESSAGE_LIMITS
from cluster.security.tls import Peers
from wire import decode_pb2_grpc, prefill_pb2_grpc

RETIRE_SECONDS = 600.0
_OPTIONS = [
    *MESSAGE_LIMITS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of gRPC's other pings, during which no keepalive is sent
]
# Cancels and aborts share neither the connection nor its reconnect back-off with the requests that may be stuck there.
_CONTROL = [*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]


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
        self._open: dict[tuple[str, bool], _Connection] = {}  # by address, and whether it is for control

    def prefill(self, address: str, *, control: bool = False) -> prefill_pb2_grpc.PrefillAsyncStub:
        """`control`: for a call that ends a request."""
        return self._connection(address, control).prefill

    def decode(self, address: str, *, control: bool = False) -> decode_pb2_grpc.DecodeAsyncStub:
        """`control`: for a call that ends a request."""
        return self._connection(address, control).decode

    def _connection(self, address: str, control: bool) -> _Connection:
        key = address, control
        if key not in self._open:
            options = _CONTROL if control else _OPTIONS
            self._open[key] = _Connection(self._peers.channel(address, options))
        return self._open[key]

    def keep_only(self, addresses: set[str]) -> None:
        """Retire connections to other addresses: their calls go on, because a worker that is missing in the registry alone
        may still serve."""
        for key in [known for known in self._open if known[0] not in addresses]:
            self._retire(self._open.pop(key))
        if self._peers.version != self._version:
            self._version = self._peers.version
            self._renew()

    def _renew(self) -> None:
        """Certificate files have changed: new calls go over new connections, calls under way end on theirs."""
        for one in self._open.values():
            self._retire(one)
        self._open.clear()

    def _retire(self, connection: _Connection) -> None:
        """Close it when its calls have ended, at the latest after RETIRE_SECONDS."""
        task = asyncio.get_running_loop().create_task(connection.channel.close(RETIRE_SECONDS))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(one.channel.close(None) for one in self._open.values()))
        self._open.clear()
