"""A bound on the calls that wait for a gRPC server to accept them."""

from __future__ import annotations

MAX_PENDING_CALLS = 1 << 16  # a waiting call takes kilobytes: a higher bound would not protect the memory


def pending_calls(always: int) -> list[tuple[str, int]]:
    """Channel arguments of a server that refuses no call while fewer than `always` wait, and lets at most a quarter more
    wait. `always` above MAX_PENDING_CALLS counts as that.

    gRPC for Python accepts calls one by one, so a flood makes every other call wait for its whole queue. gRPC's own values
    are 1,000 and 3,000; between the two it refuses at random, more often the more calls wait. A refused call ends with
    CANCELLED, which clients do not retry, so legitimate bursts must fit.
    """
    always = min(always, MAX_PENDING_CALLS)
    return [
        ("grpc.server.max_pending_requests", always),
        ("grpc.server.max_pending_requests_hard_limit", always + always // 4),
    ]
