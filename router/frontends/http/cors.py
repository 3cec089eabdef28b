"""Cross-origin requests: lets pages of other origins call this router from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

SHOWN_HEADERS = ("x-request-id", "retry-after", "x-should-retry")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap `app` in CORS for these origins; without any, return it unchanged.

    It must be the outermost layer, because a browser's preflight request carries no API key. Credentials (cookies) are
    not allowed: keys come in a header.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=list(SHOWN_HEADERS),
    )
