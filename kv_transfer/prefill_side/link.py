"""The link from a prefill worker to one decode worker: Hello, beats, and the messages of all hand-offs between them.

It is opened for the first hand-off of the pair, and closed when there has been none for a while. Once certificates have
changed or an hour has passed, the next hand-off opens another link, and this one closes when its own hand-offs have ended,
after a minute at the latest. It is lost when its stream breaks, or when nothing was received for 5 s. A lost link ends its
hand-offs; it proves nothing about pending writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from cluster import errors
from cluster.faults.points import MessagePoint
from cluster.protocol.link import MAX_AGE_SECONDS, MOVE_SECONDS
from cluster.protocol.times import BEAT_SECONDS, LOST_SECONDS, SUSPECT_SECONDS
from kv_transfer.layout.digest import stricter
from kv_transfer.prefill_side.check_replies import check_welcome
from kv_transfer.prefill_side.control_stream import ControlStream
from kv_transfer.prefill_side.rank_connections import KnownWorkers, RankConnections, worker_key
from kv_transfer.ranks import SendingRank
from kv_transfer.transports.registry import TRANSPORTS, fallback
from wire import common_pb2, handoff_pb2

log = logging.getLogger(__name__)
ANSWER_SECONDS = 5.0  # the decode worker answers between two steps of its engine
LINGER_SECONDS = 10.0
LAST_SECONDS = 1.0  # for messages that are queued when a link is lost; then the call is cancelled


@dataclass(eq=False)
class _Waiting:
    answer: asyncio.Future[handoff_pb2.ReserveReply]
    aborted: handoff_pb2.Aborted | None = None  # in the message that accepted it


class Reservations:
    """Reserve messages that wait for the decode worker's answer."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def expect(self, transfer_id: bytes) -> Iterator[asyncio.Future[handoff_pb2.ReserveReply]]:
        """The answer of one hand-off, as long as it is waited for."""
        waiting = self._waiting[transfer_id] = _Waiting(asyncio.get_running_loop().create_future())
        try:
            yield waiting.answer
            if waiting.aborted is not None:
                raise errors.from_wire(waiting.aborted.error)
        finally:
            del self._waiting[transfer_id]

    def answered(self, reply: handoff_pb2.ReserveReply) -> None:
        waiting = self._waiting.get(reply.transfer_id)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(reply)

    def aborted(self, message: handoff_pb2.Aborted) -> None:
        if (waiting := self._waiting.get(message.transfer_id)) is not None:
            waiting.aborted = message

    def fail(self, error: errors.BatonError) -> None:
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)


class Handoff(Protocol):
    @property
    def transfer_id(self) -> bytes: ...

    def on_reply(self, reply: handoff_pb2.DecodeToPrefill) -> None: ...

    def fail(self, error: errors.BatonError) -> None: ...


class LinkOwner(Protocol):
    """The object to which a link reports."""

    def opened(self, link: LinkToDecode) -> None:
        """The pair has agreed on everything."""

    def closed(self, link: LinkToDecode) -> None: ...

    def has_another(self, link: LinkToDecode) -> bool:
        """Whether another link to the same worker is open: then the ranks stay connected."""

    def drained(self, link: LinkToDecode, transfer_id: bytes) -> None:
        """No write of the transfer is pending: the decode worker must get Drained, on this link or a later one."""

    def drained_acknowledged(self, link: LinkToDecode, transfer_id: bytes) -> None: ...


def link_key(decode: common_pb2.WorkerRef) -> str:
    """A link, and its peer at our ranks, by all that a hand-off names of its decode worker."""
    return f"{worker_key(decode)}@{decode.epoch:x}"


