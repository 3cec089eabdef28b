"""Errors of a whole connection, or of a head."""

from __future__ import annotations

from cluster.errors import DeadlineError, InvalidRequestError, OverloadedError


def too_many(limit: int) -> OverloadedError:
    why = f"this router has {limit} connections with a request each; try again, or raise max_http_connections"
    return OverloadedError(why, limit=str(limit))


def too_large(limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"headers: at most {limit} bytes", field="headers", limit=str(limit))


def too_many_headers(most: int) -> InvalidRequestError:
    return InvalidRequestError(f"headers: at most {most}", field="headers", limit=str(most))


def too_many_pipelined(most: int, what: str) -> OverloadedError:
    text = f"at most {most} {what} before their answers"
    return OverloadedError(text, field="pipeline", limit=str(most))


def late(what: str, seconds: float) -> DeadlineError:
    return DeadlineError(f"the request's {what} did not arrive within {seconds:g} s")
