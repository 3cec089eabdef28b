"""Requirements on a request's head beyond those that the parser checks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.errors import InvalidRequestError
from router.request.limits import MAX_SHOWN

_VERSIONS = ("1.0", "1.1")  # the parser also reads 0.9, which has no headers, and 2.0
# uri-host [ ":" port ] of RFC 9110, 7.2: a name, which may be empty, or an address in brackets. Possessive, or a long
# value would be tried again from each of its characters.
_HOST = re.compile(
    rb"(?:\[(?:[0-9a-f:.]++|v[0-9a-f]++\.[\w.~!$&'()*+,;=:-]++)\]|(?:[\w.~!$&'()*+,;=-]|%[0-9a-f]{2})*+)(?::[0-9]*+)?",
    re.IGNORECASE | re.ASCII,
)


def why_refused(version: str, headers: Sequence[tuple[bytes, bytes]]) -> InvalidRequestError | None:
    """The error of a head with this HTTP version and these headers, whose names are in lower case; None: it is served.

    By RFC 9112, 3.2, so that a proxy in front and the router cannot read different hosts from one request. The
    authority of an absolute target, which would replace the Host, is not read: one router has all hosts.
    """
    if version not in _VERSIONS:
        return InvalidRequestError(f"HTTP version {version} is not served; use HTTP/1.1")
    # The parser takes `gzip, chunked` too, and decodes the chunks only
    coding = next((value for name, value in headers if name == b"transfer-encoding"), b"chunked")
    if coding.lower() != b"chunked":
        shown = coding[:MAX_SHOWN].decode("latin-1")
        text = f"transfer-encoding: {shown!r} is not supported; use chunked, or a content-length"
        return InvalidRequestError(text, field="transfer-encoding", limit="chunked")
    hosts = [value for name, value in headers if name == b"host"]
    if not hosts and version == "1.0":
        return None
    if len(hosts) != 1:
        return InvalidRequestError(
            f"host: must be sent once, not {len(hosts)} times", field="host", limit="1"
        )
    if _HOST.fullmatch(hosts[0]) is None:
        shown = hosts[0][:MAX_SHOWN].decode("latin-1")
        return InvalidRequestError(f"host: {shown!r} is not a host, with or without a port", field="host")
    return None
