"""What a request's head must have, beyond what the parser checks."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import InvalidRequestError

_VERSIONS = ("1.0", "1.1")  # the parser also reads 0.9, which has no headers, and 2.0


def why_refused(version: str, headers: Sequence[tuple[bytes, bytes]]) -> InvalidRequestError | None:
    """The error of a head with this HTTP version and these headers, whose names are in lower case; None: it is served.

    By RFC 9112, 3.2, so that a proxy in front and the router cannot read different hosts from one request. The
    value is not checked.
    """
    if version not in _VERSIONS:
        return InvalidRequestError(f"HTTP version {version} is not served; use HTTP/1.1")
    hosts = [name for name, _ in headers].count(b"host")
    if hosts == 1 or (not hosts and version == "1.0"):
        return None
    return InvalidRequestError(f"host: must be sent once, not {hosts} times", field="host", limit="1")
