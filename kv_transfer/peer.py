"""The control stream of one prefill worker, seen from the decode worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from cluster import errors
from kv_transfer import messages as m
from kv_transfer.layout import check_layouts
from kv_transfer.link import BEAT_SECONDS, LOST_SECONDS
from kv_transfer.outbox import Outbox
from kv_transfer.ring import Claim, Slot
from wire import common_pb2, handoff_pb2

if TYPE_CHECKING:
    from kv_transfer.receiver import HandoffReceiver

log = logging.getLogger(__name__)


class PeerLink:
    def __init__(self, receiver: HandoffReceiver):
        self.prefill = common_pb2.WorkerRef()
        self.layout = common_pb2.KvLayout()
        self.transport = ""
        self.closed = False
        self._receiver = receiver
        self._outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
        self._last_heard = time.monotonic()

    @property
    def name(self) -> str:
        return f"{self.prefill.worker_id}@{self.prefill.epoch:x}"

    def send(self, **message: Any) -> None:
        if self.closed:
            return
        try:
            self._outbox.put(handoff_pb2.DecodeToPrefill(**message))
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """The stream ends once what is queued has been sent."""
        self.closed = True
        try:
            self._outbox.end()
        except asyncio.QueueFull:
            self._outbox.drop_one()
            self._outbox.end()

    async def replies(self) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        """What to send; a beat in silence; ends when the peer is silent too long."""
        while time.monotonic() - self._last_heard < LOST_SECONDS:
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    message = await self._outbox.get()
            except TimeoutError:
                yield handoff_pb2.DecodeToPrefill(beat=common_pb2.Beat())
                continue
            if message is None:
                return
            yield message
        self.closed = True

    async def read(self, requests: AsyncIterator[handoff_pb2.PrefillToDecode]) -> None:
        try:
            async for message in requests:
                self._last_heard = time.monotonic()
                await self._on_message(message)
                for further in message.more:
                    await self._on_message(further)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the stream of %s broke", self.name)
        finally:
            self.end()

    async def _on_message(self, message: handoff_pb2.PrefillToDecode) -> None:
        receiver = self._receiver
        match message.WhichOneof("message"):
            case "hello":
                self._hello(message.hello)
            case "reserve":
                await receiver.reserve(self, message.reserve)
            case "slot_request":
                receiver.slot_wanted(self, message.slot_request)
            case "part":
                self._land(message.part)
            case "finish":
                await receiver.finish(self, message.finish)
            case "abort":
                await receiver.abort_by_peer(self, message.abort)
            case "drained":
                receiver.drain_later(message.drained.transfer_id)

    def _land(self, part: handoff_pb2.PartData) -> None:
        self._receiver.land(part.header.target_rank, m.Land(part.header.SerializeToString(), part.payload))

    def _hello(self, hello: handoff_pb2.Hello) -> None:
        self.prefill.CopyFrom(hello.prefill)
        self.layout.CopyFrom(hello.layout)
        try:
            if hello.decode_epoch != self._receiver.worker.epoch:
                raise errors.StaleEpochError(
                    "this worker lives under another epoch now", field="decode_epoch"
                )
            check_layouts(hello.layout, self._receiver.layout)
            self.transport = self._choose(list(hello.transports))
        except errors.BatonError as error:
            epoch = self._receiver.worker.epoch
            self.send(welcome=handoff_pb2.Welcome(decode_epoch=epoch, refused=error.to_wire()))
        else:
            self._receiver.register(self)
            self.welcome()

    def grant(self, claim: Claim, rank: int, slot: Slot, deadline_seconds: float) -> None:
        self.send(
            slot_grant=handoff_pb2.SlotGrant(
                transfer_id=claim.transfer_id,
                source_rank=claim.source_rank,
                target_rank=rank,
                part=claim.part,
                slot=slot.index,
                generation=slot.generation,
                address=slot.address,
                deadline_seconds=deadline_seconds,
            )
        )

    def answer(self, part: m.PartLanded, verified: bool) -> None:
        self.send(
            part_result=handoff_pb2.PartResult(
                transfer_id=part.transfer_id,
                source_rank=part.source_rank,
                target_rank=part.rank,
                part=part.part,
                verified=verified,
            )
        )

    def welcome(self) -> None:
        """Said again when a rank has new memory."""
        self.send(
            welcome=handoff_pb2.Welcome(
                decode_epoch=self._receiver.worker.epoch,
                layout=self._receiver.layout,
                slot_bytes=self._receiver.config.slot_bytes,
                transport=self.transport,
                ranks=self._receiver.landing.endpoints(),
            )
        )

    def _choose(self, offered: list[str]) -> str:
        config = self._receiver.config
        has_nixl = all(endpoint.agent_name for endpoint in self._receiver.landing.endpoints())
        ours = {"auto": ["nixl", "grpc"], "nixl": ["nixl"], "grpc": ["grpc"]}[config.transport]
        usable = [name for name in offered if name in ours and (name != "nixl" or has_nixl)]
        if config.require_transport:
            usable = [name for name in usable if name == config.require_transport]
        if not usable:
            raise errors.TransportError(
                f"no common transport: offered {offered}, allowed here {ours}", field="transport"
            )
        return usable[0]
