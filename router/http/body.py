"""Reading a request's body within its limits."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from cluster.errors import CancelledError, InvalidRequestError, RequestTooLargeError

_CONTAINERS = frozenset({dict, list})


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
    # Each level begins with a bracket: most bodies have too few of them to need a walk.
    if raw.count(b"[") + raw.count(b"{") > max_depth and _depth(body, max_depth) > max_depth:
        raise InvalidRequestError(
            f"the body is nested deeper than {max_depth}", field="body", limit=str(max_depth)
        )
    return body


def _depth(value: Any, left: int) -> int:
    """How deeply lists and objects nest; stops counting past `left`."""
    if left < 0 or not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    if _CONTAINERS.isdisjoint(map(type, inner)):
        return 1  # a list of scalars needs no walk over its elements
    return 1 + max((_depth(one, left - 1) for one in inner if isinstance(one, dict | list)), default=0)
