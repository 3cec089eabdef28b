"""The control stream of one prefill worker, seen from the decode worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cluster import errors
from cluster.faults.points import inject
from cluster.protocol.times import BEAT_SECONDS, LOST_SECONDS
from kv_transfer import messages as m
from kv_transfer.decode_side.in_turn import InTurn
from kv_transfer.decode_side.ring import Slot
from kv_transfer.decode_side.turns import Claim
from kv_transfer.decode_side.validate import check_message
from kv_transfer.layout.compatibility import check_layouts
from kv_transfer.layout.digest import NONE, stricter
from kv_transfer.outbox import Outbox
from wire import common_pb2, handoff_pb2

if TYPE_CHECKING:
    from kv_transfer.decode_side.receiver import HandoffReceiver

log = logging.getLogger(__name__)
M = TypeVar("M", handoff_pb2.Reserve, handoff_pb2.Finish, handoff_pb2.AbortHandoff)
MAX_RESERVING = 512  # reservations of one peer that wait for the engine, which answers between two steps
MAX_PENDING = 8 * MAX_RESERVING  # these and the messages that follow them


class PeerLink:
    def __init__(self, receiver: HandoffReceiver):
        self.prefill = common_pb2.WorkerRef()
        self.layout = common_pb2.KvLayout()
        self.transport = ""
        self.digests = ""
        self.digest_kind = NONE  # of the parts that carry a digest
        self.closed = False
        self.failure: errors.BatonError | None = None  # of what the peer sent
        self._receiver = receiver
        self._outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
        self._in_turn = InTurn(receiver.spawn, MAX_PENDING)
        self._last_heard = time.monotonic()
        self._at_message = receiver.faults.messages()

    @property
    def name(self) -> str:
        return f"{self.prefill.worker_id}@{self.prefill.epoch:x}"

    def send(self, *, patient: bool = False, **message: Any) -> None:
        strike = self._at_message(next(iter(message)), self.name)
        if strike is not None:
            inject(strike, lambda: self._put(message, patient), asyncio.get_running_loop().call_later)
        else:
            self._put(message, patient)

    def _put(self, message: dict[str, Any], patient: bool) -> None:
        if self.closed:
            return
        try:
            self._outbox.put(handoff_pb2.DecodeToPrefill(**message), patient=patient)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """The stream ends once what is queued has been sent."""
        self.closed = True
        self._outbox.end()

    async def replies(self) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        """What to send; a beat in silence; ends when the peer is silent too long. Raises InvalidRequestError after
        what the peer sent made no sense."""
        while time.monotonic() - self._last_heard < LOST_SECONDS:
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    message = await self._outbox.get()
            except TimeoutError:
                yield handoff_pb2.DecodeToPrefill(beat=common_pb2.Beat())
                continue
            if message is None:
                break
            yield message
        self.closed = True
        if self.failure is not None:
            raise self.failure

    async def read(self, requests: AsyncIterator[handoff_pb2.PrefillToDecode]) -> None:
        try:
            async for message in requests:
                self._last_heard = time.monotonic()
                self._on_message(message)
                for further in message.more:
                    self._on_message(further)
        except asyncio.CancelledError:
            raise
        except (errors.InvalidRequestError, errors.HandoffError) as error:
            log.warning("the stream of %s ends: %s", self.name, error.message)
            self.failure = error
        except Exception:
            log.exception("the stream of %s broke", self.name)
        finally:
            self.end()

    def _on_message(self, message: handoff_pb2.PrefillToDecode) -> None:
        """Handle one message without waiting; what needs the engine or a rank is queued."""
        receiver = self._receiver
        check_message(message, self.layout if self.layout.tensor_parallel else None)
        match message.WhichOneof("message"):
            case "hello":
                self._hello(message.hello)
            case "reserve":
                self._reserve(message.reserve)
            case "slot_request":
                receiver.slot_wanted(self, message.slot_request)
            case "part":
                self._land(message.part)
            case "finish":
                self._hand_on(message.finish, receiver.finish)
            case "abort":
                self._hand_on(message.abort, receiver.abort_by_peer)
            case "drained":
                receiver.drained(self, message.drained.transfer_id)

    def _reserve(self, request: handoff_pb2.Reserve) -> None:
        if self._in_turn.pending < MAX_RESERVING:
            self._hand_on(request, self._receiver.reserve)
            return
        error = errors.BlocksExhaustedError(
            "too many reservations wait for an answer", limit=str(MAX_RESERVING), retry_after_seconds=0.5
        )
        reply = handoff_pb2.ReserveReply(transfer_id=request.transfer_id, refused=error.to_wire())
        self.send(reserve_reply=reply)

    def _hand_on(self, message: M, act: Callable[[PeerLink, M], Awaitable[None]]) -> None:
        if not self._in_turn.add(message.transfer_id, lambda: act(self, message)):
            raise errors.TransportError("too many messages wait for an answer", limit=str(MAX_PENDING))

    def _land(self, part: handoff_pb2.PartData) -> None:
        if self._receiver.config.required == "nixl":  # its probe did not reach us, and it took the other way
            raise errors.TransportError("KV may come over NIXL only here", field="require_transport")
        self._receiver.land(part.header.target_rank, m.Land(part.header.SerializeToString(), part.payload))

    def _hello(self, hello: handoff_pb2.Hello) -> None:
        """Answer Hello. A refused peer gets the reason, then BatonError is raised and ends the stream."""
        self.prefill.CopyFrom(hello.prefill)
        try:
            self._agree(hello)
        except errors.BatonError as error:
            epoch = self._receiver.worker.epoch
            self.send(welcome=handoff_pb2.Welcome(decode_epoch=epoch, refused=error.to_wire()))
            raise
        self.layout.CopyFrom(hello.layout)
        self._receiver.register(self)
        self.welcome()

    def _agree(self, hello: handoff_pb2.Hello) -> None:
        receiver = self._receiver
        if hello.decode_epoch != receiver.worker.epoch:
            raise errors.StaleEpochError("this worker has another epoch now", field="decode_epoch")
        check_layouts(hello.layout, receiver.layout)
        self.transport = self._choose(list(hello.transports))
        self.digests = stricter(receiver.config.digests, hello.digests)
        self.digest_kind = self._choose_kind(list(hello.digest_kinds))

    def _choose_kind(self, offered: list[str]) -> str:
        ours = self._receiver.landing.digest_kinds
        common = next((kind for kind in offered if kind in ours), NONE)
        if common == NONE and self.digests != "off":
            raise errors.TransportError(
                f"no common kind of digest: offered {offered}, verified here {list(ours)}; digests: off on "
                "both sides does without",
                field="digest_kinds",
            )
        return common

    def grant(self, claim: Claim, rank: int, slot: Slot, deadline_seconds: float, *, patient: bool) -> None:
        self.send(
            patient=patient,
            slot_grant=handoff_pb2.SlotGrant(
                transfer_id=claim.transfer_id,
                source_rank=claim.source_rank,
                target_rank=rank,
                part=claim.part,
                slot=slot.index,
                generation=slot.generation,
                address=slot.address,
                device=self._receiver.landing.device(rank),
                deadline_seconds=deadline_seconds,
            ),
        )

    def answer(self, part: m.PartLanded, verified: bool) -> None:
        self.send(
            patient=verified,  # only the staging of this one part waits for it
            part_result=handoff_pb2.PartResult(
                transfer_id=part.transfer_id,
                source_rank=part.source_rank,
                target_rank=part.rank,
                part=part.part,
                verified=verified,
            ),
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
                digests=self.digests,
                digest_kind=self.digest_kind,
            )
        )

    def _choose(self, offered: list[str]) -> str:
        config = self._receiver.config
        has_nixl = all(endpoint.agent_name for endpoint in self._receiver.landing.endpoints())
        ours = {"auto": ["nixl", "grpc"], "nixl": ["nixl"], "grpc": ["grpc"]}[config.transport]
        usable = [name for name in offered if name in ours and (name != "nixl" or has_nixl)]
        if config.required:
            usable = [name for name in usable if name == config.required]
        if not usable:
            raise errors.TransportError(
                f"no common transport: offered {offered}, allowed here {ours}", field="transport"
            )
        return usable[0]
