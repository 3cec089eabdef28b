"""An attempt that ends with its first token has no decode worker: the router opens no stream there and waits for none."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
from router.dispatch.liveness import Liveness

from cluster.config.worker import Role
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import pack_tokens
from router.dispatch.attempt import Attempt, Ended, Source, TokenCame
from router.dispatch.channels import Channels
from router.placement.types import Placed
from tests.harness.waiting import until as until_true
from wire import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

until = partial(until_true, seconds=15.0)


@dataclass
class Workers(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """Both roles. P sends its first token at once, and its end once `may_end` is set."""

    called: list[str] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def Run(self, request: Any, context: Any) -> Any:
        self.called.append("Run")
        yield common_pb2.AttemptEvent(
            token=common_pb2.Token(position=4, finish=common_pb2.FINISH_REASON_STOP)
        )
        await self.may_end.wait()
        end = common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE)
        yield common_pb2.AttemptEvent(end=end)

    async def Attach(self, request: Any, context: Any) -> Any:
        self.called.append("Attach")
        await asyncio.Event().wait()
        yield

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.called.append(type(request).__name__)
        is_prefill = isinstance(request, prefill_pb2.PrefillCancelRequest)
        return (prefill_pb2.PrefillCancelResponse if is_prefill else decode_pb2.DecodeCancelResponse)()


@asynccontextmanager
async def attempt(new: int, said: int = 0):
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    workers = Workers()  # type: ignore[abstract]  # the test calls no other method
    prefill_pb2_grpc.add_PrefillServicer_to_server(workers, server)
    decode_pb2_grpc.add_DecodeServicer_to_server(workers, server)
    await server.start()
    roles: tuple[Role, Role] = ("prefill", "decode")
    p, d = (
        WorkerInfo(role[0], 1, slot, role, "m", address, "", b"", "", "h", 4096, 100)
        for slot, role in enumerate(roles, 1)
    )
    spec = common_pb2.GenerateSpec(
        prompt_tokens=pack_tokens([5, 6, 7, 8]),
        output_tokens=pack_tokens([9] * said),
        sampling=common_pb2.SamplingParams(max_tokens=new),
        n=1,
    )
    channels = Channels()
    made = Attempt("r", spec, Placed(p, d, 0, 0, True), channels, Liveness(), 1.0, 4 + said)
    made.start()
    try:
        yield made, workers
    finally:
        await made.close()
        await server.stop(None)


@pytest.mark.parametrize(("new", "said"), [(1, 0), (3, 2)])
async def test_no_decode_worker_is_asked_or_waited_for(new, said):
    async with attempt(new, said) as (made, workers):
        await until(lambda: Source.PREFILL in made.responded, "the first token")
        assert not made.has_ended, "the prefill worker has not said its end"
        workers.may_end.set()
        await until(lambda: made.has_ended, "ended")
        events = await made.events.take()
        assert [type(event) for event in events] == [TokenCame, Ended]
        assert made.finished == {Source.PREFILL, Source.DECODE}  # the request waits for both of them
        assert not made.failed
        await made.close()
        assert workers.called == ["Run"]


async def test_a_cancel_goes_to_the_prefill_worker_only():
    async with attempt(1) as (made, workers):
        await until(lambda: Source.PREFILL in made.responded, "the first token")
        await made.close()
        assert workers.called == ["Run", "PrefillCancelRequest"]


@pytest.mark.parametrize(("new", "said"), [(2, 0), (4, 2)])
async def test_an_attempt_that_may_go_on_is_attached_to(new, said):
    async with attempt(new, said) as (made, workers):
        await until(lambda: "Attach" in workers.called, "attached")
        workers.may_end.set()
        await until(lambda: Source.PREFILL in made.finished, "prefilled")
        assert not made.has_ended
        await made.close()
        assert sorted(workers.called) == ["Attach", "DecodeCancelRequest", "Run"]
