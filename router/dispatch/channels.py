"""Connections to workers, one per address, reused by all requests."""

from __future__ import annotations

import asyncio

import grpc

from wire import decode_pb2_grpc, prefill_pb2_grpc

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


class _Connection:
    """A channel with its stubs: making one costs as much as a call."""

    def __init__(self, address: str):
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self.prefill: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(self.channel)
        self.decode: decode_pb2_grpc.DecodeAsyncStub = decode_pb2_grpc.DecodeStub(self.channel)


class Channels:
    def __init__(self) -> None:
        self._open: dict[str, _Connection] = {}

    def prefill(self, address: str) -> prefill_pb2_grpc.PrefillAsyncStub:
        return self._connection(address).prefill

    def decode(self, address: str) -> decode_pb2_grpc.DecodeAsyncStub:
        return self._connection(address).decode

    def _connection(self, address: str) -> _Connection:
        if address not in self._open:
            self._open[address] = _Connection(address)
        return self._open[address]

    async def keep_only(self, addresses: set[str]) -> None:
        """Closes connections to workers that are gone."""
        for address in [known for known in self._open if known not in addresses]:
            await self._open.pop(address).channel.close(1.0)

    async def close(self) -> None:
        await asyncio.gather(*(one.channel.close(None) for one in self._open.values()))
        self._open.clear()
