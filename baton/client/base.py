"""Common parts of both clients: their arguments, their requests, and what a stream has received."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from baton.client.progress import StreamProgress
from baton.client.request import generate_request
from baton.client.routers import Routers, Shuffle, call_metadata, default_reconnects, pause_seconds
from baton.client.types import Chunk, Completion, ModelInfo, Prompt, RequestOptions, Timings, Usage
from cluster.errors import CancelledError, ConfigError, DeadlineError, InternalError, InvalidRequestError
from cluster.security.tls import ClientTls
from wire import inference_pb2 as pb

# gRPC counts nanoseconds in 64 bits: a time-out of 300 years would be one that has passed
LONGEST_SECONDS = 1e8

C = TypeVar("C")  # the kind of channel
S = TypeVar("S")  # the kind of stub


class StopEvent(Protocol):
    """An event of asyncio or of threading, set where a call is not to connect again."""

    def set(self) -> None: ...


E = TypeVar("E", bound=StopEvent)


class BaseClient(Generic[C, S]):
    """Client of one router, or of several of the same cluster.

    Args:
        addresses: host:port of a router's gRPC port, or several.
        timeout_seconds: deadline of each call without one of its own, over all its reconnects; math.inf = none.
        api_key: sent with every call, if the routers require keys.
        tls: trusted authority and own certificate, if the routers use TLS; `ClientTls()` trusts the system's list.
        max_reconnects: how often one call may move to another router; default: each address twice.
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
        if self._max_reconnects < 0:
            raise ConfigError("max_reconnects: at least 0; 0 = never", field="max_reconnects")
        self._lock = threading.Lock()  # threads share a blocking client
        self._channels: dict[str, tuple[C, S]] = {}
        self._closed = False
        self._pauses: set[StopEvent] = set()  # of calls that wait before they connect again

    def _open(self, address: str) -> tuple[C, S]:
        """Make a channel and its stub."""
        raise NotImplementedError

    def _stub(self) -> tuple[str, S]:
        """Return the router in use. Called within a call: a channel of asyncio belongs to the running event loop."""
        with self._lock:
            if self._closed:
                raise CancelledError("this client was closed")
            address = self._routers.current
            if address not in self._channels:
                self._channels[address] = self._open(address)
            return address, self._channels[address][1]

    def _failed(self, address: str) -> None:
        with self._lock:
            self._routers.failed(address)

    def _end(self) -> list[C]:
        """Make no more channels, and return those to close."""
        with self._lock:
            self._closed = True
            opened, self._channels = list(self._channels.values()), {}
            for stop in self._pauses:
                stop.set()
        return [channel for channel, _ in opened]

    @contextmanager
    def _pause(self, stop: StopEvent) -> Iterator[None]:
        """A wait before another attempt, by the body of `with`. Closing this client sets `stop`, which ends it."""
        with self._lock:
            if self._closed:
                stop.set()
            self._pauses.add(stop)
        try:
            yield
        finally:
            with self._lock:
                self._pauses.discard(stop)

    def _pause_seconds(self, reconnects: int) -> float:
        return pause_seconds(reconnects, len(self._routers.addresses))

    def _deadline(self, timeout_seconds: float | None) -> float:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if math.isnan(seconds):
            raise InvalidRequestError("timeout_seconds: is not a number", field="timeout_seconds")
        return time.monotonic() + min(seconds, LONGEST_SECONDS)


class BaseStream(Generic[E]):
    """One request. After the last chunk `usage`, `timings` and `completion()` are there."""

    def __init__(
        self, client: BaseClient[Any, Any], prompt: Prompt, options: RequestOptions, stop: E
    ) -> None:
        self._progress = StreamProgress(generate_request(prompt, options), client._max_reconnects)
        self._deadline = client._deadline(options.get("timeout_seconds"))
        self._address = ""
        self._closed = False
        self._stop = stop
        self._call: Any = None  # to the router at `_address`; each client has a type of its own

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

    def _feed(self, event: pb.GenerateResponse) -> Chunk | None:
        try:
            return self._progress.feed(event)
        except InternalError:
            self._cancel()
            raise

    def _cancel(self) -> None:
        self._closed = True
        self._stop.set()
        if self._call is not None and not self._progress.done:
            self._call.cancel()

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline passed before the stream's end")
        return left


def model_infos(answer: pb.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(item.id, item.max_model_len, item.created_unix_seconds) for item in answer.models]
