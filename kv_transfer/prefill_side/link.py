"""The control stream from a prefill worker to one decode worker: hello, beats, and everything hand-offs say.

Opened for the first hand-off of the pair, closed when none has lived for a while. Lost means: the stream broke, or
nothing came for 5 s. A lost link ends its hand-offs; it proves nothing about writes under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from cluster import errors
from cluster.faults.points import inject
from cluster.protocol.times import BEAT_SECONDS, LOST_SECONDS, SUSPECT_SECONDS
from cluster.rpc import errors as rpc
from kv_transfer import messages as m
from kv_transfer.layout.digest import stricter
from kv_transfer.outbox import Outbox
from kv_transfer.prefill_side.check_replies import check_welcome
from wire import common_pb2, decode_pb2_grpc, handoff_pb2

if TYPE_CHECKING:
    from kv_transfer.prefill_side.sender import HandoffSender, OutgoingHandoff

log = logging.getLogger(__name__)
ANSWER_SECONDS = 5.0  # D says yes or no between two steps of its engine
LINGER_SECONDS = 10.0
PROBE_SECONDS = 3.0
LAST_SECONDS = 1.0  # for what is queued when a link is lost; then the call ends, whether D answers or not
MAX_MESSAGE_BYTES = 64 << 20


class LinkToDecode:
    def __init__(self, name: str, decode: common_pb2.WorkerRef, sender: HandoffSender):
        self.name = name
        self.decode = decode
        self.decode_layout = common_pb2.KvLayout()
        self.transport = ""
        self.slot_bytes = 0
        self.digests: str = sender.config.digests  # of this pair: the stricter setting of both
        self.digest_kind = ""  # of this pair; "" = each rank's own
        self.lost = False
        self._sender = sender
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._ready.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._probe: asyncio.Future[bool] = loop.create_future()
        self._outbox: Outbox[handoff_pb2.PrefillToDecode] = Outbox()
        self._handoffs: dict[bytes, OutgoingHandoff] = {}
        self._reserving: dict[bytes, asyncio.Future[handoff_pb2.ReserveReply]] = {}
        # By transfer id: hand-offs that D aborted in the message that accepted them
        self._aborted_early: dict[bytes, handoff_pb2.Aborted] = {}
        self._welcomed: handoff_pb2.Welcome | None = None  # what was said last
        self._last_heard = time.monotonic()
        self._idle_since = time.monotonic()
        self._at_message = sender.faults.messages()
        self._channel = sender.peers.channel(
            decode.address,
            [
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._beat())]

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None

    async def ready(self) -> None:
        """Returns when the pair has agreed on everything. Raises what it could not agree on."""
        await asyncio.shield(self._ready)

    def send(self, **message: Any) -> None:
        """Queues one message; a link that is lost drops it: its hand-offs have failed already."""
        strike = self._at_message(next(iter(message)), self.name)
        if strike is not None:
            inject(strike, lambda: self._put(message), asyncio.get_running_loop().call_later)
        else:
            self._put(message)

    def _put(self, message: dict[str, Any]) -> None:
        if self.lost:
            return
        try:
            self._outbox.put(handoff_pb2.PrefillToDecode(**message))
        except asyncio.QueueFull:
            self._lose(errors.PeerLostError(f"{self.name} takes no messages"))

    def say_drained(self, transfer_id: bytes) -> None:
        """Send Drained once; the caller repeats it until it is acknowledged (`PendingDrainNotices`)."""
        self.send(drained=handoff_pb2.Drained(transfer_id=transfer_id))

    def attach(self, handoff: OutgoingHandoff) -> None:
        self._handoffs[handoff.transfer_id] = handoff

    def detach(self, handoff: OutgoingHandoff) -> None:
        self._handoffs.pop(handoff.transfer_id, None)
        self._idle_since = time.monotonic()

    async def ask_reserve(self, reserve: handoff_pb2.Reserve) -> handoff_pb2.ReserveReply:
        if self.lost:
            raise errors.PeerLostError(f"{self.name} is lost")
        if time.monotonic() - self._last_heard > SUSPECT_SECONDS:
            raise errors.PeerLostError(f"{self.name} has been silent for {SUSPECT_SECONDS:.0f} s")
        future: asyncio.Future[handoff_pb2.ReserveReply] = asyncio.get_running_loop().create_future()
        self._reserving[reserve.transfer_id] = future
        try:
            self.send(reserve=reserve)
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await future
            if self.lost:  # since the answer came: nothing would end the hand-off
                raise errors.PeerLostError(f"{self.name} is lost")
            if reserve.transfer_id in self._aborted_early:
                raise errors.from_wire(self._aborted_early[reserve.transfer_id].error)
            return reply
        except BaseException:
            # D may have reserved by now: it must not keep what nobody will fill.
            self.send(abort=handoff_pb2.AbortHandoff(transfer_id=reserve.transfer_id, reason="given up"))
            self._sender.is_drained(self, reserve.transfer_id)
            raise
        finally:
            del self._reserving[reserve.transfer_id]
            self._aborted_early.pop(reserve.transfer_id, None)

    def probe_failed(self, reason: str) -> None:
        log.warning("NIXL probe of %s failed: %s", self.name, reason)
        if not self._probe.done():
            self._probe.set_result(False)

    async def close(self) -> None:
        self._lose(errors.PeerLostError("closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    # --- the stream --------------------------------------------------------------------------------------

    async def _run(self) -> None:
        call = decode_pb2_grpc.DecodeStub(self._channel).Handoff(self._outgoing())
        try:
            async for reply in call:
                self._last_heard = time.monotonic()
                self._on_reply(reply)
                for further in reply.more:
                    self._on_reply(further)
            self._lose(errors.PeerLostError(f"{self.name} ended the stream"))
        except grpc.aio.AioRpcError as error:
            cause = rpc.error_from_rpc(error)
            handoff = isinstance(cause, errors.HandoffError)
            self._lose(cause if handoff else errors.PeerLostError(f"{self.name}: {cause.message}"))
        except errors.BatonError as error:
            self._lose(error)
        finally:
            call.cancel()
            self._lose(errors.PeerLostError(f"{self.name}: the stream ended"))
            await self._channel.close(None)

    async def _outgoing(self) -> AsyncIterator[handoff_pb2.PrefillToDecode]:
        ranks = [rank.hello for rank in self._sender.ranks]
        yield handoff_pb2.PrefillToDecode(
            hello=handoff_pb2.Hello(
                prefill=self._sender.worker,
                decode_epoch=self.decode.epoch,
                layout=self._sender.layout,
                ranks=[
                    handoff_pb2.RankEndpoint(rank=r.rank, agent_name=r.agent_name, agent_metadata=r.metadata)
                    for r in ranks
                ],
                transports=self._offered(),
                digests=self._sender.config.digests,
                digest_kinds=self._sender.digest_kinds,
            )
        )
        while (message := await self._outbox.get()) is not None:
            yield message

    def _offered(self) -> list[str]:
        wanted = self._sender.config.transport
        has_nixl = all(rank.hello.agent_name for rank in self._sender.ranks)
        if wanted == "grpc" or not has_nixl:
            return ["grpc"]
        return ["nixl"] if wanted == "nixl" else ["nixl", "grpc"]

    def _on_reply(self, reply: handoff_pb2.DecodeToPrefill) -> None:
        kind = reply.WhichOneof("message")
        if kind == "welcome":
            self._on_welcome(reply.welcome)
        elif kind == "reserve_reply":
            future = self._reserving.get(reply.reserve_reply.transfer_id)
            if future is not None and not future.done():
                future.set_result(reply.reserve_reply)
        elif kind == "probe_result":
            if not self._probe.done():
                self._probe.set_result(reply.probe_result.arrived)
        elif kind == "drained_ack":
            self._sender.mail.acknowledged(self.decode.worker_id, reply.drained_ack.transfer_id)
        elif kind is not None and kind != "beat":
            transfer_id = getattr(reply, kind).transfer_id
            handoff = self._handoffs.get(transfer_id)
            if handoff is not None:
                handoff.on_reply(reply)
            elif kind == "aborted" and transfer_id in self._reserving:
                self._aborted_early[transfer_id] = reply.aborted

    def _on_welcome(self, welcome: handoff_pb2.Welcome) -> None:
        """Said again when a rank has new memory: at any time, also while the first one is acted upon."""
        if self.lost:
            return
        first, self._welcomed = self._welcomed is None, welcome
        if first:
            self._tasks.append(asyncio.get_running_loop().create_task(self._welcome(welcome)))
        else:
            self._connect_ranks(welcome, "")

    async def _welcome(self, welcome: handoff_pb2.Welcome) -> None:
        self._sender.known.lives_under(self.decode.worker_id, welcome.decode_epoch)
        try:
            self._check(welcome)
        except errors.BatonError as error:
            self._lose(error)
            return
        self.digests = stricter(self._sender.config.digests, welcome.digests or "off")
        self.digest_kind = welcome.digest_kind
        self.decode_layout = welcome.layout
        self.slot_bytes = welcome.slot_bytes
        self.transport = welcome.transport
        if welcome.transport == "nixl" and not await self._probe_nixl(welcome):
            if self.lost:  # that says nothing about NIXL
                return
            if self._sender.config.transport == "nixl" or self._sender.config.require_transport:
                self._lose(
                    errors.TransportError(f"NIXL does not reach {self.name}", field="require_transport")
                )
                return
            log.warning("NIXL does not reach %s: this pair uses gRPC", self.name)
            self.transport = "grpc"
        self._sender.mail.hand_over(self.decode, self)
        if not self._ready.done():
            self._ready.set_result(None)

    def _check(self, welcome: handoff_pb2.Welcome) -> None:
        """Raise the decode worker's reason if it refused the pair, or an error for an invalid Welcome."""
        if welcome.HasField("refused"):
            raise errors.from_wire(welcome.refused)
        sender = self._sender
        check_welcome(welcome, self.decode, sender.layout, self._offered(), sender.digest_kinds)

    async def _probe_nixl(self, welcome: handoff_pb2.Welcome) -> bool:
        """One notification from every rank: it arrives, or the pair does without NIXL. Connections that are there
        from earlier may have broken unnoticed: then a second one, over new ones."""
        worker_id = self.decode.worker_id
        for anew in (False, True) if self._sender.known.was_reached(worker_id) else (False,):
            if self.lost:
                return False
            self._probe = asyncio.get_running_loop().create_future()
            nonce = f"{self._sender.worker.worker_id}:{secrets.token_hex(8)}"
            self._connect_ranks(self._welcomed or welcome, nonce, anew)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    if await self._probe:
                        self._sender.known.is_reached(worker_id)
                        return True
        return False

    def _connect_ranks(self, welcome: handoff_pb2.Welcome, nonce: str, anew: bool = False) -> None:
        ranks = [
            m.PeerRank(r.rank, r.agent_name, r.agent_metadata, r.memory or m.DRAM) for r in welcome.ranks
        ]
        for rank in self._sender.ranks:
            rank.handle(m.Connect(self.name, ranks, nonce, anew))

    async def _beat(self) -> None:
        while not self.lost:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            patience = SUSPECT_SECONDS if self._welcomed is None else LOST_SECONDS
            if now - self._last_heard > patience:
                self._lose(errors.PeerLostError(f"nothing heard from {self.name} for {patience:.0f} s"))
            idle = not self._handoffs and not self._reserving
            if idle and self._ready.done() and now - self._idle_since > LINGER_SECONDS:
                self._lose(errors.PeerLostError("idle"))
            self.send(beat=common_pb2.Beat())
        running = self._tasks[0]
        await asyncio.wait([running], timeout=LAST_SECONDS)
        running.cancel()  # one that was stopped would keep the call, and its channel, open

    def _lose(self, error: errors.BatonError) -> None:
        if self.lost:
            return
        self.lost = True
        if not self._ready.done():
            self._ready.set_exception(error)
        if not self._probe.done():
            self._probe.set_result(False)
        for future in self._reserving.values():
            if not future.done():
                future.set_exception(error)
        for handoff in list(self._handoffs.values()):
            handoff.fail(error)
        for rank in self._sender.ranks:
            rank.handle(m.Disconnect(self.name))
        self._sender.link_closed(self)
        self._outbox.end()
