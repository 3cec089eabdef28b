"""Text of what a Redis client without `decode_responses` returns."""

from __future__ import annotations


def decoded(value: bytes | str) -> str:
    assert isinstance(value, bytes)
    return value.decode()
