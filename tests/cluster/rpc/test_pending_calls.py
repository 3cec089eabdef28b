"""How many calls may wait to be accepted by a gRPC server, and that each of ours says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import worker.server
from cluster.config.router import RouterConfig
from cluster.rpc.pending_calls import pending_calls
from cluster.security.tls import Peers
from router import grpc_endpoint
from worker.server import WorkerServer

ALWAYS, MOST = 32, 40
SECONDS = 20.0


class Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def answer(message: bytes, context: Any) -> bytes:
            return message

        return grpc.unary_unary_rpc_method_handler(answer)


def burst(address: str, calls: int, sent: threading.Event) -> Counter[str]:
    """How calls that are sent at once end; `sent` is set once all are."""
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary("/x/y", None, None)
        pending = [call.future(b"", timeout=SECONDS) for _ in range(calls)]
        sent.set()
        return Counter(one.code().name for one in pending)


async def test_what_waits_is_bounded_and_a_burst_within_the_bound_is_answered() -> None:
    """The loop is busy while the calls come, so all of them wait."""
    server = grpc.aio.server(options=pending_calls(ALWAYS))
    server.add_generic_rpc_handlers((Echo(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with ThreadPoolExecutor(1) as threads:
        for calls in (ALWAYS, 3 * MOST):
            sent = threading.Event()
            ended = threads.submit(burst, address, calls, sent)
            sent.wait(SECONDS)
            time.sleep(0.15)  # noqa: ASYNC251  nothing is accepted meanwhile
            counts = await asyncio.wrap_future(ended)
            if calls == ALWAYS:
                assert counts == {"OK": calls}
            else:
                assert ALWAYS <= counts["OK"] <= MOST + 1, counts
    await server.stop(0)


@pytest.mark.parametrize(("requests", "always"), [(8, 1024), (1024, 1024), (5000, 5000), (1 << 30, 1 << 30)])
def test_a_router_lets_as_many_wait_as_it_may_serve(requests: int, always: int) -> None:
    options = grpc_endpoint.grpc_options(RouterConfig(model=Path("m"), max_concurrent_requests=requests))
    assert set(pending_calls(always)) <= set(options)


def test_no_setting_lets_calls_wait_without_bound() -> None:
    assert pending_calls(2**31 - 1) == pending_calls(1 << 16) != pending_calls((1 << 16) - 1)
    assert [most for _, most in pending_calls(2**31 - 1)] == [65_536, 81_920]


async def test_a_worker_lets_several_routers_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = grpc.aio.server

    def noted(*, options: Any, **rest: Any) -> Any:
        made.extend(options)
        return make(options=options, **rest)

    monkeypatch.setattr(grpc.aio, "server", noted)
    WorkerServer("127.0.0.1", 0, Peers(), "127.0.0.1")
    assert set(pending_calls(worker.server.PENDING_CALLS)) <= set(made)
