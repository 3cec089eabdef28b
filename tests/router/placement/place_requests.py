"""Requests to a placement, and waiting for what it does."""

from __future__ import annotations

import asyncio
import secrets
import time

from cluster.protocol.block_hash import hash_blocks, index_keys, make_salt, pack_tokens
from router.placement.types import PlacementRequest


def hashes(tokens: list[int]) -> list[bytes]:
    return hash_blocks(pack_tokens(tokens), 16, secret=b"s", salt=make_salt("m"))


def request(tokens: list[int], **more) -> PlacementRequest:
    return PlacementRequest(secrets.token_bytes(16), index_keys(hashes(tokens)), len(tokens), 32, **more)


async def eventually(check, seconds: float = 5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := check():
            return result
        await asyncio.sleep(0.02)
    raise AssertionError("not in time")
