"""A decode worker's end of the control stream, scripted by a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.errors import PeerLostError
from tests.kv_transfer.pair import DECODE_EPOCH, SLOT_BYTES, layout
from wire import common_pb2, decode_pb2_grpc, handoff_pb2


def welcome(**more: Any) -> handoff_pb2.Welcome:
    fields = {
        "decode_epoch": DECODE_EPOCH,
        "layout": layout(1),
        "slot_bytes": SLOT_BYTES,
        "transport": "grpc",
        "ranks": [handoff_pb2.RankEndpoint(rank=0)],
    }
    return handoff_pb2.Welcome(**{**fields, **more})


@dataclass
class Stream:
    """A stream that the prefill worker has opened."""

    received: list[handoff_pb2.PrefillToDecode] = field(default_factory=list)
    out: asyncio.Queue[handoff_pb2.DecodeToPrefill | None] = field(default_factory=asyncio.Queue)
    closed: bool = False

    def say(self, **message: Any) -> None:
        self.out.put_nowait(handoff_pb2.DecodeToPrefill(**message))

    def end(self) -> None:
        self.out.put_nowait(None)

    def of(self, kind: str) -> list[Any]:
        return [getattr(one, kind) for one in self.received if one.WhichOneof("message") == kind]


@dataclass
class ScriptedDecode(decode_pb2_grpc.DecodeServicer):
    """Answers Hello with `welcome` and accepts every Reserve, unless a test changes that."""

    streams: list[Stream] = field(default_factory=list)
    welcome: handoff_pb2.Welcome = field(default_factory=welcome)
    acknowledges: bool = False
    aborts: bool = False  # each hand-off, in the message that accepts it
    beats: bool = True
    ref: common_pb2.WorkerRef = field(default_factory=common_pb2.WorkerRef)

    async def Handoff(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        stream = Stream()
        self.streams.append(stream)
        reading = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while (message := await stream.out.get()) is not None:
                yield message
        finally:
            stream.closed = True
            reading.cancel()

    async def _read(self, stream: Stream, requests: AsyncIterator[handoff_pb2.PrefillToDecode]) -> None:
        async for request in requests:
            for message in (request, *request.more):
                stream.received.append(message)
                match message.WhichOneof("message"):
                    case "hello":
                        stream.say(welcome=self.welcome)
                    case "reserve":
                        reply = handoff_pb2.ReserveReply(transfer_id=message.reserve.transfer_id)
                        aborted = handoff_pb2.Aborted(
                            transfer_id=reply.transfer_id, error=PeerLostError("a test").to_wire()
                        )
                        more = [handoff_pb2.DecodeToPrefill(aborted=aborted)] if self.aborts else []
                        stream.say(reserve_reply=reply, more=more)
                    case "beat" if self.beats:
                        stream.say(beat=common_pb2.Beat())
                    case "drained" if self.acknowledges:
                        self.acknowledge(stream, message.drained.transfer_id)

    @staticmethod
    def acknowledge(stream: Stream, transfer_id: bytes) -> None:
        stream.say(drained_ack=handoff_pb2.DrainedAck(transfer_id=transfer_id))

    def drained(self) -> Iterator[bytes]:
        """Transfer ids of all Drained received, in order."""
        return (one.transfer_id for stream in self.streams for one in stream.of("drained"))


@asynccontextmanager
async def scripted_decode(**settings: Any) -> AsyncIterator[ScriptedDecode]:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    decode = ScriptedDecode(**settings)  # type: ignore[abstract]  # the test calls no other method
    decode.ref = common_pb2.WorkerRef(worker_id="decode", epoch=DECODE_EPOCH, address=address)
    decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
    await server.start()
    try:
        yield decode
    finally:
        for stream in decode.streams:
            stream.end()
        await server.stop(None)
