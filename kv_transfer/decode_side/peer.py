"""The control stream of one prefill worker, at the decode worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from cluster import errors
from cluster.faults.points import MessagePoint, inject
from cluster.protocol.names import invalid
from cluster.protocol.times import BEAT_SECONDS, LOST_SECONDS
from kv_transfer.decode_side.handshake import Handshake
from kv_transfer.decode_side.validate import check_message, check_together
from kv_transfer.outbox import Outbox
from wire import common_pb2, handoff_pb2

log = logging.getLogger(__name__)
M = TypeVar("M", handoff_pb2.Reserve, handoff_pb2.Finish, handoff_pb2.AbortHandoff)
MAX_RESERVING = 512  # reservations of one peer that wait for the engine, which answers between two steps
MAX_PENDING = 8 * MAX_RESERVING  # these and the messages that follow them
# Of the same messages: a prompt of a million tokens has 4 MB. The first one is taken whatever its size.
MAX_PENDING_BYTES = 64 << 20
HELLO_SECONDS = 5.0  # from the stream's begin; it is the peer's first message
Work = Callable[[], Awaitable[None]]


class InTurn:
    """Runs the engine's work for a peer's messages in the background, so that reading its stream never waits for a step:
    that of one transfer in the order of arrival, that of different transfers concurrently."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        limit: int,
        limit_bytes: int,
    ):
        self._spawn = spawn
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._queues: dict[bytes, deque[tuple[Work, int]]] = {}
        self.pending = 0  # running or waiting
        self.pending_bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether a message of `size` bytes keeps what is pending within the limit; the only one always does."""
        return not self.pending or self.pending_bytes + size <= self._limit_bytes

    def add(self, transfer_id: bytes, work: Work, size: int) -> bool:
        """Queue `work` for a message of `size` bytes. Returns False, without queueing it, if too much is pending."""
        if self.pending >= self._limit or not self.has_room(size):
            return False
        self.pending += 1
        self.pending_bytes += size
        queue = self._queues.get(transfer_id)
        if queue is not None:
            queue.append((work, size))
        else:
            self._queues[transfer_id] = deque([(work, size)])
            self._spawn(self._run(transfer_id))
        return True

    async def _run(self, transfer_id: bytes) -> None:
        queue = self._queues[transfer_id]
        try:
            while queue:
                work, size = queue.popleft()
                try:
                    await work()
                except Exception:  # later messages still run: one of them may undo this one
                    log.exception("handling a message of hand-off %s failed", transfer_id.hex())
                finally:
                    del work  # and the message: the next one may wait for long
                    self._ended(1, size)
        finally:
            self._ended(len(queue), sum(size for _, size in queue))
            del self._queues[transfer_id]

    def _ended(self, count: int, size: int) -> None:
        self.pending -= count
        self.pending_bytes -= size


class PeerRequests(Protocol):
    """Handlers of peers' messages at the decode worker. The coroutines may wait for an engine step."""

    def connected(self, link: PeerLink) -> None: ...

    async def reserve(self, link: PeerLink, request: handoff_pb2.Reserve) -> None: ...

    def slot_requested(self, link: PeerLink, request: handoff_pb2.SlotRequest) -> None: ...

    def part_carried(self, link: PeerLink, part: handoff_pb2.PartData) -> None: ...

    async def finish(self, link: PeerLink, finish: handoff_pb2.Finish) -> None: ...

    async def abort_by_peer(self, link: PeerLink, message: handoff_pb2.AbortHandoff) -> None: ...

    def drained(self, link: PeerLink, transfer_id: bytes) -> None: ...


