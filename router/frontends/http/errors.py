"""Error answers in the form that OpenAI's clients expect."""

from __future__ import annotations

import http
import logging
import math
from typing import Any

import orjson
from starlette.responses import Response

from cluster.errors import (
    BatonError,
    ContextLengthError,
    DeadEndError,
    DrainingError,
    EngineBusyError,
    ForbiddenError,
    GrammarDeadEndError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
    UnauthenticatedError,
    UnknownModelError,
    UnsupportedFieldError,
    cut,
)
from router.frontends.http.anthropic.errors import is_messages, messages_error_response

log = logging.getLogger(__name__)
RETRY_SECONDS = 1
_CODES: dict[type[BatonError], str] = {
    UnknownModelError: "model_not_found",
    ContextLengthError: "context_length_exceeded",
    UnsupportedFieldError: "unsupported_parameter",
    RequestTooLargeError: "request_too_large",
    OverloadedError: "overloaded",
    UnauthenticatedError: "invalid_api_key",
    ForbiddenError: "insufficient_permissions",
    DrainingError: "draining",
    EngineBusyError: "overloaded",
    DeadEndError: "dead_end",
    GrammarDeadEndError: "grammar_dead_end",
}
_OF_THE_REQUEST = (
    InvalidRequestError,
    RequestTooLargeError,
    UnauthenticatedError,
    ForbiddenError,
    DeadEndError,
)


def error_body(error: BatonError) -> dict[str, Any]:
    kind = "rate_limit_error" if isinstance(error, OverloadedError) else "server_error"
    if isinstance(error, _OF_THE_REQUEST):
        kind = "invalid_request_error"
    return {
        "error": {
            "message": cut(error.message),
            "type": kind,
            "param": cut(error.field) or None,
            "code": _CODES.get(type(error)),
        }
    }


def error_response(error: BatonError, path: str = "", *, as_anthropic: bool = False) -> Response:
    """The answer to an error, in the form of the path's clients, or Anthropic's."""
    if as_anthropic or is_messages(path):
        return messages_error_response(error, error_headers(error))
    return Response(
        orjson.dumps(error_body(error)),
        status_code=error.http_status,
        media_type="application/json",
        headers=error_headers(error),
    )


def error_headers(error: BatonError) -> dict[str, str]:
    headers = {}
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, DrainingError):
        headers["connection"] = "close"  # the client's next request must reach another router
    if error.http_status >= 500 and not error.retryable:
        headers["x-should-retry"] = "false"  # OpenAI's clients retry any other 5xx
    if error.retry_after_seconds:
        headers["retry-after"] = str(math.ceil(error.retry_after_seconds))
    return headers


def typed(error: Exception, path: str) -> BatonError:
    """The error itself; an unexpected one is logged, and its answer gives no details."""
    if isinstance(error, BatonError):
        return error
    log.error("%s failed", path, exc_info=error)
    return InternalError("internal error")


def failure_response(error: Exception, path: str, *, as_anthropic: bool = False) -> Response:
    """The answer to any error, as `error_response`."""
    return error_response(typed(error, path), path, as_anthropic=as_anthropic)


def closing_answer(status: int, error: BatonError) -> bytes:
    """The bytes of an answer after which the connection is closed."""
    body = orjson.dumps(error_body(error))
    retry = f"retry-after: {RETRY_SECONDS}\r\n" if status == 429 else ""
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body
