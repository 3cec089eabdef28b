"""Long error texts, for example from a peer, are cut before they cross a process border: gRPC bounds trailing metadata."""

from __future__ import annotations

import pytest

from cluster.errors import MAX_WIRE_BYTES, InvalidRequestError, OverloadedError, from_wire
from cluster.rpc.errors import trailing_metadata

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
