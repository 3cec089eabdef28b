"""Connections to workers, one per address, reused by all requests."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from cluster.tls import Peers
from wire import decode_pb2_grpc, prefill_pb2_grpc

MAX_CHANNELS = 512
RETIRE_SECONDS = 600.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


class Channels:
    def __init__(self, peers: Peers | None = None) -> None:
        """`peers` opens them; default: plain text."""
        self._peers = peers or Peers()
        self._generation = self._peers.generation
        self._retiring: set[asyncio.Task[None]] = set()
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    def prefill(self, address: str) -> prefill_pb2_grpc.PrefillAsyncStub:
        return prefill_pb2_grpc.PrefillStub(self._channel(address))

    def decode(self, address: str) -> decode_pb2_grpc.DecodeAsyncStub:
        return decode_pb2_grpc.DecodeStub(self._channel(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._open:
            self._open[address] = self._peers.channel(address, _OPTIONS)
        self._open.move_to_end(address)
        return self._open[address]

    async def keep_only(self, addresses: set[str]) -> None:
        """Closes connections to workers that are gone."""
        for address in [known for known in self._open if known not in addresses]:
            await self._open.pop(address).close(1.0)
        if self._peers.generation != self._generation:
            self._generation = self._peers.generation
            self._renew()

    def _renew(self) -> None:
        """A new certificate: new calls go over new connections, calls under way end on theirs."""
        for channel in self._open.values():
            task = asyncio.get_running_loop().create_task(channel.close(RETIRE_SECONDS))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._open.clear()

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(channel.close(None) for channel in self._open.values()))
        self._open.clear()
