"""A prefill and a decode worker whose attempts send what a test says: real calls, real links, no engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.errors import BatonError
from cluster.membership.types import WorkerInfo
from cluster.rpc import errors
from router.dispatch.channels import Channels
from router.link.links import Links
from router.placement.types import Placed
from tests.harness.linked_worker import LinkedWorker
from tests.harness.worker_info import worker_info
from wire import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from worker.attempt_log import AttemptLog

TRANSFER = bytes(range(16))
FIRST = 9  # the first position of the attempts


def token(position: int) -> common_pb2.Token:
    return common_pb2.Token(position=position, token_id=7)


def done() -> common_pb2.AttemptEnd:
    return common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE)


class HANG:
    """A call without an answer."""


@dataclass
class ScriptedWorker:
    """`run`: what its Run does, None to take the request in. `sends`: tokens and ends of the attempt, in order."""

    worker_id: str
    epoch: int
    run: Any = None
    sends: list[Any] = field(default_factory=list)
    arbiter: Any = decode_pb2.ATTEMPT_STATE_ABORTED
    asked: list[Any] = field(default_factory=list)
    called_to_cancel: list[bytes] = field(default_factory=list)
    log: AttemptLog | None = None
    address: str = ""
    server: Any = None
    peer: ScriptedWorker | None = None  # at which a prefill worker reserves

    def __post_init__(self) -> None:
        self.link = LinkedWorker(self.worker_id, self.epoch)

    async def start(self) -> None:
        self.server = grpc.aio.server()
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server)  # type: ignore[arg-type]
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server)  # type: ignore[arg-type]
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        await self.link.start()

    async def stop(self) -> None:
        await self.link.stop()
        await self.server.stop(0)

    @property
    def info(self) -> WorkerInfo:
        role = "prefill" if self.peer is not None else "decode"
        return worker_info(self.worker_id, self.epoch, role, self.address, self.link.address)

    @property
    def name(self) -> str:
        return self.info.name

    def open(
        self, transfer_id: bytes, reference: common_pb2.HandleRef, spec: common_pb2.GenerateSpec
    ) -> None:
        self.log = self.link.open(transfer_id, reference, spec)
        for one in self.sends:
            self.send(one)

    def send(self, one: common_pb2.Token | common_pb2.AttemptEnd) -> None:
        assert self.log is not None, "its attempt was opened"
        if isinstance(one, common_pb2.AttemptEnd):
            self.log.end(one)
        else:
            self.log.add(one.choice, one.position, one.token_id, one if one.finish else None)

    async def Run(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if self.run is HANG:
            await asyncio.Event().wait()
        if isinstance(self.run, BatonError):
            await errors.abort(context, self.run)
        if isinstance(self.run, grpc.StatusCode):
            await context.abort(self.run, "broke")
        self.open(request.transfer_id, request.handle, request.spec)
        if isinstance(request, decode_pb2.DecodeRunRequest):
            return decode_pb2.DecodeRunResponse()
        if self.peer is not None and request.HasField("decode_handle"):
            self.peer.open(request.transfer_id, request.decode_handle, request.spec)
        return prefill_pb2.PrefillRunResponse()

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.called_to_cancel.append(request.transfer_id)
        is_prefill = isinstance(request, prefill_pb2.PrefillCancelRequest)
        return (prefill_pb2.PrefillCancelResponse if is_prefill else decode_pb2.DecodeCancelResponse)()

    async def Abort(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if self.arbiter is HANG:
            await asyncio.Event().wait()
        if isinstance(self.arbiter, BatonError):
            await errors.abort(context, self.arbiter)
        return decode_pb2.AbortResponse(state=self.arbiter)

    def __getattr__(self, name: str) -> Any:
        if name in ("PeerExited", "Handoff"):  # of the service, never called here
            return None
        raise AttributeError(name)


@dataclass
class ScriptedPair:
    """Both workers, and the connections of one router to them."""

    decode: ScriptedWorker = field(default_factory=lambda: ScriptedWorker("d", 4))

    def __post_init__(self) -> None:
        self.prefill = ScriptedWorker("p", 3, peer=self.decode)
        self.channels = Channels()
        self.links = Links("r")

    async def start(self) -> None:
        for one in (self.prefill, self.decode):
            await one.start()

    async def stop(self) -> None:
        await self.links.close()
        await self.channels.close()
        for one in (self.prefill, self.decode):
            await one.stop()

    def placed(self, *, local: bool = False) -> Placed:
        return Placed(None if local else self.prefill.info, self.decode.info, 0, 0, False)
