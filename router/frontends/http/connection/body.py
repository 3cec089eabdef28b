"""Reads a request's body within its limits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from cluster.config.router import RequestLimits
from cluster.errors import CancelledError, InvalidRequestError, RequestTooLargeError
from router.admission.admission import HeldBytes
from router.admission.low_priority import LowPriority
from router.request.json_scan import MAX_COST_PER_BYTE, SCAN_BYTES, JsonScan, path_behind
from router.request.limits import MAX_SHOWN
from router.text.written_numbers import is_too_large

_KEPT = b'"tool_use"'


class KeptBody(dict[str, Any]):
    """A body with its text, which has numbers as the client wrote them."""

    def __init__(self, body: dict[str, Any], text: bytes | bytearray):
        super().__init__(body)
        self.text = text


async def _at_once(raw: bytearray) -> None:
    """No turn to wait for."""


async def read_json(
    request: Request,
    limits: RequestLimits,
    held: HeldBytes,
    low_priority: LowPriority,
    turn: Callable[[bytearray], Awaitable[None]] = _at_once,
) -> dict[str, Any]:
    """Return the body as an object. It is scanned while it arrives, and parsed only if it is within its limits: the parser
    holds the interpreter lock, on any thread, while it makes objects. `turn` is awaited before, with the whole body.

    The body is a KeptBody if it may have calls whose arguments are objects (`input` of Anthropic's `tool_use`).

    Raises RequestTooLargeError, OverloadedError and InvalidRequestError as soon as they are certain, CancelledError if the
    client disconnects.
    """
    raw, scan = bytearray(), JsonScan()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > limits.max_body_bytes:
                raise RequestTooLargeError(
                    f"the body exceeds {limits.max_body_bytes} bytes",
                    field="body",
                    limit=str(limits.max_body_bytes),
                )
            held.grow_to(len(raw))
            while len(raw) - scan.seen > SCAN_BYTES:  # two reads make up to 128 KiB
                await low_priority.step(held.tenant)
                _scan(scan, raw, limits)
    except ClientDisconnect:
        raise CancelledError("the client disconnected") from None
    await turn(raw)
    if scan.seen or _may_exceed(raw, limits):
        _scan(scan, raw, limits)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        _check_coding(request.headers.get("content-encoding", ""))
        raise _unparsed(error) from None
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object", field="body")
    return KeptBody(body, raw) if _KEPT in raw else body


def _check_coding(coding: str) -> None:
    """Bodies are not decompressed: their JSON would be called invalid. Raises InvalidRequestError."""
    if coding.strip().lower() not in ("", "identity"):
        text = f"content-encoding: {coding[:MAX_SHOWN]!r} is not supported; send the body as plain JSON"
        raise InvalidRequestError(text, field="content-encoding", limit="identity")


def _unparsed(error: orjson.JSONDecodeError) -> InvalidRequestError:
    """Names the field where a number is valid JSON, but larger than the parser reads."""
    if is_too_large(error):
        with contextlib.suppress(ValueError):  # where no number may be
            field = path_behind(error.doc[: error.pos].encode()) or "body"
            limit = f"{sys.float_info.max:.2g}"
            return InvalidRequestError(f"{field}: a number above {limit}", field=field, limit=limit)
    return InvalidRequestError(f"the body is not valid JSON: {error}", field="body")


async def discard_body(request: Request, low_priority: LowPriority, tenant: str) -> None:
    """Read the body and drop it: a client that still sends would lose an answer that closes the connection."""
    with contextlib.suppress(ClientDisconnect):
        async for _ in request.stream():
            await low_priority.step(tenant)


def _may_exceed(raw: bytearray, limits: RequestLimits) -> bool:
    """Whether a scan is needed: most bodies are too short, and have too few brackets, to exceed the limits."""
    return (
        len(raw) * MAX_COST_PER_BYTE > limits.max_json_elements
        or raw.count(b"[") + raw.count(b"{") > limits.max_json_depth
    )


def _scan(scan: JsonScan, raw: bytearray, limits: RequestLimits) -> None:
    """Scan the next SCAN_BYTES that were not scanned yet. Raises InvalidRequestError."""
    scan.read(raw[scan.seen : scan.seen + SCAN_BYTES])
    if scan.depth > limits.max_json_depth:
        message = f"the body is nested deeper than {limits.max_json_depth}"
        raise InvalidRequestError(message, field="body", limit=str(limits.max_json_depth))
    most = limits.max_json_elements
    if scan.elements > most:
        message = f"the body has more than {most} elements; lists, objects and their members count as 16, texts as 8"
        raise InvalidRequestError(message, field="body", limit=str(most))