class LinkToDecode:
    def __init__(
        self,
        decode: common_pb2.WorkerRef,
        hello: handoff_pb2.Hello,
        ranks: Sequence[SendingRank],
        owner: LinkOwner,
        *,
        channel: grpc.aio.Channel,
        known: KnownWorkers,
        at_message: MessagePoint,
        certificates: Callable[[], int] = lambda: 0,
    ):
        """`certificates`: the version of the files with which a link would be opened now."""
        self.name = f"{decode.worker_id}@{decode.epoch:x}"
        self.key = link_key(decode)
        self.decode = decode
        self.hello = hello
        self.lost = False
        self._owner = owner
        self._known = known
        self._certificates = certificates
        self._opened_with, self._opened_at = certificates(), time.monotonic()
        self._replaced_at: float | None = None
        loop = asyncio.get_running_loop()
        self._agreed: asyncio.Future[handoff_pb2.Welcome] = loop.create_future()
        self._agreed.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._connections = RankConnections(
            self.key, hello.prefill.worker_id, worker_key(decode), ranks, known
        )
        self._handoffs: dict[bytes, Handoff] = {}
        self._reservations = Reservations()
        self._idle_since = time.monotonic()
        self._stream = ControlStream(
            self.name, channel, hello, at_message, on_message=self._on_reply, on_end=self._lose
        )
        self._tasks = [loop.create_task(self._beat())]

    @property
    def is_ready(self) -> bool:
        return self._agreed.done() and not self._agreed.cancelled() and self._agreed.exception() is None

    async def ready(self) -> None:
        """Wait until the pair has agreed on everything. Raises what it could not agree on."""
        await asyncio.shield(self._agreed)

    @property
    def agreement(self) -> handoff_pb2.Welcome:
        """The agreement of a ready link's workers: the Welcome, with the stricter digests and the transport that works."""
        return self._agreed.result()

    def send(self, message: handoff_pb2.PrefillToDecode) -> None:
        """Queue one message. A lost link drops it: its hand-offs have failed already."""
        if not self.lost:
            self._stream.send(message)

    def send_drained(self, transfer_id: bytes) -> None:
        """Send Drained once; the caller repeats it until it is acknowledged (`PendingDrainNotices`)."""
        self.send(handoff_pb2.PrefillToDecode(drained=handoff_pb2.Drained(transfer_id=transfer_id)))

    def attach(self, handoff: Handoff) -> None:
        self._handoffs[handoff.transfer_id] = handoff

    def detach(self, handoff: Handoff) -> None:
        self._handoffs.pop(handoff.transfer_id, None)
        self._idle_since = time.monotonic()

    async def ask_reserve(self, reserve: handoff_pb2.Reserve) -> handoff_pb2.ReserveReply:
        self._check_open()
        if self._stream.silent_seconds > SUSPECT_SECONDS:
            raise errors.PeerLostError(f"{self.name} has been silent for {SUSPECT_SECONDS:.0f} s")
        try:
            with self._reservations.expect(reserve.transfer_id) as answer:
                self.send(handoff_pb2.PrefillToDecode(reserve=reserve))
                async with asyncio.timeout(ANSWER_SECONDS):
                    reply = await answer
                self._check_open()  # a link lost since the answer came would never end the hand-off
            return reply
        except BaseException:
            # The decode worker may have reserved blocks by now, and must not keep them.
            abort = handoff_pb2.AbortHandoff(transfer_id=reserve.transfer_id, reason="given up")
            self.send(handoff_pb2.PrefillToDecode(abort=abort))
            self._owner.drained(self, reserve.transfer_id)
            raise

    def _check_open(self) -> None:
        if self.lost:
            raise errors.PeerLostError(f"{self.name} is lost")

    def probe_failed(self, reason: str) -> None:
        log.warning("the probe of %s failed: %s", self.name, reason)
        self._connections.probed(False)

    async def close(self) -> None:
        self._lose(errors.PeerLostError("closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stream.close()

    # --- the decode worker's messages ----------------------------------------------------------------------

    def _on_reply(self, reply: handoff_pb2.DecodeToPrefill) -> None:
        kind = reply.WhichOneof("message")
        if kind == "welcome":
            self._on_welcome(reply.welcome)
        elif kind == "reserve_reply":
            self._reservations.answered(reply.reserve_reply)
        elif kind == "probe_result":
            self._connections.probed(reply.probe_result.arrived)
        elif kind == "drained_ack":
            self._owner.drained_acknowledged(self, reply.drained_ack.transfer_id)
        elif kind is not None and kind != "beat":
            handoff = self._handoffs.get(getattr(reply, kind).transfer_id)
            if handoff is not None:
                handoff.on_reply(reply)
            elif kind == "aborted":
                self._reservations.aborted(reply.aborted)

    def _on_welcome(self, welcome: handoff_pb2.Welcome) -> None:
        """A repeated Welcome names a rank's new memory. It may come at any time, also while the first is processed."""
        if self.lost:
            return
        if self._connections.welcomed(welcome):
            self._tasks.append(asyncio.get_running_loop().create_task(self._welcome(welcome)))

    async def _welcome(self, welcome: handoff_pb2.Welcome) -> None:
        self._known.has_epoch(worker_key(self.decode), welcome.decode_epoch)
        try:
            if welcome.HasField("refused"):
                raise errors.from_wire(welcome.refused)
            check_welcome(welcome, self.decode, self.hello)
            agreement = await self._agree(welcome)
        except errors.BatonError as error:
            self._lose(error)
            return
        if not self.lost:
            self._agreed.set_result(agreement)
            self._owner.opened(self)

    async def _agree(self, welcome: handoff_pb2.Welcome) -> handoff_pb2.Welcome:
        """Connect the ranks, and test a transport that may not reach the peer. Raises TransportError."""
        agreement = handoff_pb2.Welcome()
        agreement.CopyFrom(welcome)
        agreement.digests = stricter(self.hello.digests, welcome.digests or "off")
        chosen = TRANSPORTS[welcome.transport]
        if not chosen.is_probed:
            self._connections.connect(welcome)
        elif not await self._connections.probe(welcome) and not self.lost:
            agreement.transport = fallback(self.hello.transports, chosen.name, self.name)
            label = TRANSPORTS[agreement.transport].label
            log.warning("%s does not reach %s: this pair uses %s", chosen.label, self.name, label)
        return agreement

    # --- the end -------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while not self.lost:
            await asyncio.sleep(BEAT_SECONDS)
            limit = LOST_SECONDS if self._connections.is_welcomed else SUSPECT_SECONDS
            if self._stream.silent_seconds > limit:
                self._lose(errors.PeerLostError(f"nothing received from {self.name} for {limit:.0f} s"))
            idle = not self._handoffs and not self._reservations
            now = time.monotonic()
            lingers = now - self._idle_since <= LINGER_SECONDS and not self.is_outdated()
            if idle and self._agreed.done() and not lingers:
                self._lose(errors.PeerLostError("idle"))
            if self._replaced_at is not None and now - self._replaced_at > MOVE_SECONDS:
                self._lose(
                    errors.PeerLostError(f"another link to {self.name} replaced it {MOVE_SECONDS:.0f} s ago")
                )
            self.send(handoff_pb2.PrefillToDecode(beat=common_pb2.Beat()))
        await self._stream.ended(LAST_SECONDS)

    def is_outdated(self) -> bool:
        """Whether the next hand-off should open another link, so that both sides check certificates again."""
        aged = time.monotonic() - self._opened_at > MAX_AGE_SECONDS
        return aged or self._certificates() != self._opened_with

    def mark_replaced(self) -> None:
        """Another link takes the next hand-offs: close when this one's have ended, after MOVE_SECONDS at the latest."""
        self._replaced_at = time.monotonic()

    def _lose(self, error: errors.BatonError) -> None:
        if self.lost:
            return
        self.lost = True
        if not self._agreed.done():
            self._agreed.set_exception(error)
        self._reservations.fail(error)
        for handoff in list(self._handoffs.values()):
            handoff.fail(error)
        self._connections.close(stay_connected=self._owner.has_another(self))
        self._owner.closed(self)
        self._stream.end()
