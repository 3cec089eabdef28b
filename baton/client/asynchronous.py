"""The client for asyncio."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar, Unpack

import grpc

from baton.client.progress import StreamProgress
from baton.client.request import generate_request, tokenize_request
from baton.client.routers import (
    CHANNEL_OPTIONS,
    Routers,
    Shuffle,
    call_metadata,
    default_reconnects,
    pause_seconds,
)
from baton.client.types import Chunk, Completion, GenerateOptions, Message, ModelInfo, Prompt, Timings, Usage
from cluster.errors import CancelledError, DeadlineError, InternalError
from cluster.rpc.errors import error_from_rpc
from cluster.security.tls import ClientTls, router_channel_async
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc as rpc

_Answer = TypeVar("_Answer")


class AsyncClient:
    """`Client` for one event loop: the same arguments, the same types, `await` in front.

    Args:
        addresses: host:port of a router's gRPC port, or several of the same cluster.
        timeout_seconds: deadline of each call without one of its own, over all its reconnects.
        api_key: sent with every call, if the routers require keys.
        tls: trusted authority and own certificate, if the routers use TLS; `ClientTls()` trusts the system's list.
        max_reconnects: how often one call may move to another router; default: each router twice.
        shuffle: reorders the list of addresses in place, which are tried in that order. Default: random.

    Every method raises a class of `cluster.errors`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "127.0.0.1:50051",
        *,
        api_key: str = "",
        tls: ClientTls | None = None,
        timeout_seconds: float = 600.0,
        max_reconnects: int | None = None,
        shuffle: Shuffle = random.shuffle,
    ) -> None:
        self._routers = Routers(addresses, shuffle)
        self._tls = tls
        self._metadata = call_metadata(api_key)
        self._timeout_seconds = timeout_seconds
        reconnects = default_reconnects(self._routers.addresses)
        self._max_reconnects = reconnects if max_reconnects is None else max_reconnects
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        explain: bool = False,
        timeout_seconds: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Start a completion and yield its chunks as they arrive. Leaving `async with`, or `aclose()`, cancels it."""
        request = generate_request(prompt, options, model=model, request_id=request_id, explain=explain)
        return AsyncStream(
            self, StreamProgress(request, self._max_reconnects), self._seconds(timeout_seconds)
        )

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        explain: bool = False,
        timeout_seconds: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Return the whole answer. Cancelling the task cancels the request."""
        request = generate_request(prompt, options, model=model, request_id=request_id, explain=explain)
        progress = StreamProgress(request, self._max_reconnects)
        async with AsyncStream(self, progress, self._seconds(timeout_seconds)) as stream:
            async for _ in stream:
                pass
        return progress.completion()

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_seconds: float | None = None
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation under the model's chat template."""
        request = tokenize_request(prompt, model=model)
        answer = await self._unary(
            lambda stub, left: stub.Tokenize(request, timeout=left, metadata=self._metadata), timeout_seconds
        )
        return list(answer.token_ids)

    async def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Return the served models."""
        answer = await self._unary(
            lambda stub, left: stub.ListModels(pb.ListModelsRequest(), timeout=left, metadata=self._metadata),
            timeout_seconds,
        )
        return [ModelInfo(item.id, item.max_model_len, item.created_unix_seconds) for item in answer.models]

    async def aclose(self) -> None:
        """Close the connections for good; open streams are cancelled."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _unary(
        self,
        call: Callable[[rpc.InferenceAsyncStub, float], Awaitable[_Answer]],
        timeout_seconds: float | None,
    ) -> _Answer:
        deadline = time.monotonic() + self._seconds(timeout_seconds)
        for attempt in range(self._max_reconnects + 1):
            address, stub = self._stub()
            try:
                return await call(stub, deadline - time.monotonic())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt == self._max_reconnects:
                    raise error_from_rpc(error) from error
                self._routers.failed(address)
                await asyncio.sleep(pause_seconds(attempt + 1, len(self._routers.addresses)))
        raise AssertionError("the last attempt returns or raises")

    def _seconds(self, timeout_seconds: float | None) -> float:
        return self._timeout_seconds if timeout_seconds is None else timeout_seconds

    def _stub(self) -> tuple[str, rpc.InferenceAsyncStub]:
        if self._closed:
            raise CancelledError("this client was closed")
        # Channels are made inside a call: a grpc.aio channel belongs to the running event loop.
        address = self._routers.current
        if address not in self._channels:
            self._channels[address] = router_channel_async(address, self._tls, CHANNEL_OPTIONS)
        return address, rpc.InferenceStub(self._channels[address])


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of one request. After the last one `usage`, `timings` and `completion()` are there."""

    def __init__(self, client: AsyncClient, progress: StreamProgress, timeout_seconds: float) -> None:
        self._client = client
        self._progress = progress
        self._deadline = time.monotonic() + timeout_seconds
        self._address = ""
        self._closed = False
        self._call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] | None = None
        self._connect()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._progress.done and not self._closed:
            chunk = await self._read()
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def _read(self) -> Chunk | None:
        assert self._call is not None
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            await self._reconnect(error)
        except asyncio.CancelledError:
            # Raised by aclose() of this stream or its client, and by a cancelled task, whose cancellation must propagate.
            if self._closed:
                return None
            task = asyncio.current_task()
            if self._client._closed and task is not None and not task.cancelling():
                raise CancelledError("this client was closed") from None
            self._call.cancel()
            raise
        else:
            if isinstance(event, pb.GenerateResponse):
                return await self._feed(event)
            await self._reconnect(None)
        return None

    async def _feed(self, event: pb.GenerateResponse) -> Chunk | None:
        try:
            return self._progress.feed(event)
        except InternalError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Cancel the request if it is running, and end the iteration, also in another task."""
        self._closed = True
        if self._call is not None and not self._progress.done:
            self._call.cancel()

    def completion(self) -> Completion:
        """Return everything received, once the stream has ended."""
        return self._progress.completion()

    @property
    def usage(self) -> Usage | None:
        return self._progress.usage

    @property
    def timings(self) -> Timings | None:
        return self._progress.timings

    @property
    def request_id(self) -> str:
        """The request's name in the servers' logs; empty before the first chunk."""
        started = self._progress.started
        return started.request_id if started else ""

    @property
    def seed(self) -> int | None:
        """The seed in use, chosen by the router if the request had none; None before the first chunk."""
        started = self._progress.started
        return started.seed if started else None

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The workers of the request, as named by the first event."""
        started = self._progress.started
        return tuple(started.worker_ids) if started else ()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _connect(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline passed before the stream's end")
        self._address, stub = self._client._stub()
        self._call = stub.Generate(self._progress.request(), timeout=left, metadata=self._client._metadata)

    async def _reconnect(self, error: grpc.aio.AioRpcError | None) -> None:
        self._progress.lost(error)
        if self._progress.done:
            return
        routers = self._client._routers
        routers.failed(self._address)
        await asyncio.sleep(pause_seconds(self._progress.reconnects, len(routers.addresses)))
        if not self._closed:
            self._connect()
