"""Cross-origin headers, so that pages of other origins may call the router."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message

from router.frontends.http.connection.exchange import RawHeaders

SHOWN_HEADERS = ("x-request-id", "request-id", "retry-after", "x-should-retry")  # to pages of other origins


class Cors(CORSMiddleware):
    """It must be the outermost layer, because a browser's preflight request carries no API key. Credentials (cookies) are
    not allowed: keys come in a header."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]):
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=list(SHOWN_HEADERS),
        )

    async def headers_for(self, request: Headers) -> RawHeaders:
        """Headers for the answer to a request that does not pass through this layer."""
        start: Message = {"type": "http.response.start", "headers": []}
        await self.send(start, _discard, request)
        added: RawHeaders = start["headers"]
        return added


async def _discard(message: Message) -> None:
    pass
