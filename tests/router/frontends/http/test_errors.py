"""The retry hints of errors for OpenAI's clients."""

from __future__ import annotations

import orjson
import pytest

from cluster.errors import (
    AttemptsExhaustedError,
    BatonError,
    DeadEndError,
    DeadlineError,
    EngineBusyError,
    GrammarDeadEndError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    from_wire,
)
from router.frontends.http.errors import error_response


@pytest.mark.parametrize("error", [AttemptsExhaustedError("eight workers failed"), InternalError("a fault")])
def test_errors_that_would_only_recur_are_not_retried(error: BatonError) -> None:
    """Those clients repeat every 5xx by themselves."""
    assert error_response(error).headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("no worker"),
        DeadlineError("late"),
        OverloadedError("full"),
        InvalidRequestError(""),
        EngineBusyError("busy"),
    ],
)
def test_everything_else_is_left_to_the_client(error: BatonError) -> None:
    assert "x-should-retry" not in error_response(error).headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_busy_worker_is_no_fault_of_the_client(path: str) -> None:
    """Also once the error has come from a worker."""
    busy = EngineBusyError("this worker is too busy", field="grammar", retry_after_seconds=1.5)
    answer = error_response(from_wire(busy.to_wire()), path)
    shown = orjson.loads(answer.body)["error"]
    assert answer.headers["retry-after"] == "2"
    if path == "/v1/messages":
        assert (answer.status_code, shown["type"]) == (529, "overloaded_error")
    else:
        assert (answer.status_code, shown["type"], shown["code"]) == (503, "server_error", "overloaded")


@pytest.mark.parametrize(
    ("kind", "code"), [(DeadEndError, "dead_end"), (GrammarDeadEndError, "grammar_dead_end")]
)
def test_options_that_leave_no_token_are_the_clients(kind: type[DeadEndError], code: str) -> None:
    error = from_wire(kind("every token is excluded", field="allowed_token_ids").to_wire())
    answer = error_response(error)
    shown = orjson.loads(answer.body)["error"]
    assert (answer.status_code, shown["type"], shown["code"]) == (400, "invalid_request_error", code)
    assert shown["param"] == "allowed_token_ids" and "x-should-retry" not in answer.headers
