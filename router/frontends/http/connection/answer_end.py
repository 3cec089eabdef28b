"""The end of an answer of the ASGI application. uvicorn closes the connection at once where the answer does; with unread
bytes of the request's body the system then resets it, and a client that sends all of a body before it reads loses the
answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class AnswerTransport:
    """What a cycle of uvicorn writes its answer to. `close` is called in place of the transport's."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]):
        self.write, self.is_closing = transport.write, transport.is_closing
        self.close = close
