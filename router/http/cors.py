"""Cross-origin requests: which other origins' pages may ask this router from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

SHOWN_HEADERS = ("x-request-id", "retry-after", "x-should-retry")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Outermost: a browser asks for permission without a key. Keys come in a header of the page's own, so nothing
    is allowed that a browser would send by itself (cookies)."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=list(SHOWN_HEADERS),
    )
