"""How many calls of a gRPC server may wait to be accepted."""

from __future__ import annotations


def pending_calls(always: int) -> list[tuple[str, int]]:
    """Channel arguments of a server that never refuses a call while less than `always` wait, and lets no more than a
    quarter beyond that wait.

    gRPC for Python accepts calls one by one, so a flood makes every other call wait for its whole queue. gRPC's own values
    are 1,000 and 3,000: between the two it refuses at random, the more of them wait the likelier. A refused call ends with
    CANCELLED, which clients do not repeat; so an honest burst must fit.
    """
    return [
        ("grpc.server.max_pending_requests", always),
        ("grpc.server.max_pending_requests_hard_limit", always + always // 4),
    ]