class PeerLink:
    def __init__(
        self,
        requests: PeerRequests,
        handshake: Handshake,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        at_message: MessagePoint,
    ):
        self.prefill = common_pb2.WorkerRef()
        self.layout = common_pb2.KvLayout()
        self.agreement = handoff_pb2.Welcome()
        self.closed = False
        self._failure: errors.BatonError | None = None  # of the peer's messages
        self._requests = requests
        self._handshake = handshake
        self._outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
        self._in_turn = InTurn(spawn, MAX_PENDING, MAX_PENDING_BYTES)
        self._opened = self._last_received = time.monotonic()
        self._at_message = at_message

    @property
    def name(self) -> str:
        return f"{self.prefill.worker_id}@{self.prefill.epoch:x}"

    def send(self, message: handoff_pb2.DecodeToPrefill, *, delayable: bool = False) -> None:
        """Queue a message. A delayable one may wait a moment for others."""
        fault = self._at_message(message.WhichOneof("message") or "", self.name)
        if fault is not None:
            inject(fault, lambda: self._put(message, delayable), asyncio.get_running_loop().call_later)
        else:
            self._put(message, delayable)

    def _put(self, message: handoff_pb2.DecodeToPrefill, delayable: bool) -> None:
        if self.closed:
            return
        try:
            self._outbox.put(message, delayable=delayable)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """End the stream once all queued messages have been sent."""
        self.closed = True
        self._outbox.end()

    async def replies(self) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        """The messages to send, and beats while there are none; ends when the peer is silent for too long. Raises
        InvalidRequestError after an invalid message of the peer, or without its Hello."""
        while time.monotonic() - self._last_received < LOST_SECONDS:
            if not self._greeted and time.monotonic() - self._opened >= HELLO_SECONDS:
                self._failure = self._failure or invalid(
                    "hello", f"did not come within {HELLO_SECONDS:.0f} s"
                )
                break
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
        if self._failure is not None:
            raise self._failure

    @property
    def _greeted(self) -> bool:
        return bool(self.layout.tensor_parallel)

    async def read(self, messages: AsyncIterator[handoff_pb2.PrefillToDecode]) -> None:
        try:
            async for message in messages:
                self._last_received = time.monotonic()
                check_together(message)
                for one in (message, *message.more):
                    self._on_message(one)
        except asyncio.CancelledError:
            raise
        except (errors.InvalidRequestError, errors.HandoffError) as error:
            log.warning("the stream of %s ends: %s", self.name, error.message)
            self._failure = error
        except Exception:
            log.exception("the stream of %s failed", self.name)
        finally:
            self.end()

    def _on_message(self, message: handoff_pb2.PrefillToDecode) -> None:
        """Handle one message without waiting; work for the engine or a rank is queued."""
        requests = self._requests
        check_message(message, self.layout if self._greeted else None)
        match message.WhichOneof("message"):
            case "hello":
                self._hello(message.hello)
            case "reserve":
                self._reserve(message.reserve)
            case "slot_request":
                requests.slot_requested(self, message.slot_request)
            case "part":
                self._handshake.check_carried()  # its probe may have failed, so that it uses another transport
                requests.part_carried(self, message.part)
            case "finish":
                self._queue(message.finish, requests.finish)
            case "abort":
                self._queue(message.abort, requests.abort_by_peer)
            case "drained":
                requests.drained(self, message.drained.transfer_id)

    def _reserve(self, request: handoff_pb2.Reserve) -> None:
        few, room = self._in_turn.pending < MAX_RESERVING, self._in_turn.has_room(request.ByteSize())
        if few and room:
            self._queue(request, self._requests.reserve)
            return
        limit = f"{MAX_PENDING_BYTES} bytes" if few else str(MAX_RESERVING)
        error = errors.BlocksExhaustedError(
            "too many reservations wait for an answer", limit=limit, retry_after_seconds=0.5
        )
        reply = handoff_pb2.ReserveReply(transfer_id=request.transfer_id, refused=error.to_wire())
        self.send(handoff_pb2.DecodeToPrefill(reserve_reply=reply))

    def _queue(self, message: M, act: Callable[[PeerLink, M], Awaitable[None]]) -> None:
        own = type(message)()
        own.CopyFrom(message)  # a part of a message keeps all of it, whatever came with it
        if not self._in_turn.add(own.transfer_id, lambda: act(self, own), own.ByteSize()):
            few = self._in_turn.pending < MAX_PENDING
            limit = f"{MAX_PENDING_BYTES} bytes" if few else str(MAX_PENDING)
            raise errors.TransportError("too many messages wait for an answer", limit=limit)

    def _hello(self, hello: handoff_pb2.Hello) -> None:
        """Answer Hello. A refused peer gets the reason, then BatonError is raised and ends the stream."""
        self.prefill.CopyFrom(hello.prefill)
        self.prefill.DiscardUnknownFields()
        try:
            self.agreement = self._handshake.agree(hello)
        except errors.BatonError as error:
            self.send(handoff_pb2.DecodeToPrefill(welcome=self._handshake.refusal(error)))
            raise
        self.layout.CopyFrom(hello.layout)
        self.layout.DiscardUnknownFields()
        self._requests.connected(self)
        self.send(handoff_pb2.DecodeToPrefill(welcome=self.agreement))

    def announce_memory(self) -> None:
        """Send Welcome again, because a rank has new memory."""
        self.agreement = self._handshake.with_new_memory(self.agreement)
        self.send(handoff_pb2.DecodeToPrefill(welcome=self.agreement))
