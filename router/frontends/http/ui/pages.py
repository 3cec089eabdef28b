"""Serves the page's files from memory, by a fixed table of paths: no text of a client becomes a file name.

The policy lets the page run its own scripts, use its own styles and call this router, and nothing else. With
`require-trusted-types-for` the browser makes no markup from text: a model's output cannot become a script.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser asks at every visit, so that page and router have the same version; the answer is mostly 304.
    "cache-control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_SCRIPTS = ("api", "app", "charts", "chat", "dom", "format", "header", "layout", "tiles", "topology")
_FILES = {
    "/ui": "index.html",
    "/ui/style.css": "style.css",
    "/ui/icon.svg": "icon.svg",
    **{f"/ui/{name}.js": f"{name}.js" for name in (*_SCRIPTS, "turn", "waterfall", "workers")},
}
PATHS = frozenset(_FILES)


@dataclass(frozen=True)
class Page:
    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def read_pages() -> dict[str, Page]:
    """The pages by path."""
    folder = resources.files("router.frontends.http.ui").joinpath("static")
    return {path: _page(name, folder.joinpath(name).read_bytes()) for path, name in _FILES.items()}


def _page(name: str, body: bytes) -> Page:
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return Page(body, _TYPES[name.rpartition(".")[2]], etag)
