"""The Decode service over gRPC: checks of wire version and epoch, called as the router calls them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.errors import InvalidRequestError, StaleEpochError, StaleTransferError, WireVersionError
from cluster.membership.types import WorkerInfo
from cluster.protocol.wire_version import WIRE_VERSION
from cluster.rpc import errors
from decode_worker.worker import DecodeService
from router.dispatch.attempt import Attempt
from router.dispatch.channels import Channels
from router.link.links import Links
from router.placement.types import Placed
from tests.decode_worker.decode_world import DecodeWorld
from wire import common_pb2, decode_pb2, decode_pb2_grpc
from worker.identity import WorkerIdentity
from worker.server import TypedErrors

EPOCH = 0x5EED
T = b"t" * 16


@asynccontextmanager
async def serving():
    world = DecodeWorld()
    me: Any = SimpleNamespace(worker_id="d", epoch=EPOCH)
    world.core.check_epoch = lambda epoch: WorkerIdentity.check_epoch(me, epoch)
    server = grpc.aio.server(interceptors=[TypedErrors()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    parts: Any = world.core
    service = DecodeService(parts, world.role)
    decode_pb2_grpc.add_DecodeServicer_to_server(service, server)
    await server.start()
    try:
        yield world, address
    finally:
        await world.role.attempts.close()
        await world.receiver.close()
        await server.stop(None)


def run(**more: object) -> decode_pb2.DecodeRunRequest:
    sampling = common_pb2.SamplingParams(max_tokens=4)
    spec = common_pb2.GenerateSpec(model_id="m", prompt_tokens=bytes(16), sampling=sampling, salt=bytes(16))
    fields: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "transfer_id": T,
        "request_id": "r",
        "worker_epoch": EPOCH,
        "handle": common_pb2.HandleRef(incarnation=1, number=1),
    }
    return decode_pb2.DecodeRunRequest(**{**fields, "spec": spec, **more})


def arbiter(address: str, epoch: int) -> Attempt:
    """The router's end of an attempt with a decode worker that lived under `epoch`."""
    decode = WorkerInfo("d", epoch, 1, "decode", "m", address, "", b"", "", "h", 4096, 100)
    placed = Placed(None, decode, 0, 0, True)
    spec = common_pb2.GenerateSpec()
    channels, links = Channels(), Links("r")
    return Attempt(
        "r", spec, placed, channels, links, (), 1.0, lambda *_: True, lambda call: None, transfer_id=T
    )


async def refusal(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 15)
    return errors.error_from_rpc(caught.value)


@pytest.mark.parametrize("version", [0, WIRE_VERSION - 1, WIRE_VERSION + 1])
async def test_a_call_of_another_wire_version_is_refused(version):
    async with serving() as (world, address), grpc.aio.insecure_channel(address) as channel:
        error = await refusal(decode_pb2_grpc.DecodeStub(channel).Run(run(wire_version=version)))
        assert isinstance(error, WireVersionError)
        assert str(version) in error.message and str(WIRE_VERSION) in error.message
        assert not len(world.role.attempts)


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1])
async def test_a_call_for_an_earlier_life_is_refused(epoch):
    async with serving() as (world, address), grpc.aio.insecure_channel(address) as channel:
        error = await refusal(decode_pb2_grpc.DecodeStub(channel).Run(run(worker_epoch=epoch)))
        assert isinstance(error, StaleEpochError)
        assert error.field == "worker_epoch"
        assert not len(world.role.attempts)


async def test_a_run_without_a_handle_is_refused():
    async with serving() as (world, address), grpc.aio.insecure_channel(address) as channel:
        request = run()
        request.ClearField("handle")
        error = await refusal(decode_pb2_grpc.DecodeStub(channel).Run(request))
        assert isinstance(error, InvalidRequestError) and error.field == "handle"
        assert not len(world.role.attempts)


async def test_attempts_of_an_earlier_epoch_have_not_committed_and_never_will():
    """So the router may dispatch again: nothing of the attempt runs here, even if its Reserve arrives late."""
    async with serving() as (world, address):
        for epoch in (EPOCH - 1, 0):
            with pytest.raises(StaleEpochError):
                await arbiter(address, epoch).abort_unless_committed()
        with pytest.raises(StaleTransferError):
            world.role.run(run())


async def test_an_abort_under_this_epoch_is_answered():
    async with serving() as (world, address):
        assert not await arbiter(address, EPOCH).abort_unless_committed()
        assert world.role.attempts.is_ended(T)
