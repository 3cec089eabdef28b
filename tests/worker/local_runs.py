"""Attempts that a decode worker prefills itself, read through its link."""

from __future__ import annotations

import grpc

from cluster.membership.topology import Location
from cluster.protocol.wire_version import WIRE_VERSION
from tests.harness.link_client import LinkClient, Reading
from wire import common_pb2, decode_pb2, decode_pb2_grpc
from worker.worker import Worker

LONG = 60.0


def read(client: LinkClient, worker: Worker, number: int, spec: common_pb2.GenerateSpec) -> Reading:
    return client.read(worker._identity.registration(Location()), bytes([number]) * 16, spec)


async def run_local(
    client: LinkClient,
    worker: Worker,
    channel: grpc.aio.Channel,
    number: int,
    spec: common_pb2.GenerateSpec,
) -> common_pb2.AttemptEnd:
    """The end of an attempt that a decode worker prefills itself."""
    reading = read(client, worker, number, spec)
    stub: decode_pb2_grpc.DecodeAsyncStub = decode_pb2_grpc.DecodeStub(channel)
    await stub.Run(
        decode_pb2.DecodeRunRequest(
            wire_version=WIRE_VERSION,
            transfer_id=reading.transfer_id,
            request_id=f"r{number}",
            worker_epoch=worker.epoch,
            spec=spec,
            handle=reading.reference,
        )
    )
    return await reading.wait(LONG)
