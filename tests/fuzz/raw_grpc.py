"""Frames of HTTP/2 and gRPC as bytes, and the ends that count as clean."""

from __future__ import annotations

import grpc
from hypothesis import strategies as st

CLEAN = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


frames = st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=30)).map(
    lambda f: len(f[3]).to_bytes(3, "big") + bytes(f[:2]) + f[2].to_bytes(4, "big") + f[3]
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
