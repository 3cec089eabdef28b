"""Serves requests that offer another protocol (`Upgrade: h2c`) as if they did not: a server may ignore the offer
(RFC 9110, 7.8). Java's HTTP client and `curl --http2` make it in the first request of a connection.

After such a head the parser expects the other protocol. A new parser therefore reads the rest; it is given the headers
that state the length of the body.
"""

from __future__ import annotations

from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class _Callbacks:
    """The protocol's own callbacks, except those for the head, which have run already."""

    def __init__(self, protocol: HttpToolsProtocol):
        self._protocol = protocol
        self.in_head = True
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self.in_head:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.in_head:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.in_head:
            self._protocol.on_headers_complete()


def read_on(protocol: HttpToolsProtocol, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Give `protocol` a parser for the body of the request with these headers and for the requests after it."""
    callbacks = _Callbacks(protocol)
    protocol.parser = httptools.HttpRequestParser(callbacks)
    # For pipelined requests, as in uvicorn
    protocol.parser.set_dangerous_leniencies(lenient_data_after_close=True)
    framing = b"".join(b"%s: %s\r\n" % pair for pair in headers if pair[0] in _FRAMING)
    protocol.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % framing)
    callbacks.in_head = False
