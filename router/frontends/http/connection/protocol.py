"""uvicorn's HTTP/1.1 with bounds that it lacks: on heads, on connections, and on the time that a client takes.

    connected ──head──► requested ──body──► answered ──► requested …, or idle: closed       each arrow has a deadline
                 │ too large, too many, too late
                 ▼
              an OpenAI error, and the connection is closed

A connection whose answer, or whose last bytes, the client does not read is aborted (write_deadline.py).

If there are too many connections, one without a place (router/admission) is aborted: of the address with the most of
these, the new one counted, the one that has been so for longest. Others would take all connections with answers that are
not read, with a key or without, and a flood would close the idle ones of every other client.

While requests wait behind the one that runs, the socket is not read (pipelined.py).

Once a head is complete, its method and path choose how the request is answered: by an endpoint of `direct`, which writes
to the connection (exchange.py), or by the ASGI application.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cluster.config.router import ConnectionLimits
from cluster.errors import BatonError, InvalidRequestError
from cluster.open_connections import OpenConnections
from cluster.sockets import network
from router.frontends.http.connection import refusals
from router.frontends.http.connection.answer_end import AnswerTransport
from router.frontends.http.connection.exchange import Endpoint, Exchange
from router.frontends.http.connection.head import why_refused
from router.frontends.http.connection.linger import Linger
from router.frontends.http.connection.pipelined import EndWatch, PipelineFlow, is_read_only
from router.frontends.http.connection.short_chunks import ShortChunks
from router.frontends.http.connection.upgrade import read_on
from router.frontends.http.connection.write_deadline import WriteDeadline
from router.frontends.http.errors import closing_answer

# Connections beyond the limit, if each has a request: this many get 429, further ones are closed at once.
MAX_REFUSED = 64
MAX_PIPELINED = 64  # requests received before the current one is answered
MAX_PIPELINED_BYTES = 1 << 16  # of these: no budget of bodies counts them
HEADER_BYTES = 128  # what a short header line takes in memory
# Of a connection: whether it may have a further request.
Trust = Callable[[asyncio.BaseTransport], Callable[[], bool]]
KEEPS = "baton.keeps_connection"  # in a request's scope: a context for the time in which it holds a place


class LimitedProtocol(HttpToolsProtocol):
    """One connection. The class attributes are set by `limited`: uvicorn makes the instances."""

    limits: ConnectionLimits
    direct: Mapping[tuple[str, str], Endpoint]  # by method and path
    draining: Callable[[], bool]  # answers then close their connections, and balancers choose another router
    trust: Trust
    # Connections whose request holds no place; their last request began or ended in this order
    waiting: OpenConnections[LimitedProtocol]

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.timeout_keep_alive = self.limits.http_idle_seconds
        self._in_head, self._in_body = True, False
        self._head_bytes = 0
        self._ended_in_read = False  # a request's last bytes were in the bytes received last
        self._body_arrived = False  # bytes of the body arrived in the bytes received last
        self._between_bytes = 0  # bytes of chunk framing and trailers since the last bytes of the body itself
        self._short_chunks = ShortChunks(self.pipeline, self._give_up)
        self._refused = self._lingers = False  # the answer closes the connection, and the client still sends
        self._refusal: tuple[int, BatonError] | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the client's next bytes
        self._pipelined_bytes = 0  # received behind a running request since the last time that none waited
        # The request that runs or ran last; uvicorn's `cycle` is the one received last.
        self._running: RequestResponseCycle | None = None
        self._exchange: Exchange | None = None  # of the request that runs, if `direct` answers it
        self._places = 0  # held by requests, of which one may wait for its answer to be read

    # --- called by asyncio --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._trusted = self.trust(transport)
        self.flow = PipelineFlow(self.transport, self.pipeline)
        self._end_watch = EndWatch(self.transport, self.pipeline, self._client_ended)
        self._write_deadline = WriteDeadline(self.transport, self.client, self.limits.write_seconds)
        self._lingering = Linger(self.flow, self.limits.body_seconds, self.timeout_keep_alive_handler)
        self._address = network(self.client)
        limit = self._connection_limit()
        self._mark_evictable()
        if len(self.connections) > limit:
            evicted = self.waiting.evict_oldest()
            if evicted is not self:  # else every other connection has a request with a place
                evicted._abort()
        if len(self.connections) > limit + MAX_REFUSED:
            self._abort()
        elif len(self.connections) > limit:
            self.waiting.discard(self)  # it is closed once it could read its answer, whatever it sends
            self._lingering = Linger(self.flow, 0.0, self.timeout_keep_alive_handler)
            self._refuse(429, refusals.too_many(self.limits.max_http_connections))
        else:
            self._expect(self.limits.header_seconds)

    def _connection_limit(self) -> int:
        return self.limits.max_http_connections

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._lingering.drop(len(data))
            return
        self._body_arrived = self._ended_in_read = False
        self._short_chunks.read()
        self._parse(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head and not self._ended_in_read:  # else most of it may be the previous request's
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_header_bytes:
                self._refuse(431, refusals.too_large(self.limits.max_header_bytes))
                return
        if self._in_body:
            # The parser buffers a trailer or a chunk extension until it is complete, so both need a bound.
            self._between_bytes = 0 if self._body_arrived else self._between_bytes + len(data)
            if self._between_bytes > self.limits.max_header_bytes:
                self._refuse(431, refusals.too_large(self.limits.max_header_bytes))
                return
        self._expect_rest()

    def _parse(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._feed(left) :]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _feed(self, data: memoryview) -> int:
        """Returns how many bytes the parser read; after an offer to upgrade another one reads on."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            read_on(self, self.headers)
            return int(upgrade.args[0])
        return len(data)

    def _should_upgrade(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.discard(self)
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._write_deadline.stop()
        self._lingering.stop()
        self._end_watch.stop()
        self._disconnect()
        super().connection_lost(exc)
        # What refers to it, so that connection and request are freed at once: garbage keeps bodies, and a collection of
        # that of thousands holds every stream for 0.3 s.
        self.pipeline.clear()
        self.scope = self.cycle = self._running = self._exchange = None  # type: ignore[assignment]
        del self._short_chunks, self._end_watch, self._lingering

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for the answers to a client that sends no more, then close it.

        Only for GET, HEAD and without TLS: the end of a client that left must cancel its generation, and looks the same.
        """
        if not self._may_outlive_end():
            return None
        self.cycle.keep_alive = False
        return True

    def _may_outlive_end(self) -> bool:
        cycles = [self._running, *(cycle for cycle, _ in self.pipeline)]
        return self.scheme != "https" and all(one is not None and is_read_only(one) for one in cycles)

    def _client_ended(self) -> None:
        """Called while the socket is not read."""
        if not self._may_outlive_end():
            self._disconnect()
            self.timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline.start()

    def resume_writing(self) -> None:
        self._write_deadline.stop()
        if self.transport.is_closing():
            self._write_deadline.start()
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.resumed()

    # --- called by httptools -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        # Not in data_received: line ends, and the rest of an answered request's body, begin no request.
        self._unset_keepalive_if_required()
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._short_chunks.add_trailer()
            return  # a trailer is ignored: authentication and routing used the head only
        if len(self.headers) >= self.limits.max_headers:
            self._give_up(431, refusals.too_many_headers(self.limits.max_headers))
        super().on_header(name, value.rstrip(b" \t"))  # no part of it (RFC 9110, 5.5)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._give_up(431, refusals.too_large(self.limits.max_header_bytes))
        if error := why_refused(self.parser.get_http_version(), self.headers):
            self._give_up(400, error)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._give_up(429, refusals.too_many_pipelined(MAX_PIPELINED, "requests"))
        self._stop_timer()
        self._in_head, self._in_body, self._body_arrived = False, True, True
        self.expect_100_continue &= self.parser.get_http_version() == "1.1"  # 1.0 has no 1xx answers
        super().on_headers_complete()
        self._short_chunks.begin()
        self._end_watch.start()
        self._count_pipelined(size + HEADER_BYTES * len(self.headers))

    def on_body(self, body: bytes) -> None:
        self._short_chunks.add_piece(len(body))
        self._body_arrived = True
        super().on_body(body)
        self._count_pipelined(len(body))

    def _count_pipelined(self, size: int) -> None:
        self._pipelined_bytes = self._pipelined_bytes + size if self.pipeline else 0
        if self._pipelined_bytes > MAX_PIPELINED_BYTES:
            self._give_up(429, refusals.too_many_pipelined(MAX_PIPELINED_BYTES, "bytes of requests"))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # called for the head; the parser of upgrade.py reads the body
        self._in_body, self._ended_in_read = False, True
        self._stop_timer()  # a head that follows has its own
        super().on_message_complete()
        if self.cycle.response_complete:
            self._await_request()

    def on_response_complete(self) -> None:
        self._exchange = None
        super().on_response_complete()
        if self._running is None:
            return  # the connection is lost
        if self.transport.is_closing():
            self._write_deadline.start()
        self._expect_rest()
        if self._running.response_complete:
            self._mark_evictable()
            self._await_request()
        if self._lingers:
            self._linger()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._mark_evictable()
        cycle.scope[KEEPS] = self._keep  # type: ignore[literal-required]
        if self.draining() or not self._trusted():
            cycle.keep_alive = False
        endpoint = self.direct.get((cycle.scope["method"], cycle.scope["path"]))
        if endpoint is not None:
            exchange = self._exchange = Exchange(cycle, self._linger)
            app = lambda scope, receive, send: endpoint(exchange)  # noqa: E731
        else:
            cycle.transport = AnswerTransport(self.transport, self._close_answered)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def _close_answered(self) -> None:
        """Called by uvicorn where its answer ends the connection."""
        running = self._running
        self._lingers = running is not None and running.response_complete and running.more_body
        if not self._lingers:
            self.transport.close()

    def _mark_evictable(self) -> None:
        """Become the last of the connections that are closed where further ones come."""
        if self not in self.connections or self._places:
            return
        if self in self.waiting:
            self.waiting.renew(self)
        else:
            self.waiting.add(self, self._address)

    @contextlib.contextmanager
    def _keep(self) -> Iterator[None]:
        """Not evictable meanwhile."""
        self.waiting.discard(self)
        self._places += 1
        try:
            yield
        finally:
            self._places -= 1
            self._mark_evictable()

    def _disconnect(self) -> None:
        """Tell the application that the client disconnected: it must neither wait for more nor answer."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if self._exchange is not None:
                self._exchange.disconnected()

    def _await_request(self) -> None:
        """Start the idle timer if no part of a request has arrived; a request that arrives has its own deadline."""
        self._unset_keepalive_if_required()
        if not self._in_head and not self._in_body:
            seconds = self.limits.http_idle_seconds
            self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._write_deadline.start()

    # --- ends of a connection --------------------------------------------------------------------------------------------

    def _give_up(self, status: int, error: BatonError) -> None:
        """Leave the parser by an exception; it then calls send_400_response."""
        self._refusal = (status, error)
        raise ValueError(error.message)

    def send_400_response(self, msg: str) -> None:
        status, error = self._refusal or (400, InvalidRequestError(f"this is not HTTP/1.1: {msg}"))
        self._refuse(status, error)

    def _refuse(self, status: int, error: BatonError) -> None:
        """Send the error, unless an answer has begun, and close the connection."""
        self.pipeline.clear()
        running = self._running
        if running is None or running.response_complete or not running.response_started:
            self.transport.write(closing_answer(status, error))
        self._disconnect()
        self._linger()

    def _linger(self) -> None:
        """Close the connection once its client has sent all, and drop what arrives until then."""
        self._refused = True
        for cycle in (self._running, self.cycle):
            if cycle is not None:
                cycle.body = bytearray()  # no endpoint reads it any more
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._lingering.start()

    def _abort(self) -> None:
        """Abort at once: the number of connections stays bounded however fast they arrive."""
        self._refused = True
        self.connections.discard(self)
        self.waiting.discard(self)
        self._stop_timer()
        self.transport.abort()

    def _expect(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _expect_rest(self) -> None:
        """Start the timer of a head, or of the current request's body; what is behind it may not be read meanwhile."""
        if self._in_head and self._timer is None and not self.flow.read_paused:
            self._expect(self.limits.header_seconds)
        elif self._in_body and self._timer is None and self.cycle is self._running:
            self._expect(self.limits.body_seconds)

    def _late(self, seconds: float) -> None:
        self._timer = None
        self._refuse(408, refusals.late("head" if self._in_head else "body", seconds))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited(
    limits: ConnectionLimits,
    direct: Mapping[tuple[str, str], Endpoint] = MappingProxyType({}),
    draining: Callable[[], bool] = lambda: False,
    trust: Trust = lambda transport: lambda: True,
) -> type[LimitedProtocol]:
    """A protocol class with these limits."""
    shared = {
        "limits": limits,
        "waiting": OpenConnections(),
        "direct": direct,
        "draining": staticmethod(draining),
        "trust": staticmethod(trust),
    }
    return type("Limited", (LimitedProtocol,), shared)
