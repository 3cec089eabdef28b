"""The client for ordinary, blocking code. Safe to share between threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from cluster.security.tls import router_channel
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc as rpc

_Answer = TypeVar("_Answer")


class Client(BaseClient[grpc.Channel, rpc.InferenceStub]):
    __doc__ = BaseClient.__doc__

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """Start a completion and yield its chunks as they arrive. Closing the stream cancels the request."""
        return Stream(self, prompt, options)

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Return the whole answer."""
        with Stream(self, prompt, options) as stream:
            for _ in stream:
                pass
        return stream.completion()

    def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_seconds: float | None = None
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation under the model's chat template."""
        request = tokenize_request(prompt, model=model)
        answer = self._unary(
            lambda stub, left: stub.Tokenize(request, timeout=left, metadata=self._metadata), timeout_seconds
        )
        return list(answer.token_ids)

    def embed(self, inputs: EmbedInputs, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Return the vectors of texts. A call whose router is lost is made again at the next one, and counts again."""
        request = embed_request(inputs, options)
        answer = self._unary(
            lambda stub, left: stub.Embed(request, timeout=left, metadata=self._metadata),
            options.get("timeout_seconds"),
        )
        return embeddings_of(answer)

    def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Return the served models."""
        request = pb.ListModelsRequest()
        answer = self._unary(
            lambda stub, left: stub.ListModels(request, timeout=left, metadata=self._metadata),
            timeout_seconds,
        )
        return model_infos(answer)

    def close(self) -> None:
        """Close the connections for good; open streams are cancelled."""
        for channel in self._end():
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, address: str) -> tuple[grpc.Channel, rpc.InferenceStub]:
        channel = router_channel(address, self._tls, CHANNEL_OPTIONS)
        return channel, rpc.InferenceStub(channel)

    def _unary(
        self, call: Callable[[rpc.InferenceStub, float], _Answer], timeout_seconds: float | None
    ) -> _Answer:
        deadline = self._deadline(timeout_seconds)
        for attempt in range(self._max_reconnects + 1):
            address, stub = self._stub()
            try:
                return call(stub, deadline - time.monotonic())
            except grpc.RpcError as error:
                if not may_go_elsewhere(error) or attempt == self._max_reconnects:
                    raise error_from_rpc(error) from error
                self._failed(address)
                self._wait(attempt + 1, threading.Event())
            except ValueError:
                if not self._closed:  # since `_stub`, in another thread
                    raise
                raise CancelledError("this client was closed") from None
        raise AssertionError("the last attempt returns or raises")

    def _wait(self, reconnects: int, stop: threading.Event) -> None:
        """Wait before another attempt, at most until `stop` is set."""
        with self._pause(stop):
            stop.wait(self._pause_seconds(reconnects))


class Stream(BaseStream[threading.Event], Iterator[Chunk]):
    """The chunks of one request. After the last one `usage`, `timings` and `completion()` are there."""

    def __init__(self, client: Client, prompt: Prompt, options: RequestOptions) -> None:
        super().__init__(client, prompt, options, threading.Event())
        self._client = client
        self._connect()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        while not self._progress.done and not self._closed:
            chunk = self._read()
            if chunk is not None:
                return chunk
        raise StopIteration

    def _read(self) -> Chunk | None:
        try:
            event: pb.GenerateResponse = next(self._call)
        except StopIteration:
            self._reconnect(None)
        except grpc.RpcError as error:
            if not self._closed:
                self._reconnect(error)
        else:
            return self._feed(event)
        return None

    def close(self) -> None:
        """Cancel the request if it is running, and end the iteration, also in another thread."""
        self._cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        left = self._seconds_left()
        self._address, stub = self._client._stub()
        request = self._progress.request()
        try:
            self._call = stub.Generate(request, timeout=left, metadata=self._client._metadata)
        except ValueError:
            if not self._client._closed:  # since the line before, in another thread
                raise
            raise CancelledError("this client was closed") from None
        if self._closed:  # `close` in another thread has cancelled the call before this one
            self._call.cancel()

    def _reconnect(self, error: grpc.RpcError | None) -> None:
        self._progress.lost(error)
        if self._progress.done:
            return
        self._client._failed(self._address)
        self._client._wait(self._progress.reconnects, self._stop)
        if not self._closed:
            self._connect()
