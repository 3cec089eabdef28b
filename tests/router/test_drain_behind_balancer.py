"""A router drains behind a load balancer: clients without knowledge of it and without retries lose no request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton.client import ClientTls
from baton.local.certs import make_certs
from tests.harness.ended import gone
from tests.harness.router import Router, run_router, stub_workers
from tests.harness.waiting import until
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc

USERS = 6  # of each kind
ANSWERS = 20  # of each user, before and after
TOKENS = 12
NOTICE_SECONDS = 0.3  # until the balancer sends new connections elsewhere
SETTINGS = {"max_connection_seconds": 1.0, "drain_delay_seconds": 2.5, "drain_seconds": 30.0}
HTTP, GRPC = "http", "grpc"
Ask = Callable[[], Awaitable[int]]  # → tokens


@dataclass
class Balancer:
    """Passes each connection on to the current router, without reading what runs over it."""

    targets: dict[str, tuple[str, int]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for endpoint in self.targets:
                server = await asyncio.start_server(self._handler(endpoint), "127.0.0.1", 0)
                stack.callback(server.close)
                self.ports[endpoint] = server.sockets[0].getsockname()[1]
            try:
                yield
            finally:
                for task in self._open:
                    task.cancel()
                await asyncio.gather(*self._open, return_exceptions=True)
                await asyncio.sleep(0)  # transports close in the next turn

    def point_at(self, router: Router) -> None:
        host, _, port = router.grpc.rpartition(":")
        self.targets = {HTTP: router.address, GRPC: (host, int(port))}

    def _handler(
        self, endpoint: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._open.add(task)
            with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
                far_reader, far_writer = await asyncio.open_connection(*self.targets[endpoint])
                with contextlib.closing(far_writer):
                    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
            self._open.discard(task)

        return handle


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(64 << 10):
        writer.write(data)
        await writer.drain()
    writer.write_eof() if writer.can_write_eof() else writer.close()


@dataclass
class Seen:
    answers: dict[str, int] = field(default_factory=dict)  # by user
    failures: list[str] = field(default_factory=list)


async def use(name: str, ask: Ask, seen: Seen, over: asyncio.Event) -> None:
    seen.answers[name] = 0
    while not over.is_set() and not seen.failures:
        try:
            assert await ask() == TOKENS
        except (grpc.aio.AioRpcError, httpx.HTTPError, AssertionError) as error:
            seen.failures.append(f"{name}: {error!r}")
        seen.answers[name] += 1
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def grpc_user(port: int, tls: ClientTls | None) -> AsyncIterator[Ask]:
    """A plain channel, as generated code makes it."""
    own = [("grpc.use_local_subchannel_pool", 1)]  # users of one process would share connections
    target = f"127.0.0.1:{port}"
    async with (
        grpc.aio.insecure_channel(target, options=own)
        if tls is None
        else grpc.aio.secure_channel(target, tls.credentials(), options=own)
    ) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(
            text="abc", options=pb.GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0)
        )

        async def ask() -> int:
            return sum([len(event.chunk.tokens) async for event in stub.Generate(request, timeout=60)])

        yield ask


@contextlib.asynccontextmanager
async def http_user(port: int, tls: ClientTls | None, streams: bool) -> AsyncIterator[Ask]:
    """Keeps its connection alive; no retries."""
    body = {"prompt": "abc", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": streams}
    base = f"http{'s' if tls else ''}://127.0.0.1:{port}"
    verify: Any = tls.context() if tls is not None else True
    async with httpx.AsyncClient(base_url=base, verify=verify, timeout=60, trust_env=False) as client:

        async def ask() -> int:
            if not streams:
                answer = await client.post("/v1/completions", json=body)
                answer.raise_for_status()
                return int(answer.json()["usage"]["completion_tokens"])
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                lines = [line async for line in answer.aiter_lines() if '"finish_reason":null' in line]
                return len(lines)

        yield ask


@pytest.fixture(params=["plain", pytest.param("tls", marks=pytest.mark.long)])
def pair(
    request: pytest.FixtureRequest, checkpoint: Any, redis_url: str, namespace: str, tmp_path: Path
) -> Iterator[tuple[Router, Router, ClientTls | None]]:
    """Two routers before the same workers."""
    config: dict[str, Any] = {
        **SETTINGS,
        "model": str(checkpoint("llama")),
        "redis_url": redis_url,
        "namespace": namespace,
        "secret": secrets.token_hex(16),
    }
    tls = None
    if request.param == "tls":
        make_certs(tmp_path, [], 30)
        config |= {
            "public_tls_cert": str(tmp_path / "router.pem"),
            "public_tls_key": str(tmp_path / "router.key"),
        }
        tls = ClientTls(tmp_path / "ca.pem")
    with (
        stub_workers(redis_url, namespace),
        run_router(tmp_path / "first", config) as first,
        run_router(tmp_path / "second", config) as second,
    ):
        yield first, second, tls


@pytest.mark.long
async def test_plain_clients_lose_nothing_while_a_router_leaves(
    pair: tuple[Router, Router, ClientTls | None],
) -> None:
    leaving, staying, tls = pair
    balancer, seen, over = Balancer(), Seen(), asyncio.Event()
    balancer.point_at(leaving)
    async with balancer.serving(), contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number in range(USERS):
            by_grpc = await stack.enter_async_context(grpc_user(balancer.ports[GRPC], tls))
            by_http = await stack.enter_async_context(http_user(balancer.ports[HTTP], tls, number % 2 == 0))
            group.create_task(use(f"grpc-{number}", by_grpc, seen, over))
            group.create_task(use(f"http-{number}", by_http, seen, over))

        def each(count: int) -> bool:
            return bool(seen.failures) or min(seen.answers.values(), default=0) >= count

        await until(lambda: len(seen.answers) == 2 * USERS and each(ANSWERS), "all have begun")
        os.kill(leaving.pid, signal.SIGTERM)
        await asyncio.sleep(NOTICE_SECONDS)
        balancer.point_at(staying)
        await until(lambda: gone(leaving.pid), "it has left")
        most = max(seen.answers.values())
        await until(lambda: each(most + ANSWERS), "all go on")
        over.set()
    assert seen.failures == []
