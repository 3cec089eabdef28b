"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar, Unpack

import grpc

from baton.client.base import BaseClient, BaseStream, model_infos
from baton.client.embedding import embed_request, embeddings_of
from baton.client.progress import may_go_elsewhere
from baton.client.request import tokenize_request
from baton.client.routers import CHANNEL_OPTIONS
from baton.client.types import (
    Chunk,
    Completion,
    Embeddings,
    EmbedInputs,
    EmbedOptions,
    Message,
    ModelInfo,
    Prompt,
    RequestOptions,
)
from cluster.errors import CancelledError
from cluster.rpc.errors import error_from_rpc
from cluster.security.tls import router_channel_async
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc as rpc

_Answer = TypeVar("_Answer")


class AsyncClient(BaseClient[grpc.aio.Channel, "rpc.InferenceAsyncStub"]):
    __doc__ = f"""`Client` for one event loop: the same arguments, the same types, `await` in front.

    {BaseClient.__doc__}"""

    _loop: asyncio.AbstractEventLoop | None = None  # that of the last call

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncStream:
        """Start a completion and yield its chunks as they arrive. Leaving `async with`, or `aclose()`, cancels it."""
        return AsyncStream(self, prompt, options)

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Return the whole answer. Cancelling the task cancels the request."""
        async with AsyncStream(self, prompt, options) as stream:
            async for _ in stream:
                pass
        return stream.completion()

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_seconds: float | None = None
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation under the model's chat template."""
        request = tokenize_request(prompt, model=model)
        answer = await self._unary(
            lambda stub, left: stub.Tokenize(request, timeout=left, metadata=self._metadata), timeout_seconds
        )
        return list(answer.token_ids)

    async def embed(self, inputs: EmbedInputs, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Return the vectors of texts. A call whose router is lost is made again at the next one, and counts again."""
        request = embed_request(inputs, options)
        answer = await self._unary(
            lambda stub, left: stub.Embed(request, timeout=left, metadata=self._metadata),
            options.get("timeout_seconds"),
        )
        return embeddings_of(answer)

    async def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Return the served models."""
        request = pb.ListModelsRequest()
        answer = await self._unary(
            lambda stub, left: stub.ListModels(request, timeout=left, metadata=self._metadata),
            timeout_seconds,
        )
        return model_infos(answer)

    async def aclose(self) -> None:
        """Close the connections for good; open streams are cancelled."""
        for channel in self._end():
            await channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _stub(self) -> tuple[str, rpc.InferenceAsyncStub]:
        """As BaseClient's. Channels belong to their event loop: those of one that has ended serve no other."""
        loop, before = asyncio.get_running_loop(), self._loop
        if before is not None and before is not loop and before.is_closed():
            with self._lock:
                self._channels = {}
        self._loop = loop
        return super()._stub()

    def _open(self, address: str) -> tuple[grpc.aio.Channel, rpc.InferenceAsyncStub]:
        channel = router_channel_async(address, self._tls, CHANNEL_OPTIONS)
        return channel, rpc.InferenceStub(channel)

    async def _unary(
        self,
        call: Callable[[rpc.InferenceAsyncStub, float], Awaitable[_Answer]],
        timeout_seconds: float | None,
    ) -> _Answer:
        deadline = self._deadline(timeout_seconds)
        for attempt in range(self._max_reconnects + 1):
            address, stub = self._stub()
            try:
                return await call(stub, deadline - time.monotonic())
            except grpc.aio.AioRpcError as error:
                if not may_go_elsewhere(error) or attempt == self._max_reconnects:
                    raise error_from_rpc(error) from error
                self._failed(address)
                await self._wait(attempt + 1, asyncio.Event())
            except asyncio.CancelledError:
                if not _is_task_cancelled():
                    self._check_open()
                raise
        raise AssertionError("the last attempt returns or raises")

    def _check_open(self) -> None:
        """Raise the typed CancelledError if this client was closed, which cancels its calls."""
        if self._closed:
            raise CancelledError("this client was closed") from None

    async def _wait(self, reconnects: int, stop: asyncio.Event) -> None:
        """Wait before another attempt, at most until `stop` is set."""
        with self._pause(stop), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_seconds(reconnects)):
                await stop.wait()


class AsyncStream(BaseStream[asyncio.Event], AsyncIterator[Chunk]):
    """The chunks of one request. After the last one `usage`, `timings` and `completion()` are there."""

    def __init__(self, client: AsyncClient, prompt: Prompt, options: RequestOptions) -> None:
        super().__init__(client, prompt, options, asyncio.Event())
        self._client = client
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
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            await self._reconnect(error)
        except asyncio.CancelledError:
            # Raised by aclose() of this stream or its client, and by a cancelled task, whose cancellation must propagate.
            if not _is_task_cancelled():
                if self._closed:
                    return None
                self._client._check_open()
            self._call.cancel()
            raise
        else:
            if isinstance(event, pb.GenerateResponse):
                return self._feed(event)
            await self._reconnect(None)
        return None

    async def aclose(self) -> None:
        """Cancel the request if it is running, and end the iteration, also in another task."""
        self._cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _connect(self) -> None:
        left = self._seconds_left()
        self._address, stub = self._client._stub()
        self._call = stub.Generate(self._progress.request(), timeout=left, metadata=self._client._metadata)

    async def _reconnect(self, error: grpc.aio.AioRpcError | None) -> None:
        self._progress.lost(error)
        if self._progress.done:
            return
        self._client._failed(self._address)
        await self._client._wait(self._progress.reconnects, self._stop)
        if not self._closed:
            self._connect()


def _is_task_cancelled() -> bool:
    """Whether a cancellation that arrives here is of the running task, not of its call alone."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
