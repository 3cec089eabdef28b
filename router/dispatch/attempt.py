"""One attempt at a request: its streams to the workers, merged into one stream of tokens.

prefill worker ──Run────┐
                        ├──► events: tokens in order of position, then how the attempt ended
decode worker ──Attach──┘       (the first token comes from whichever is faster)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import grpc

from cluster import errors
from cluster.membership.types import WorkerInfo
from cluster.protocol.first_token import ends_with_first_token
from cluster.protocol.times import LOST_SECONDS
from cluster.protocol.wire_version import WIRE_VERSION
from cluster.rpc import errors as rpc
from router.dispatch.bounded_queue import BoundedQueue
from router.dispatch.channels import Channels
from router.dispatch.liveness import Liveness, Watch
from router.placement.types import Placed
from wire import common_pb2, decode_pb2, prefill_pb2

if TYPE_CHECKING:
    from cluster.telemetry.tracing.spans import OpenSpan

CONTROL_SECONDS = 2.0
MAX_EVENTS = 512


class Source(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class TokenCame:
    token: common_pb2.Token
    source: Source


@dataclass(frozen=True)
class Ended:
    """A stream's end as its worker reported it, or `error` when the stream was lost."""

    source: Source
    end: common_pb2.AttemptEnd | None
    error: errors.BatonError | None = None


Event = TokenCame | Ended


