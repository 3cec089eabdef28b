"""Reading a request's body within its limits."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from cluster.errors import CancelledError, InvalidRequestError, RequestTooLargeError
from router.http.nesting import depth_of

INLINE_BYTES = 1 << 16


async def read_json(request: Request, max_bytes: int, max_depth: int) -> dict[str, Any]:
    """The body as an object. Raises RequestTooLargeError as soon as that is known, InvalidRequestError after
    reading, CancelledError when the client has gone meanwhile."""
    raw = bytearray()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > max_bytes:
                raise RequestTooLargeError(
                    f"the body exceeds {max_bytes} bytes", field="body", limit=str(max_bytes)
                )
    except ClientDisconnect:
        raise CancelledError("the client has gone") from None
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", field="body") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object", field="body")
    # Each level begins with a bracket: most bodies have too few of them to need a scan.
    if raw.count(b"[") + raw.count(b"{") > max_depth and await _depth(raw) > max_depth:
        raise InvalidRequestError(
            f"the body is nested deeper than {max_depth}", field="body", limit=str(max_depth)
        )
    return body


async def _depth(raw: bytearray) -> int:
    """A long body is scanned on a thread: 8 MiB of short lists take 0.4 s, and numpy releases the interpreter."""
    return depth_of(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(depth_of, raw)
