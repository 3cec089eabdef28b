"""Errors of peers. Long texts are cut before they cross a process border, because gRPC bounds trailing metadata; a time
that is none, and metadata that is no error, change nothing."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from cluster.errors import MAX_WIRE_BYTES, InvalidRequestError, OverloadedError, UnavailableError, from_wire
from cluster.rpc.errors import ERROR_KEY, error_from_rpc, trailing_metadata
from router.frontends.http.errors import error_response
from wire import common_pb2

GRPC_LIMIT = 8192  # bytes of all trailing metadata, status and message included


@pytest.mark.parametrize("text", ["x" * 100_000, "語" * 50_000, "\U0001f642" * 9_999, "\ud800" * 5_000])
def test_a_long_text_is_cut_and_fits(text):
    error = OverloadedError(text, field=text, limit="9", retry_after_seconds=1.0)
    told = from_wire(error.to_wire())
    assert isinstance(told, OverloadedError)
    assert len(told.message.encode()) <= MAX_WIRE_BYTES + 3
    percent_encoded = 3 * len(told.message.encode())
    base64 = sum(-(-len(value) // 3) * 4 for _, value in trailing_metadata(error))
    assert percent_encoded + base64 < GRPC_LIMIT


def test_a_short_text_is_unchanged():
    error = InvalidRequestError("é" * (MAX_WIRE_BYTES // 2), field="f")
    assert error.to_wire().message == error.message


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, -1.0, 1e308])
def test_a_time_that_is_none_is_unknown(seconds):
    """A router would wait for it, and write it into a header."""
    told = from_wire(common_pb2.ErrorDetail(code="OverloadedError", retry_after_seconds=seconds))
    assert isinstance(told, OverloadedError) and told.retry_after_seconds == 0.0
    assert "retry-after" not in error_response(told).headers


class Failed(grpc.RpcError):
    def __init__(self, metadata: Any):
        self._metadata = metadata

    def trailing_metadata(self) -> Any:
        return ((ERROR_KEY, self._metadata),)

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("metadata", [b"\xff" * 9, b"\x0a\xff", "\xff"])
def test_metadata_that_is_no_error_leaves_the_status(metadata):
    assert type(error_from_rpc(Failed(metadata))) is UnavailableError


@pytest.mark.parametrize(
    "details",
    [
        "Ssl handshake failed: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED",
        "Peer name a.example is not in peer certificate",
    ],
)
def test_a_certificate_that_is_not_accepted_is_said_in_words(details):
    class Refused(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return details

    error = error_from_rpc(Refused())
    assert type(error) is UnavailableError and error.message.endswith(details)
    assert error.message.startswith("the server's certificate is not of a trusted authority")