@dataclass
class Attempt:
    """Streams of one attempt. `close` ends them and tells the workers to cancel what is not finished."""

    request_id: str
    spec: common_pb2.GenerateSpec
    placed: Placed
    channels: Channels
    liveness: Liveness
    admission_seconds: float
    from_position: int
    transfer_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    started: float = field(default_factory=time.monotonic)
    finished: set[Source] = field(default_factory=set)  # have reported their end
    failed: set[Source] = field(default_factory=set)  # their streams are lost
    responded: set[Source] = field(default_factory=set)  # have sent anything at all
    prefilled_at: float = 0.0  # when the first token came; 0 = none has
    prefill_report: common_pb2.WorkReport | None = None  # of the worker that computed the prompt
    span: OpenSpan | None = None  # where the request is traced

    def __post_init__(self) -> None:
        self.events: BoundedQueue[Event] = BoundedQueue(MAX_EVENTS)
        self._decode_lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._first_call: Any = None

    @property
    def trip_seconds(self) -> float | None:
        """What its first token took beyond the worker's own time: there and back, and both event loops. None: it
        had none, or its worker did not report."""
        report = self.prefill_report
        if report is None or not self.prefilled_at:
            return None
        work = report.prefill_queue_seconds + report.prefill_seconds
        return max(0.0, self.prefilled_at - self.started - work)

    def worker_of(self, source: Source) -> WorkerInfo:
        prefill = self.placed.prefill
        return prefill if source is Source.PREFILL and prefill is not None else self.placed.decode

    @property
    def is_local(self) -> bool:
        return self.placed.prefill is None

    def start(self) -> None:
        """The call that the first token comes from is made at once, and its bytes leave while D's call is made."""
        admission_deadline_ms = int(self.admission_seconds * 1000)
        decode = self.placed.decode
        stub = self.channels.decode(decode.address)
        if self.placed.prefill is None:
            run = decode_pb2.DecodeRunRequest(
                wire_version=WIRE_VERSION,
                transfer_id=self.transfer_id,
                request_id=self.request_id,
                worker_epoch=decode.epoch,
                spec=self.spec,
                admission_deadline_ms=admission_deadline_ms,
            )
            self._first_call = local = stub.Run(run)
            self._read(Source.DECODE, decode, lambda: local)
            return
        self._first_call = remote = self._run(self.placed.prefill, admission_deadline_ms)
        self._read(Source.PREFILL, self.placed.prefill, lambda: remote)
        if ends_with_first_token(self.spec):  # the prefill worker reserves at no decode worker either
            self.finished.add(Source.DECODE)
            return
        attach = decode_pb2.AttachRequest(
            wire_version=WIRE_VERSION,
            transfer_id=self.transfer_id,
            request_id=self.request_id,
            worker_epoch=decode.epoch,
            from_position=self.from_position,
            admission_deadline_ms=admission_deadline_ms,
        )
        self._read(Source.DECODE, decode, lambda: stub.Attach(attach))

    def _run(self, prefill: WorkerInfo, admission_deadline_ms: int) -> Any:
        decode = self.placed.decode
        request = prefill_pb2.PrefillRunRequest(
            wire_version=WIRE_VERSION,
            transfer_id=self.transfer_id,
            request_id=self.request_id,
            worker_epoch=prefill.epoch,
            spec=self.spec,
            decode=common_pb2.WorkerRef(
                worker_id=decode.worker_id, epoch=decode.epoch, address=decode.address
            ),
            admission_deadline_ms=admission_deadline_ms,
        )
        return self.channels.prefill(prefill.address).Run(request)

    def _read(self, source: Source, worker: WorkerInfo, call: Callable[[], Any]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._stream(source, worker, call)))

    async def _stream(self, source: Source, worker: WorkerInfo, open_call: Callable[[], Any]) -> None:
        call = open_call()
        task = asyncio.current_task()
        assert task is not None, "_read makes one"
        silent = False

        def on_lost() -> None:
            nonlocal silent
            if not silent:
                silent = True
                task.cancel()  # cancelling the call does not end a read of one that never got through

        try:
            with self.liveness.watch(worker.name, on_lost) as watch:
                await self._events_of(source, call, watch)
        except grpc.aio.AioRpcError as error:
            if source not in self.responded and not rpc.is_from_peer(error):
                self.liveness.not_reached(worker.name)
            self._lost(source, rpc.error_from_rpc(error))
        except asyncio.CancelledError:
            if silent:
                if task.uncancel():
                    raise
                self._lost(source, errors.PeerLostError(f"no message received for {LOST_SECONDS:.0f} s"))
            elif task.cancelling():
                raise
            else:  # this task was not cancelled: the channel was closed under the call
                self._lost(source, errors.PeerLostError("the connection was closed"))
        finally:
            if not call.done():
                call.cancel()

    async def _events_of(self, source: Source, call: Any, watch: Watch) -> None:
        """Until the stream has ended."""
        while True:
            event = await call.read()
            if not isinstance(event, common_pb2.AttemptEvent):
                # Without an end event: the worker stopped, or the call's status has the reason.
                self._lost(source, errors.PeerLostError("the stream ended early"))
                return
            watch.responded()
            self.responded.add(source)
            kind = event.WhichOneof("event")
            if kind == "token":
                self.events.add(TokenCame(event.token, source))
            elif kind == "end":
                self.finished.add(source)
                self.events.add(Ended(source, event.end))
                return
            if self.events.full:
                watch.pause()  # a slow client is no sign of a lost worker
                await self.events.room()
                watch.resume()

    def _lost(self, source: Source, error: errors.BatonError) -> None:
        self.failed.add(source)
        if source is Source.DECODE:
            self._decode_lost.set()
        self.events.add(Ended(source, None, error))

    async def abort_unless_committed(self) -> bool:
        """Has D committed? Raises BatonError when D does not answer, or is found to be lost meanwhile: P often
        notices first that D is gone, and D's silence must not be waited for twice."""
        asking = asyncio.create_task(self._abort())
        gone = asyncio.create_task(self._decode_lost.wait())
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise errors.PeerLostError(
                    "the decode worker was lost while it was asked how the attempt stands"
                )
            return asking.result()
        finally:
            asking.cancel()
            gone.cancel()
            await asyncio.gather(asking, gone, return_exceptions=True)

    async def _abort(self) -> bool:
        stub = self.channels.decode(self.placed.decode.address)
        request = decode_pb2.AbortRequest(transfer_id=self.transfer_id, worker_epoch=self.placed.decode.epoch)
        try:
            answer = await stub.Abort(request, timeout=CONTROL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        return bool(answer.state == decode_pb2.ATTEMPT_STATE_COMMITTED)

    @property
    def has_ended(self) -> bool:
        """Every worker has reported its end: `close` has nothing to do."""
        waited_for = {Source.DECODE} if self.is_local else {Source.PREFILL, Source.DECODE}
        return waited_for <= self.finished

    async def close(self) -> None:
        """Cancels at both workers what has not ended; returns when they have answered or are out of reach."""
        for task in self._tasks:
            task.cancel()
        if self._first_call is not None:
            self._first_call.cancel()  # a task that had not begun has not done it
        cancels: list[Awaitable[Any]] = []
        if Source.DECODE not in self.finished:
            stub = self.channels.decode(self.placed.decode.address)
            cancels.append(
                stub.Cancel(
                    decode_pb2.DecodeCancelRequest(transfer_id=self.transfer_id), timeout=CONTROL_SECONDS
                )
            )
        if self.placed.prefill is not None and Source.PREFILL not in self.finished:
            prefill = self.channels.prefill(self.placed.prefill.address)
            cancels.append(
                prefill.Cancel(
                    prefill_pb2.PrefillCancelRequest(transfer_id=self.transfer_id), timeout=CONTROL_SECONDS
                )
            )
        await asyncio.gather(*self._tasks, *cancels, return_exceptions=True)
