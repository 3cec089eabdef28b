"""The retry hints of errors for OpenAI's clients."""

from __future__ import annotations

import pytest

from cluster.errors import (
    AttemptsExhaustedError,
    BatonError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from router.frontends.http.errors import error_response


@pytest.mark.parametrize("error", [AttemptsExhaustedError("eight workers failed"), InternalError("a fault")])
def test_errors_that_would_only_recur_are_not_retried(error: BatonError) -> None:
    """Those clients repeat every 5xx by themselves."""
    assert error_response(error).headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "error",
    [UnavailableError("no worker"), DeadlineError("late"), OverloadedError("full"), InvalidRequestError("")],
)
def test_everything_else_is_left_to_the_client(error: BatonError) -> None:
    assert "x-should-retry" not in error_response(error).headers
