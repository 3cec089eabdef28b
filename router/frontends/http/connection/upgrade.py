"""Serves requests that offer another protocol (`Upgrade: h2c`) as if they did not: a server may ignore the offer
(RFC 9110, 7.8). Java's HTTP client and `curl --http2` make it in the first request of a connection.

After such a head the parser expects the other protocol. A new parser therefore reads the rest; it is given the headers
that state the length of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class _Callbacks:
    """The protocol's own callbacks, except those for the head, which have run already."""

    def __init__(self, protocol: HttpToolsProtocol):
        self.in_head = True
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete
        self.on_message_begin = self._after_head(protocol.on_message_begin)
        self.on_url = self._after_head(protocol.on_url)
        self.on_header = self._after_head(protocol.on_header)
        self.on_headers_complete = self._after_head(protocol.on_headers_complete)

    def _after_head(self, callback: Callable[..., None]) -> Callable[..., None]:
        return lambda *values: None if self.in_head else callback(*values)


def read_on(protocol: HttpToolsProtocol, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Give `protocol` a parser for the body of the request with these headers and for the requests after it."""
    callbacks = _Callbacks(protocol)
    protocol.parser = httptools.HttpRequestParser(callbacks)
    # For pipelined requests, as in uvicorn
    protocol.parser.set_dangerous_leniencies(lenient_data_after_close=True)
    framing = b"".join(b"%s: %s\r\n" % pair for pair in headers if pair[0] in _FRAMING)
    protocol.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % framing)
    callbacks.in_head = False
