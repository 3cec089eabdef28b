"""The client for ordinary, blocking code. Safe to share between threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
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
from cluster.security.tls import ClientTls, router_channel
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc as rpc

_Answer = TypeVar("_Answer")


class Client:
    """Client of one router, or of several of the same cluster.

    Args:
        addresses: host:port of a router's gRPC port, or several.
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
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
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
    ) -> Stream:
        """Start a completion and yield its chunks as they arrive. Closing the stream cancels the request."""
        request = generate_request(prompt, options, model=model, request_id=request_id, explain=explain)
        return Stream(self, StreamProgress(request, self._max_reconnects), self._seconds(timeout_seconds))

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        explain: bool = False,
        timeout_seconds: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Return the whole answer."""
        request = generate_request(prompt, options, model=model, request_id=request_id, explain=explain)
        progress = StreamProgress(request, self._max_reconnects)
        with Stream(self, progress, self._seconds(timeout_seconds)) as stream:
            for _ in stream:
                pass
        return progress.completion()

    def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_seconds: float | None = None
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation under the model's chat template."""
        request = tokenize_request(prompt, model=model)
        answer = self._unary(
            lambda stub, left: stub.Tokenize(request, timeout=left, metadata=self._metadata), timeout_seconds
        )
        return list(answer.token_ids)

    def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Return the served models."""
        answer = self._unary(
            lambda stub, left: stub.ListModels(pb.ListModelsRequest(), timeout=left, metadata=self._metadata),
            timeout_seconds,
        )
        return [ModelInfo(item.id, item.max_model_len, item.created_unix_seconds) for item in answer.models]

    def close(self) -> None:
        """Close the connections for good; open streams are cancelled."""
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(
        self, call: Callable[[rpc.InferenceStub, float], _Answer], timeout_seconds: float | None
    ) -> _Answer:
        deadline = time.monotonic() + self._seconds(timeout_seconds)
        for attempt in range(self._max_reconnects + 1):
            address, stub = self._stub()
            try:
                return call(stub, deadline - time.monotonic())
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt == self._max_reconnects:
                    raise error_from_rpc(error) from error
                self._failed(address)
                time.sleep(pause_seconds(attempt + 1, len(self._routers.addresses)))
            except ValueError:
                if not self._closed:  # since `_stub`, in another thread
                    raise
                raise CancelledError("this client was closed") from None
        raise AssertionError("the last attempt returns or raises")

    def _seconds(self, timeout_seconds: float | None) -> float:
        return self._timeout_seconds if timeout_seconds is None else timeout_seconds

    def _stub(self) -> tuple[str, rpc.InferenceStub]:
        with self._lock:
            if self._closed:
                raise CancelledError("this client was closed")
            address = self._routers.current
            if address not in self._channels:
                self._channels[address] = router_channel(address, self._tls, CHANNEL_OPTIONS)
            return address, rpc.InferenceStub(self._channels[address])

    def _failed(self, address: str) -> None:
        with self._lock:
            self._routers.failed(address)


class Stream(Iterator[Chunk]):
    """The chunks of one request. After the last one `usage`, `timings` and `completion()` are there."""

    def __init__(self, client: Client, progress: StreamProgress, timeout_seconds: float) -> None:
        self._client = client
        self._progress = progress
        self._deadline = time.monotonic() + timeout_seconds
        self._address = ""
        self._closed = False
        self._call: grpc.CallIterator[pb.GenerateResponse] | None = None
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
        assert self._call is not None
        try:
            event: pb.GenerateResponse = next(self._call)  # type: ignore[call-overload]
        except StopIteration:
            self._reconnect(None)
        except grpc.RpcError as error:
            if not self._closed:
                self._reconnect(error)
        else:
            return self._feed(event)
        return None

    def _feed(self, event: pb.GenerateResponse) -> Chunk | None:
        try:
            return self._progress.feed(event)
        except InternalError:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the request if it is running, and end the iteration, also in another thread."""
        self._closed = True
        if self._call is not None and not self._progress.done:
            self._call.cancel()  # type: ignore[no-untyped-call]

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

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline passed before the stream's end")
        self._address, stub = self._client._stub()
        try:
            self._call = stub.Generate(
                self._progress.request(), timeout=left, metadata=self._client._metadata
            )
        except ValueError:
            if not self._client._closed:  # since the line before, in another thread
                raise
            raise CancelledError("this client was closed") from None
        if self._closed:  # `close` in another thread has cancelled the call before this one
            self._call.cancel()  # type: ignore[no-untyped-call]

    def _reconnect(self, error: grpc.RpcError | None) -> None:
        self._progress.lost(error)
        if self._progress.done:
            return
        self._client._failed(self._address)
        routers = len(self._client._routers.addresses)
        time.sleep(pause_seconds(self._progress.reconnects, routers))
        if not self._closed:
            self._connect()
