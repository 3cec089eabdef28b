"""A decode worker that records which exits it is notified of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from cluster.config import sources
from cluster.config.worker import WorkerConfig
from wire import decode_pb2, decode_pb2_grpc


class Decode(decode_pb2_grpc.DecodeServicer):
    """A decode worker that records the notices it gets."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failures = 0  # how many calls fail first

    def PeerExited(
        self, request: decode_pb2.PeerExitedRequest, context: Any
    ) -> decode_pb2.PeerExitedResponse:
        if self.failures:
            self.failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.told.append(request.worker_id)
        return decode_pb2.PeerExitedResponse()


@contextlib.contextmanager
def served() -> Iterator[tuple[Decode, int]]:
    """A decode worker and its port."""
    servicer = Decode()  # type: ignore[abstract]  # the test calls no other method
    server = grpc.server(ThreadPoolExecutor(2))
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    server.stop(None)


def config(redis_url: str, namespace: str, **values: Any) -> WorkerConfig:
    given = {"role": "prefill", "redis_url": redis_url, "namespace": namespace, "engine": {"model": "m"}}
    return sources.load(WorkerConfig, {}, values={**given, **values})
