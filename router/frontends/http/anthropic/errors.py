"""Error answers in the form that Anthropic's clients expect."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from cluster.errors import BatonError, UnsupportedFieldError, cut

PATH = "/v1/messages"
OVERLOADED = 529
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# By this the client's tool runner sends the request again without a thread, and all messages with those that follow
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
ERROR_TYPES = (*dict.fromkeys(_TYPES.values()), "api_error")


def is_messages(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def messages_status(error: BatonError) -> int:
    """503 is 529 here: clients tell a crowded server from a broken one by it."""
    return OVERLOADED if error.http_status == 503 else error.http_status


def messages_error_body(error: BatonError, request_id: str, status: int = 0) -> dict[str, Any]:
    """`status`: default: the error's own."""
    kind = _TYPES.get(status or messages_status(error), "api_error")
    shown: dict[str, Any] = {"type": kind, "message": cut(error.message)}
    if isinstance(error, UnsupportedFieldError) and error.field == "thread":
        shown["details"] = _NO_THREADS
    return {"type": "error", "error": shown, "request_id": request_id}


def messages_error_response(
    error: BatonError, headers: Mapping[str, str], request_id: str = "", status: int = 0
) -> Response:
    """`request_id`: one whose header the answer has already; default: a new one."""
    given = {**headers}
    if not request_id:
        request_id = given["request-id"] = new_request_id()
    return Response(
        orjson.dumps(messages_error_body(error, request_id, status)),
        status_code=status or messages_status(error),
        media_type="application/json",
        headers=given,
    )
