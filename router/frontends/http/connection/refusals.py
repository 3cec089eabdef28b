"""Errors of a whole connection, or of a head."""

from __future__ import annotations

from cluster.errors import InvalidRequestError, OverloadedError


def too_many(limit: int) -> OverloadedError:
    why = f"this router has {limit} connections with a request each; try again, or raise max_http_connections"
    return OverloadedError(why, limit=str(limit))


def too_large(limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"headers: at most {limit} bytes", field="headers", limit=str(limit))
